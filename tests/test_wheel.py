"""Both wheels: every file of the packages; the commands run outside of the repository."""

import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import ROOT, cpu_environment

# Folders of the repository, and where a wheel has them.
FOLDERS = {
    "ttcd_jax": "ttcd_jax",
    "experiments/configs": "ttcd_jax/configs",
    "experiments/cluster": "ttcd_jax/cluster",
    "kernels/ttcd_kernels": "ttcd_kernels",
}
BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
TINY = [f"--param=RunConfig.{x}" for x in ("steps=3", "batch_size=2", "log_every=1")]
TEXT = ["--gin=text.gin", "--param=TEXT='text'", "--param=TextConfig.seq_len=128", *TINY]
PPL = ["--task=ppl", "--max_rows=2", "--seq_len=32"]
# Each in the folder of the ones before it.
COMMANDS = {
    "launch": [*TEXT, "--run_dir=run"],
    "evaluate": ["--run_dir=run", *PPL],
    "report": ["--run_dir=run", "--output=page"],
    "generate": ["--run_dir=run", "--prompt_file=text/0.txt", "--max_new_tokens=2"],
    "convert": ["export", "--format=huggingface", "run", "exported"],
    "prepare": ["--input=text", "--output=records", "--train_tokenizer=300"],
    "study": ["--help"],
    "lm_eval": ["--help"],
}
# Of the examples that read any, after the commands.
ARGUMENTS = {
    "book_memory": ["run", "memory", "text/0.txt"],
    "train_on_your_iterator": ["a"],
    "continue_from_checkpoint": ["a", "b"],
}
# Each in a fork of a process that has imported jax.
FORKS = """
import json, os, runpy, sys
import ttcd_jax.run.training
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line
    if not os.fork():
        runpy.run_module("ttcd_jax", run_name="__main__", alter_sys=True)
    assert os.wait()[1] == 0, line
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    """The wheels of the files that git knows, of `ttcd_jax` and of `ttcd_kernels`."""
    folder = tmp_path_factory.mktemp("wheels")
    beside = [*BESIDE, *(f"kernels/{name}" for name in BESIDE)]
    for name in _tracked(*beside, *FOLDERS):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "source" / name)
    sources = [str(folder / "source"), str(folder / "source/kernels")]
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    line = [sys.executable, "-m", "pip", "wheel", *options, *sources]
    subprocess.run(line, check=True, capture_output=True, timeout=120)
    return sorted(folder.glob("*.whl"))


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"Sentence {number} of a text.\n" * 20)


def _tracked(*paths: str) -> list[str]:
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.check_output(line, cwd=ROOT, text=True)
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


def test_the_wheels_have_every_file_of_the_packages(wheels):
    expected = set()
    for name in _tracked(*FOLDERS):
        folder = next(folder for folder in FOLDERS if name.startswith(f"{folder}/"))
        expected |= {FOLDERS[folder] + name.removeprefix(folder)} - {f"{folder}/README.md"}
    for wheel in wheels:
        package = wheel.name.partition("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert found == {name for name in expected if name.startswith(f"{package}/")}


def test_a_registry_shows_what_needs_no_repository(wheels):
    versions = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" in name]
            assert any(name.endswith("/licenses/LICENSE") for name in names)
            path = next(name for name in names if name.endswith("/METADATA"))
            metadata = email.message_from_bytes(archive.read(path))
        links = re.findall(r"""\]\(([^)]*)|(?:src|href)=["']([^"']*)""", metadata.get_payload())
        assert [link for link in links if not "".join(link).startswith("https://")] == []
        assert metadata["Author"]
        assert metadata["Keywords"]
        versions[metadata["Name"]] = metadata["Version"], metadata.get_all("Requires-Dist")
    assert f"ttcd-kernels=={versions['ttcd-kernels'][0]}" in versions["ttcd-jax"][1]


def test_links_of_a_registry_are_those_of_the_source(tmp_path, monkeypatch):
    project = (ROOT / "pyproject.toml").read_text().replace("\n[project.urls]\n", "\n[other]\n")
    (tmp_path / "pyproject.toml").write_text(
        f'{project}\n[project.urls]\nSource = "https://x.org/y"'
    )
    shutil.copyfile(ROOT / "README.md", tmp_path / "README.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("setuptools.setup", given := Mock())
    runpy.run_path(str(ROOT / "setup.py"))
    shown = given.call_args.kwargs["long_description"]
    page = "[running](https://x.org/y/blob/HEAD/docs/running.md#stop-resume-change)"
    assert page in shown
    assert "docs/method.svg" not in shown
    assert re.findall(r"\]\((?!https://)", shown) == []


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """Runs a program with the wheel, and the packages that it needs, in a folder elsewhere."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(folder / "packages")
    write_texts(folder / "text")
    (folder / "sweep" / "records").mkdir(parents=True)
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
    place = installed("-c", "import ttcd_jax, ttcd_kernels; print(ttcd_jax.__file__)")
    assert "packages/ttcd_jax" in place
    installed("-c", FORKS, json.dumps([[name, *line] for name, line in COMMANDS.items()]))
    study = installed("-m", "ttcd_jax", "report", "--run_dir=sweep", status=2)
    assert "only a checkout shows it" in study
