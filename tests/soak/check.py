"""The undisturbed run, and the comparison of another one with it."""

import json
import random
import sys
from pathlib import Path

from tests.soak.run import STEPS, Broken, Child, Run, become_command
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole
from ttcd_jax.run.directory import METRICS, RunDirectory, load_params
from ttcd_jax.run.reporting import read_metrics

TOLERANCE = 1e-9  # in float64, relative: on another mesh sums have another order


def prepare(folder: Path) -> Run:
    """The undisturbed run in `folder`; its records are made unless they are there."""
    whole, rng = Run(folder, "undisturbed"), random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    lines = (json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(200))
    if not (folder / "records").exists():
        write_whole(folder / "text.jsonl", "\n".join(lines))
        places = f"--input={folder / 'text.jsonl'}", f"--output={folder / 'records'}"
        program = ("prepare_data", "--tokenizer=byte", "--processes=1", *places)
        Child(lambda: become_command(*program), whole.log()).end(0)
    whole.remove()  # of another version, perhaps
    whole.end(whole.start(), 0)
    return whole


def check_losses(run: Run, whole: Run) -> int:
    """The number of steps reported. Raises `Broken` unless each is there once, in order, and has
    the loss and the norm of the gradient of `whole`."""
    ours, theirs = (read_metrics(each.path / METRICS) for each in (run, whole))
    if [record["step"] for record in ours] != [*range(1, len(ours) + 1)]:
        raise Broken(f"{run.path / METRICS} has not every step once and in order")
    for mine, other in zip(ours, theirs, strict=False):
        tolerance = 0.0 if mine["step"] <= run.exact else TOLERANCE
        for name in ("loss", "grad_norm"):
            if not abs(mine[name] - other[name]) <= tolerance * abs(other[name]):
                raise Broken(
                    f"{name} {mine[name]!r} instead of {other[name]!r} at step {mine['step']} of "
                    f"{run.path}, exact to step {run.exact}"
                )
    return len(ours)


def check_end(run: Run, whole: Run) -> None:
    """Trains the run to its end and removes its files. Raises `Broken` unless it is as `whole`."""
    run.end(run.start(), 0)
    if (done := check_losses(run, whole)) != STEPS:
        raise Broken(f"{run.path / METRICS} has {done} of {STEPS} steps")
    unfinished = [
        path
        for path in run.path.rglob("*")
        if ".refused" not in str(path) and (path.name.startswith(".") or "-tmp" in path.name)
    ]
    if unfinished:
        raise Broken(f"{unfinished[0]} is left over")
    try:
        with RunDirectory(run.path).lock():
            pass
    except UserError as error:
        raise Broken(str(error)) from error
    params = Child(lambda: _compare(run, whole), run.log())
    run.evaluation().end(0)
    params.end(0)
    run.remove()


def _compare(run: Run, whole: Run) -> None:
    """Exits with status 1 if the parameters differ."""
    import jax
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    ours, theirs = (jax.tree.leaves(load_params(each.path).params) for each in (run, whole))
    tolerance = 0.0 if run.exact == STEPS else TOLERANCE
    differences = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, theirs, strict=True)]
    print(f"parameters differ by {max(differences)}")
    sys.exit(int(max(differences) > tolerance))
