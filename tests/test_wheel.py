"""The wheel: every file of the packages but studies; its commands run outside of the repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, cpu_environment

PACKAGES = {"ttcd_jax": "ttcd_jax", "experiments": "experiments", "kernels/ttcd_kernels": ""}
TINY = ["--param=RunConfig.steps=1", "--param=RunConfig.batch_size=2"]
TEXT = ["--gin=text.gin", "--param=TEXT='text'", "--param=TextConfig.seq_len=128", *TINY]
PPL = ["--task=ppl", "--max_rows=2", "--seq_len=32"]
# Each in the folder of the ones before it.
COMMANDS = {
    "launch": [*TEXT, "--run_dir=run"],
    "evaluate": ["--run_dir=run", *PPL],
    "report": ["--run_dir=run", "--output=page"],
    "generate": ["--run_dir=run", "--prompt_file=text/0.txt", "--max_new_tokens=2"],
    "convert": ["export", "--format=huggingface", "run", "exported"],
    "prepare_data": ["--input=text", "--output=records", "--train_tokenizer=300"],
    "study": ["--help"],
    "harness": ["--help"],
}
# Each in a fork of a process that has imported jax.
FORKS = """
import json, os, runpy, sys
import ttcd_jax.run.training
for name, *line in json.loads(sys.argv[1]):
    sys.argv[1:] = line
    if not os.fork():
        runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the files that git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in _tracked("pyproject.toml", "README.md", "LICENSE", *PACKAGES):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "source" / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    line = [sys.executable, "-m", "pip", "wheel", *options, str(folder / "source")]
    subprocess.run(line, check=True, capture_output=True, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


def _tracked(*paths: str) -> list[str]:
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.check_output(line, cwd=ROOT, text=True)
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


def test_the_wheel_has_every_file_of_the_packages(wheel):
    names = {name.removeprefix("kernels/") for name in _tracked(*PACKAGES)}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = ("experiments/studies/", "experiments/records/")
    names = {name for name in names if not name.startswith(own)}
    assert found == {name for name in names if not name.endswith(".md")}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a program with the wheel, and the packages that it needs, in a folder elsewhere."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "packages")
    (folder / "text").mkdir()
    (folder / "sweep" / "records").mkdir(parents=True)
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_text(f"Sentence {number} of a text.\n" * 20)
    # Without `site` no file of the installed packages adds the repository.
    others = [path for path in sys.path if path.endswith("site-packages")]
    packages = os.pathsep.join([str(folder / "packages"), *others])

    def run(*arguments: str, status: int = 0) -> str:
        line = [sys.executable, "-S", *arguments]
        options = {"cwd": folder, "capture_output": True, "text": True, "timeout": 280}
        alone = {"PYTHONNOUSERSITE": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(line, env=cpu_environment(PYTHONPATH=packages, **alone), **options)
        assert done.returncode == status, done.stderr[-3000:]
        assert str(ROOT / "ttcd_jax") not in done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_commands_run_from_the_wheel(installed):
    place = installed("-c", "import ttcd_jax, ttcd_kernels, experiments; print(ttcd_jax.__file__)")
    assert "packages/ttcd_jax" in place
    installed("-c", FORKS, json.dumps([[name, *line] for name, line in COMMANDS.items()]))
    study = installed("-m", "experiments.report", "--run_dir=sweep", status=2)
    assert "only a checkout shows it" in study
