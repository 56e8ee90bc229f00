"""How a process ends when its steps hang; tests/soak kills, stops and confuses several."""

import re
import subprocess

import commands
import jax
import pytest

from ttcd_jax.errors import CheckpointError
from ttcd_jax.train.watchdog import PEER_LOST, Watchdog, is_peer_lost

ALONE = """
import sys, time
from ttcd_jax.train import watchdog as module

num_processes, factor, body = sys.argv[1:]
module._FACTOR = float(factor)
with module.Watchdog(int(num_processes), minimum_seconds=1.0) as watchdog:
    exec(body)
print("done")
"""
AGAIN = "watchdog.beat(2); time.sleep(3)"
HANGS = f"watchdog.beat(1); {AGAIN}"
SLOW = "for step in range(3): watchdog.beat(step); time.sleep(0.4)\ntime.sleep(2)"
PAUSED = "with watchdog.paused({}): time.sleep({})"
# What a process does, the limit of a step in median steps, and whether it is ended.
CASES = {
    "a step that hangs": (HANGS, 20, True),
    "the first step, which compiles": ("watchdog.beat(1); time.sleep(2)", 20, False),
    "regular steps": ("for i in range(6): watchdog.beat(i); time.sleep(0.3)", 20, False),
    "a pause": (f"watchdog.beat(1); watchdog.beat(2)\n{PAUSED.format('', 2)}", 20, False),
    "one before the first": (f"{PAUSED.format('', 1)}\nwatchdog.beat(1); time.sleep(2)", 20, False),
    "a save that hangs": (f"watchdog.beat(1)\n{PAUSED.format(1, 4)}", 20, True),
    "a pause is no step": (f"watchdog.beat(1)\n{PAUSED.format('', 2)}\n{AGAIN}", 2, True),
    "slow steps have more time": (SLOW, 20, False),
    "no step has less": (SLOW, 0, True),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """(status, stdout, stderr) of the cases, which all sleep at once; of processes whose other
    processes nobody has started."""
    program = tmp_path_factory.mktemp("programs") / "alone.py"
    program.write_text(ALONE)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    lines = {name: (2, factor, body) for name, (body, factor, _) in CASES.items()}
    lines["without peers"] = 1, 20, HANGS
    started = {name: commands.start(program, *line, **pipes) for name, line in lines.items()}
    outputs = {name: process.communicate(timeout=60) for name, process in started.items()}
    return {name: (started[name].returncode, *outputs[name]) for name in started}


@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_when_a_step_or_a_save_hangs_and_in_no_other_case(ended, case):
    expected = (PEER_LOST, "") if CASES[case][2] else (0, "done\n")
    assert ended[case][:2] == expected, ended[case]


def test_it_prints_its_stacks_and_one_line_and_a_process_alone_waits_for_ever(ended):
    *stacks, line = ended["a step that hangs"][2].splitlines()
    assert any('File "<string>"' in frame for frame in stacks)
    assert re.match(r"error: no step for \d s after step 2: another process is lost or hangs", line)
    assert "last checkpoint" in line
    assert Watchdog(2, minimum_seconds=3).save_seconds == 30
    assert ended["without peers"][:2] == (0, "done\n")


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("UNKNOWN: Gloo all-reduce failed: [tcp/pair.cc:547] Connection closed by peer", True),
        ("RPC: /xla.coordination.CoordinationService/Barrier: DEADLINE_EXCEEDED", True),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", False),
        ("NCCL operation ncclCommInitRank(&comm) failed: unhandled system error (run", False),
    ],
)
def test_a_lost_peer_is_recognised_also_as_a_cause_and_no_other_error_is_one(message, is_lost):
    error = jax.errors.JaxRuntimeError(message)
    wrapped = CheckpointError("checkpoint step 4 was not saved")
    wrapped.__cause__ = error
    assert (is_peer_lost(error), is_peer_lost(wrapped)) == (is_lost, is_lost)
