"""Both wheels beside the oldest and the newest of what they need, in fresh environments and outside
of the repository: `make ends`, which builds the wheels. Needs a registry; most of it is waiting."""

import email
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, cpu_environment
from packaging.requirements import Requirement

from ttcd_jax.run.reporting import read_metrics

TINY = ["--param=TextConfig.seq_len=128", "--param=RunConfig.batch_size=2"]
TINY += ["--param=RunConfig.steps=3", "--param=RunConfig.log_every=1"]
LOSSES = (5.7011, 4.4963, 3.9010)  # of the commands below, on every jax
COMMANDS = {
    "launch": ["--gin=text.gin", "--param=TEXT='text'", *TINY, "--run_dir=run"],
    "evaluate": ["--run_dir=run", "--task=ppl", "--max_rows=2", "--seq_len=32"],
    "generate": ["--run_dir=run", "--prompt_file=text/0.txt", "--max_new_tokens=2"],
    "convert": ["export", "--format=huggingface", "run", "exported"],
    "report": ["--run_dir=run", "--output=page"],
    "prepare": ["--input=text", "--output=records", "--train_tokenizer=300"],
}
EXAMPLES = {
    "train_on_your_iterator": ["counting"],
    "continue_from_checkpoint": ["counting", "grown"],
    **dict.fromkeys(("block_in_nnx", "block_in_linen", "fast_mlp_on_your_attention"), ()),
    **dict.fromkeys(("train_added_parameters", "your_decode_loop"), ()),
}


@pytest.fixture(scope="module")
def wheels() -> list[Path]:
    """The wheels of `ttcd_jax` and `ttcd_kernels`."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["ttcd_jax", "ttcd_kernels"]
    return wheels


def _oldest(wheels: list[Path]) -> str:
    """Constraints that pin every direct dependency to its lower bound."""
    pins = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            path = next(name for name in archive.namelist() if name.endswith("/METADATA"))
            metadata = email.message_from_bytes(archive.read(path))
        for needed in map(Requirement, metadata.get_all("Requires-Dist")):
            if needed.marker is None:
                (lower,) = (x.version for x in needed.specifier if x.operator in (">=", "=="))
                pins.add(f"{needed.name}=={lower}\n")
    return "".join(sorted(pins))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("end", "python"), [("oldest", "3.12"), ("newest", "3.13")])
def test_installs_and_runs_at_both_ends(end, python, wheels, tmp_path):
    place, binaries = tmp_path / "place", tmp_path / "environment/bin"
    (place / "text").mkdir(parents=True)
    for number in range(30):
        (place / "text" / f"{number}.txt").write_text(f"Sentence {number} of a text.\n" * 20)
    shutil.copytree(ROOT / "examples", place / "examples", ignore=lambda *_: ["model"])
    environment = cpu_environment(PYTHONNOUSERSITE="1", PYENV_VERSION=python)
    environment.pop("PYTHONPATH", None)

    def run(*line: str | Path) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(line, cwd=place, env=environment, **pipes)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    try:
        run(f"python{python}", "-m", "venv", binaries.parent)
    except (FileNotFoundError, AssertionError) as error:
        pytest.skip(f"no python{python} that makes environments: {error}")
    pip = [binaries / "python", "-m", "pip"]
    if subprocess.run([*pip, "index", "versions", "jax"], capture_output=True).returncode:
        pytest.skip("no registry of packages can be reached")
    (place / "constraints.txt").write_text(_oldest(wheels) if end == "oldest" else "")
    install = [*pip, "install", "--quiet", "--constraint", place / "constraints.txt"]
    run(*install, wheels[1])
    run(binaries / "python", "examples/kernels_alone.py")
    # One end has no extra: what it lacks ends no command.
    run(*install, wheels[1], f"{wheels[0]}[report,eval]" if end == "newest" else wheels[0])
    print(run(*pip, "freeze"))
    for name, options in COMMANDS.items():
        output = run(binaries / "ttcd", name, *options)
        if name == "evaluate":
            assert ("install ttcd_jax[report]" in output) == (end == "oldest")
    for name, options in EXAMPLES.items():
        run(binaries / "python", f"examples/{name}.py", *options)
    losses = [record["loss"] for record in read_metrics(place / "run/metrics.jsonl")]
    assert losses == pytest.approx(LOSSES, abs=1e-4)
    assert (place / "page/index.html").exists() == (end == "newest")
    assert {path.stem for path in (place / "examples").glob("*.py")} == {"kernels_alone", *EXAMPLES}
    assert os.listdir(place / "exported")
