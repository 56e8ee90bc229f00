"""The soak: faults under a tiny run, their order, and that it can fail."""

import re

import commands

from tests.soak.faults import FAULTS, drawn

KINDS = (
    *("kill -9 in the claim", "kill -9 in a save", "kill -9 at a step", "SIGINT", "a full disk"),
    *("four devices, seq 2", "checkpoint: a bit", "metrics.jsonl: torn", "unfinished files"),
    "records: a bit",
)
RESEEDED = """
from tests.soak import __main__ as soak, faults

def other_batches():
    from ttcd_jax.run import build
    make = build.build_data
    build.build_data = lambda config, *rest: make(config.replace(seed=1), *rest)

faults.FAULTS["another seed"] = faults.Fault(lambda run, rng: run.start(before=other_batches))
soak.command()
"""


def test_ten_faults_change_no_loss(tmp_path):
    kinds = [f"--kind={kind}" for kind in KINDS]
    result = commands.run("tests.soak", "--faults=10", "--seed=4", *kinds, f"--folder={tmp_path}")
    assert result.returncode == 0, (result.stdout, result.stderr)
    for kind in KINDS:
        assert re.search(rf"^fault \d \({re.escape(kind)}\) in run-\d: exit", result.stdout, re.M)
        assert re.search(rf"^{re.escape(kind)} +1  -?\d+ \(1\) ", result.stdout, re.M)
    assert "seed 4, 10 faults: every loss is that of the undisturbed run" in result.stdout
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("run-")]


def test_a_changed_loss_is_one_line_with_the_command_that_repeats_it(tmp_path):
    program = tmp_path / "reseeded.py"
    program.write_text(RESEEDED)
    flags = "--faults=3", "--kind=another seed", f"--folder={tmp_path / 'soak'}"
    result = commands.run(program, *flags)
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert re.fullmatch(
        r"FAILED: seed 0, fault 0 \(another seed\): loss \S+ instead of \S+ at step \d+ of "
        r"\S+/run-0, exact to step 60; again: python -m tests\.soak '--kind=another seed' "
        r"--seed=0 --first=0 --faults=1\n",
        result.stderr,
    ), result.stderr
    assert (tmp_path / "soak" / "run-0" / "metrics.jsonl").exists()


def test_a_fault_depends_on_the_seed_and_its_number_alone():
    kinds, size = list(FAULTS), len(FAULTS)
    turns = [[drawn(kinds, 3, turn * size + i)[0] for i in range(size)] for turn in (0, 1)]
    assert turns[0] != turns[1]
    assert all(sorted(turn) == sorted(kinds) for turn in turns)
    assert drawn(kinds, 3, 41)[1].random() == drawn(kinds, 3, 41)[1].random()
    assert drawn(kinds, 3, 41)[1].random() != drawn(kinds, 4, 41)[1].random()
