"""The processes of a job, from a flag and the environment, and their rendezvous before JAX."""

import contextlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from checks import refused

from ttcd_jax.errors import UserError
from ttcd_jax.sharding import distributed
from ttcd_jax.sharding.distributed import detect

SLURM = {"SLURM_STEP_NODELIST": "gpu[007-009,011],login1", "SLURM_STEP_NUM_TASKS": "4"}
SLURM |= {"SLURM_PROCID": "3", "SLURM_JOB_ID": "8195"}
MPI = {"NODE": "ib0", "SIZE": "2", "RANK": "1"}
JOBSET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "worker", "NUM_PROCESSES": "16"}
JOBSET |= {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("description", "environ", "expected"),
    [
        ("none", SLURM | JOBSET, None),
        ("10.0.0.1:1234,8,7", {}, ("10.0.0.1:1234", "10.0.0.1", 1234, 8, 7)),
        ("[fe80::1]:1234,1,0", {}, ("[fe80::1]:1234", "fe80::1", 1234, 1, 0)),
        ("slurm", SLURM, ("gpu007:61443", "gpu007", 61443, 4, 3)),
        ("jobset", JOBSET, ("run-worker-0-0.run:8476", "run-worker-0-0.run", 8476, 16, 0)),
        ("{NODE}:99,{SIZE},{RANK}", MPI, ("ib0:99", "ib0", 99, 2, 1)),
    ],
)
def test_a_description_gives_the_processes(description, environ, expected):
    assert detect(description, environ) == expected


def test_the_first_of_slurms_nodes():
    found = {"node1,node2": "node1", "node[007,009]": "node007", "a-b[10-11]-ib,c1": "a-b10-ib"}
    for nodes, first in (found | {"rack[2-3]node[01-04]": "rack2node01"}).items():
        assert detect("slurm", SLURM | {"SLURM_STEP_NODELIST": nodes}).host == first


@pytest.mark.parametrize(
    ("description", "environ", "words"),
    [
        ("slrum", {}, "slrum|did you mean 'slurm'|HOST:PORT"),
        ("auto", {}, "'auto' describes no processes|jobset, slurm|{NAME}"),
        ("slurm", {"SLURM_PROCID": "0"}, "SLURM_STEP_NODELIST|SLURM_STEP_NUM_TASKS"),
        ("jobset", JOBSET | {"NUM_PROCESSES": "many"}, "many"),
        ("slurm", SLURM | {"SLURM_JOB_ID": "one"}, ":one,4,3'"),
        ("slurm", SLURM | {"SLURM_STEP_NODELIST": ""}, "':61443,4,3'"),
        ("{NODE}:99,{SIZE},{RANK}", {"SIZE": "2"}, "needs NODE, RANK in the environment"),
        ("node1:1234,2,2", {}, "process 2 of 2|0 to 1"),
        ("node1:1234,2,-1", {}, "-1"),
        ("node1:1234,0,0", {}, "node1:1234,0,0"),
        ("node1:1234,2," + "9" * 5000, {}, "describes no processes"),
        ("node1,2,0", {}, "HOST:PORT|node1"),
        ("node1:70000,2,0", {}, "node1:70000"),
        (":1234,2,0", {}, ":1234"),
    ],
)
def test_what_is_missing_or_wrong_is_named(description, environ, words):
    refused(words, detect, description, environ)


@pytest.fixture
def port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def connected(monkeypatch):
    """The process ids that JAX would connect."""
    calls = []

    def initialize(coordinator, num_processes, process_id, **options):
        assert options["cluster_detection_method"] == "deactivate"  # all devices of the node
        calls.append(process_id)

    monkeypatch.setattr(distributed.jax.distributed, "initialize", initialize)
    return calls


def _start(port, num_processes, process_id, timeout_seconds=20):
    processes = detect(f"localhost:{port},{num_processes},{process_id}", {})
    distributed.initialize(processes, timeout_seconds=timeout_seconds)


def test_processes_wait_for_each_other_and_not_for_strangers(port, connected):
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(_start, port, 3, process_id) for process_id in (1, 0)]
        with _connection(port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            assert not wait(starts, timeout=0.7).done
            starts.append(pool.submit(_start, port, 3, 2))
            for start in starts:
                start.result(timeout=30)
    assert sorted(connected) == [0, 1, 2]


def _connection(port):
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port))


def test_processes_that_do_not_come_are_named_by_those_that_do(
    port, connected, monkeypatch, capsys
):
    monkeypatch.setattr(distributed, "_SILENT_SECONDS", 0.3)
    missing = r"process 1, 3 of 4 did not call localhost:\d+ within {} s"
    with ThreadPoolExecutor() as pool:
        caller = pool.submit(_start, port, 4, 2, 2)
        for came in (lambda: _start(port, 4, 0, 1), caller.result):
            with pytest.raises(UserError, match=missing.format(1) + ": read its log, then start"):
                came()
    assert not connected
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch("waiting: " + missing.format(r"\d"), said[-1]), said


def test_a_process_0_that_does_not_come_is_named(port, connected, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "_SILENT_SECONDS", 0.3)
    alone = r"process 2 of 4 did not reach process 0 at localhost:\d+ \(.*refused\) within 1 s"
    with pytest.raises(UserError, match=alone):
        _start(port, 4, 2, 1)
    assert re.match("waiting: process 2 of 4 did not reach process 0", capsys.readouterr().err)
    assert not connected


def test_processes_compare_their_code_and_what_xla_is_told_but_not_where_it_dumps(monkeypatch):
    """tests/experiments/test_processes.py has processes that differ."""
    monkeypatch.setenv("XLA_FLAGS", "--b=2 --xla_dump_to=x --a=1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = distributed.surroundings()
    flags = {x: found[x] for x in found if x.startswith(distributed._FLAGS)}
    assert flags == {"XLA_FLAGS --a": "1", "XLA_FLAGS --b": "2", "NVIDIA_TF32_OVERRIDE 0": ""}
    assert found.keys() >= {"code", "kernels", *distributed.PACKAGES, *distributed._SETTINGS}


@pytest.mark.parametrize("numbers", [(3, 2), (2, 4)])
def test_processes_that_count_differently_all_end_at_once(port, connected, numbers):
    said = "process 1 was started as one of {1}, process 0 as one of {0}: start all with the same"
    with ThreadPoolExecutor() as pool:
        for start in [pool.submit(_start, port, n, i) for i, n in enumerate(numbers)]:
            with pytest.raises(UserError, match=said.format(*numbers)):
                start.result(timeout=10)
    assert connected == []


def test_a_port_in_use_is_named(connected):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        refused(f"cannot listen at port {port} |already in use", _start, port, 2, 0)
    assert not connected
