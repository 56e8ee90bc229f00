"""Both wheels beside the oldest and the newest of what they need, in fresh environments and outside
of the repository: `make ends`, which builds the wheels and needs a registry of packages."""

import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ROOT, cpu_environment
from packaging.requirements import Requirement
from test_repository import KERNELS, PROJECT
from test_wheel import ARGUMENTS, COMMANDS, write_texts

from ttcd_jax.run.reporting import read_metrics

LOSSES = (5.7011, 4.4963, 3.9010)
OTHERS = [path.stem for path in ROOT.glob("examples/*.py") if path.stem not in ARGUMENTS]


def _lower_bounds() -> set[str]:
    """The oldest of what both packages need, as lines of constraints."""
    needed = map(Requirement, [*PROJECT["dependencies"], *KERNELS["dependencies"]])
    lower = {x.name: [y for y in x.specifier if y.operator in (">=", "==")] for x in needed}
    return {f"{name}=={one.version}\n" for name, (one,) in lower.items()}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("end", "python"), [("oldest", "3.12"), ("newest", "3.13")])
def test_installs_and_runs_at_both_ends(end, python, tmp_path):
    place, binaries = tmp_path / "place", tmp_path / "environment/bin"
    shutil.copytree(ROOT / "examples", place / "examples", ignore=lambda *_: ["model"])
    write_texts(place / "text")
    environment = cpu_environment(PYTHONNOUSERSITE="1", PYENV_VERSION=python)
    environment.pop("PYTHONPATH", None)

    def run(*line: str | Path) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(line, cwd=place, env=environment, **pipes)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    pip = [binaries / "python", "-m", "pip"]
    try:
        run(f"python{python}", "-m", "venv", binaries.parent)
        run(*pip, "index", "versions", "jax")
    except (FileNotFoundError, AssertionError) as error:
        pytest.skip(f"no python{python} that makes environments, or no registry: {error}")
    package, kernels = sorted(ROOT.glob("dist/*.whl"))
    (place / "constraints.txt").write_text("".join(_lower_bounds() if end == "oldest" else ()))
    install = [*pip, "install", "--quiet", "--constraint", "constraints.txt", kernels]
    run(*install)
    run(binaries / "python", "examples/kernels_alone.py")
    # One end has no extra: what it lacks ends no command.
    run(*install, f"{package}[report,eval]" if end == "newest" else package)
    print(run(*pip, "freeze"))
    for name, options in COMMANDS.items():
        if "--help" not in options:
            output = run(binaries / "ttcd", name, *options)
            lacks = name in ("evaluate", "report") and end == "oldest"
            assert ("install ttcd_jax[report]" in output) == lacks
    for name in (*ARGUMENTS, *OTHERS):
        run(binaries / "python", f"examples/{name}.py", *ARGUMENTS.get(name, ()))
    losses = [record["loss"] for record in read_metrics(place / "run/metrics.jsonl")]
    assert losses == pytest.approx(LOSSES, abs=1e-4)
    assert (place / "page/index.html").exists() == (end == "newest")
