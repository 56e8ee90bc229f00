"""The table of faults, each once; the soak, its order, and that it can fail."""

import copy
import random
import re

import commands
import pytest

from tests.soak.faults import FAULTS, Unavailable, drawn
from tests.soak.run import Broken, Chain, Fault

PROGRAM = """
from ttcd_jax.commands import cli
from tests.soak import __main__ as soak
from tests.soak.run import Broken, Chain

def hit(self, fault, rng, number):
    self.begun = 1
    if number == 2:
        raise Broken("loss 2.0 instead of 1.0")
    return 75

Chain.hit = hit
cli.run(soak.main)
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("soak"))
    yield chain
    chain.end(is_whole=True)
    left = {path.name.partition(".")[0] for path in chain.folder.glob("run-*")}
    assert left <= {"run-99"}  # which was broken


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_changes_no_loss(kind, chain):
    try:
        chain.hit(FAULTS[kind], random.Random(kind), [*FAULTS].index(kind))
    except Unavailable as reason:
        pytest.skip(f"this machine {reason}")


def test_a_changed_loss_is_found(chain):
    fault = Fault(lambda run, rng: run.start(fault=("reseeded",)))
    found = r"loss \S+ instead of \S+ at step \d+ of \S+/run-99, exact to step 240"
    other = copy.copy(chain)
    other.run = None
    with pytest.raises(Broken, match=found):
        other.hit(fault, random.Random(0), 99)


def test_the_soak_ends_with_a_table_or_with_the_command_that_repeats_the_run(tmp_path):
    program = tmp_path / "soak.py"
    program.write_text(PROGRAM)
    flags = "--seed=4", "--kind=SIGINT", f"--output={tmp_path / 'soak'}"
    *faults, _, _, row, last = commands.output(program, "--faults=2", *flags).splitlines()
    assert faults == [f"fault {number} (SIGINT) in run-1: exit status 75" for number in (0, 1)]
    assert re.match(r"SIGINT +2 +75 \(2\) ", row)
    assert last == "seed 4, 2 faults: every loss is that of the undisturbed run"
    result = commands.run(program, "--faults=5", *flags)
    assert (result.returncode, result.stdout.splitlines()) == (1, faults)
    assert result.stderr == (
        "FAILED: seed 4, fault 2 (SIGINT): loss 2.0 instead of 1.0; again: python -m tests.soak "
        "--kind=SIGINT --seed=4 --first=1 --faults=2\n"
    )


def test_a_fault_depends_on_the_seed_and_its_number_alone():
    kinds, size = list(FAULTS), len(FAULTS)
    turns = [[drawn(kinds, 3, turn * size + i)[0] for i in range(size)] for turn in (0, 1)]
    assert turns[0] != turns[1]
    assert all(sorted(turn) == sorted(kinds) for turn in turns)
    assert drawn(kinds, 3, 41)[1].random() == drawn(kinds, 3, 41)[1].random()
    assert drawn(kinds, 3, 41)[1].random() != drawn(kinds, 4, 41)[1].random()
