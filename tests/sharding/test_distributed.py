"""Who takes part, told by a flag and the environment, and the meeting before JAX connects."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from devices import fake_devices

from ttcd_jax.errors import UserError
from ttcd_jax.sharding import distributed
from ttcd_jax.sharding.distributed import Processes, detect

SLURM = {
    "SLURM_STEP_NODELIST": "gpu[007-009,011],login1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "8195",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
}
JOBSET = {
    "JOBSET_NAME": "run",
    "REPLICATED_JOB_NAME": "worker",
    "NUM_PROCESSES": "16",
    "JOB_COMPLETION_INDEX": "0",
}


def _read(launcher, environ):
    processes = detect(launcher, environ)
    assert processes is not None
    return processes.coordinator, processes.num_processes, processes.process_id


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("10.0.0.1:1234,8,7", {}, ("10.0.0.1:1234", 8, 7)),
        ("slurm", SLURM, ("gpu007:61443", 4, 3)),
        ("openmpi", OPENMPI, ("node1:1234", 2, 1)),
        ("jobset", JOBSET, ("run-worker-0-0.run:8476", 16, 0)),
        ("slurm", SLURM | {"JAX_COORDINATOR_ADDRESS": "ib0:99"}, ("ib0:99", 4, 3)),
        ("auto", SLURM, ("gpu007:61443", 4, 3)),
        ("auto", JOBSET, ("run-worker-0-0.run:8476", 16, 0)),
        # mpirun under SLURM: srun started mpirun's daemons, one per node
        ("auto", SLURM | OPENMPI, ("node1:1234", 2, 1)),
    ],
)
def test_a_launcher_tells_who_takes_part(launcher, environ, expected):
    assert _read(launcher, environ) == expected


def test_without_a_launcher_the_environment_is_not_read():
    assert detect("none", SLURM | JOBSET | OPENMPI) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[007,009-012]", "node007"),
        ("a-b[10-11]-ib,c1", "a-b10-ib"),
        ("rack[2-3]node[01-04]", "rack2node01"),
    ],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert _read("slurm", SLURM | {"SLURM_STEP_NODELIST": nodes})[0].split(":")[0] == first


@pytest.mark.parametrize(
    ("launcher", "environ", "words"),
    [
        ("slrum", {}, ["slrum", "did you mean 'slurm'", "HOST:PORT"]),
        ("slurm", {"SLURM_PROCID": "0"}, ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"]),
        ("openmpi", {"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK", "JAX_COORDINATOR"]),
        ("jobset", {"JOBSET_NAME": "run"}, ["NUM_PROCESSES", "JOB_COMPLETION_INDEX"]),
        ("auto", {}, ["OMPI_COMM_WORLD_SIZE", "JOBSET_NAME", "SLURM_STEP_NODELIST"]),
        ("jobset", JOBSET | {"NUM_PROCESSES": "many"}, ["many"]),
        ("node1:1234,2,2", {}, ["process 2 of 2", "0 to 1"]),
        ("node1:1234,2,-1", {}, ["-1"]),
        ("node1,2,0", {}, ["HOST:PORT", "node1"]),
        ("node1:70000,2,0", {}, ["node1:70000"]),
        (":1234,2,0", {}, [":1234"]),
    ],
)
def test_what_is_missing_or_wrong_is_named(launcher, environ, words):
    with pytest.raises(UserError) as error:
        detect(launcher, environ)
    assert all(word in str(error.value) for word in words), error.value


def test_an_address_may_be_ipv6():
    processes = Processes(coordinator="[fe80::1]:1234", num_processes=1, process_id=0)
    assert processes.address == ("fe80::1", 1234)


@pytest.fixture
def port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def connected(monkeypatch):
    """What JAX is asked for, in place of connecting."""
    calls = []
    monkeypatch.setattr(
        distributed.jax.distributed, "initialize", lambda *args, **options: calls.append(args)
    )
    return calls


def _start(port, num_processes, process_id, timeout_seconds=20):
    processes = Processes(
        coordinator=f"localhost:{port}", num_processes=num_processes, process_id=process_id
    )
    distributed.initialize(processes, timeout_seconds=timeout_seconds)


def test_processes_wait_for_each_other_and_not_for_strangers(port, connected):
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(_start, port, 3, process_id) for process_id in (1, 0)]
        with _connection(port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            assert not wait(starts, timeout=1).done
            starts.append(pool.submit(_start, port, 3, 2))
            for start in starts:
                start.result(timeout=30)
    assert sorted(process_id for _, _, process_id in connected) == [0, 1, 2]


def _connection(port):
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except ConnectionRefusedError:
            continue


def test_processes_that_do_not_come_are_named(port, connected):
    with ThreadPoolExecutor() as pool:
        caller = pool.submit(_start, port, 4, 2, 3)
        with pytest.raises(UserError, match=r"process 1, 3 of 4 did not call localhost:\d+ within"):
            _start(port, 4, 0, 2)
        with pytest.raises(UserError, match="process 2 of 4 did not reach process 0 at localhost"):
            caller.result(timeout=30)
    assert not connected


def test_a_port_in_use_is_named(connected):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at port {port} .*already in use"):
            _start(port, 2, 0)
    assert not connected


PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ttcd_jax.sharding.distributed import detect, initialize

initialize(detect(sys.argv[1], {}), timeout_seconds=60)
mesh = jax.make_mesh((jax.device_count(),), ("data",))
rows = NamedSharding(mesh, PartitionSpec("data"))
local = np.full((jax.local_device_count(), 1), jax.process_index() + 1.0)
x = jax.make_array_from_process_local_data(rows, local)
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
print("total", float(total), jax.process_count(), jax.device_count())
"""


def test_two_processes_add_up(port):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": fake_devices(4),
        # What JAX would take for SLURM, one device per process.
        **SLURM,
        "SLURM_LOCALID": "0",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"localhost:{port},2,{process_id}"],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process_id in (0, 1)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "total 12.0 2 8" in output
