"""How a process ends when another one is lost, hangs, or errs alone."""

import re
import signal
import socket
import subprocess
import sys

import jax
import pytest
from commands import ROOT, cpu_environment

from ttcd_jax.errors import CheckpointError
from ttcd_jax.train.watchdog import PEER_LOST, Watchdog, is_peer_lost

CAPTURED = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
ALONE = """
import sys, time
from ttcd_jax.train.watchdog import Watchdog

with Watchdog(int(sys.argv[1]), minimum_seconds=0.5, factor=float(sys.argv[2])) as watchdog:
    {body}
print("done")
"""
PEERS = """
import sys
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from ttcd_jax.errors import DataError
from ttcd_jax.sharding.distributed import detect, initialize
from ttcd_jax.train.watchdog import Watchdog

initialize(detect(sys.argv[1], {}), timeout_seconds=60)
mesh = jax.make_mesh((2,), ("data",))
x = jax.device_put(np.ones(2), NamedSharding(mesh, PartitionSpec("data")))
add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
with Watchdog(2, minimum_seconds=5, exit_seconds=5) as watchdog:
    for step in range(1, 10**6):
        float(add(x))
        watchdog.beat(step)
        if step == 3:
            print("running", flush=True)
        if step == 3 and sys.argv[2] == "err":
            raise DataError("no such file")
        if multihost_utils.reached_preemption_sync_point(step):
            print("stopped at", step, flush=True)
            break
"""


def _alone(body, num_processes=2, factor=20.0):
    """A process whose other processes nobody has started."""
    body = "\n    ".join(body.strip().splitlines())
    command = [sys.executable, "-c", ALONE.format(body=body), str(num_processes), str(factor)]
    return subprocess.run(command, timeout=60, **CAPTURED)


HANGS = """
watchdog.beat(1)
watchdog.beat(2)
time.sleep(2)
"""


def test_a_step_that_hangs_ends_the_process_with_its_stacks_and_one_line():
    result = _alone(HANGS)
    assert result.returncode == PEER_LOST
    *stacks, line = result.stderr.splitlines()
    assert "time.sleep" not in line
    assert any('File "<string>"' in frame for frame in stacks)
    assert re.match(r"error: no step for \d s after step 2: another process is lost or hangs", line)
    assert "last checkpoint" in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    "body",
    [
        "watchdog.beat(1); time.sleep(1.5)",  # the first step compiles
        "for step in range(6): watchdog.beat(step); time.sleep(0.3)",
        HANGS.replace("time", "with watchdog.paused(): time"),
        "with watchdog.paused(): time.sleep(1)\nwatchdog.beat(1); time.sleep(1)",
    ],
)
def test_what_takes_its_time_for_a_reason_goes_on(body):
    result = _alone(body)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def test_a_save_that_hangs_ends_the_process():
    body = "watchdog.beat(1)\nwith watchdog.paused(1): time.sleep(9)"
    assert _alone(body).returncode == PEER_LOST
    assert Watchdog(2, minimum_seconds=3).save_seconds == 30


def test_a_pause_is_no_step():
    """Nor does it lengthen the median of the steps, of which the limit is a multiple."""
    body = """
watchdog.beat(1)
with watchdog.paused(): time.sleep(2)
watchdog.beat(2)
time.sleep(3)
"""
    assert _alone(body, factor=2.0).returncode == PEER_LOST


def test_slow_steps_have_more_time():
    body = "for step in range(3): watchdog.beat(step); time.sleep(0.4)\ntime.sleep(1)"
    assert _alone(body, factor=20.0).returncode == 0
    assert _alone(body, factor=0.0).returncode == PEER_LOST


def test_a_process_alone_may_hang():
    assert _alone(HANGS, num_processes=1).stdout == "done\n"


@pytest.mark.parametrize(
    "message",
    [
        "UNKNOWN: Gloo all-reduce failed: [tcp/pair.cc:547] Connection closed by peer",
        "UNKNOWN: Gloo AllGather failed: Connection reset by peer",
        "DEADLINE_EXCEEDED: Barrier timed out. Id: b3::0. [...] # of tasks that reached the "
        "barrier: 1/2. RPC: /xla.coordination.CoordinationService/Barrier",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a "
        "network error",
    ],
)
def test_a_lost_peer_is_recognised_also_as_a_cause(message):
    error = jax.errors.JaxRuntimeError(message)
    assert is_peer_lost(error)
    wrapped = CheckpointError("checkpoint step 4 was not saved")
    wrapped.__cause__ = error
    assert is_peer_lost(wrapped)


@pytest.mark.parametrize(
    "message",
    [
        "dot_general requires contracting dimensions to have the same shape",
        "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes",
        "checkpoint step 24 is damaged",
        "INTERNAL: NCCL operation ncclCommInitRank(&comm, nranks, id, rank) failed: unhandled "
        "system error (run with NCCL_DEBUG=INFO for details)",
    ],
)
def test_other_errors_are_no_lost_peer(message):
    assert not is_peer_lost(ValueError(message))


@pytest.fixture
def peers():
    """Starts two processes that add up numbers for ever; ends what is left of them."""
    started = []

    def start(*actions):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        for process_id, action in enumerate(actions):
            command = [sys.executable, "-c", PEERS, f"localhost:{port},2,{process_id}", action]
            started.append(subprocess.Popen(command, env=cpu_environment(), **CAPTURED))
        for process in started:
            while (line := process.stdout.readline()) != "running\n":
                assert line, process.stderr.read()
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _end(process):
    """(status, last line of stderr)."""
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr.rstrip().rpartition("\n")[2]


def test_a_killed_process_ends_the_other_at_once(peers):
    survivor, victim = peers("run", "run")
    victim.kill()
    status, line = _end(survivor)
    assert status == PEER_LOST
    assert line.startswith("error: another process was lost (UNKNOWN: Gloo all-reduce failed")
    assert "last checkpoint" in line


def test_a_stopped_process_ends_the_other_in_time(peers):
    survivor, victim = peers("run", "run")
    victim.send_signal(signal.SIGSTOP)
    status, line = _end(survivor)
    assert status == PEER_LOST
    assert line.startswith("error: no step for ")


def test_a_process_that_errs_alone_does_not_wait_for_the_other(peers):
    other, erring = peers("run", "err")
    status, line = _end(erring)
    assert (status, line) == (3, "ttcd_jax.errors.DataError: no such file")
    assert _end(other)[0] == PEER_LOST


def test_processes_that_err_alike_keep_their_errors(peers):
    for process in peers("err", "err"):
        assert _end(process) == (1, "ttcd_jax.errors.DataError: no such file")


def test_sigterm_to_one_stops_all_after_the_same_step(peers):
    processes = peers("run", "run")
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    steps = {re.search(r"stopped at (\d+)", output)[1] for output in outputs}
    assert len(steps) == 1
