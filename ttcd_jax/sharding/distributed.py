"""Several processes as one program, one per node with all its GPUs: `detect` reads a flag and the
environment, `initialize` connects, `agree` compares their code and settings.

JAX 0.11.2 detects launchers too, but takes `a-b[10-11]-ib` and `rack[2-3]node[01-04]` for the nodes
`a-b10` and `rack2`, and needs mpi4py under Open MPI 5 and the Kubernetes API for a Job. Its
`jax.distributed.initialize` aborts all processes (SIGABRT, "DEADLINE_EXCEEDED") when one is
missing, and does not name it.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import socket
import string
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from ttcd_kernels import verified

from ttcd_jax.config import Config, NonNegative, Positive, closest
from ttcd_jax.errors import UserError, listed

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_threefry_partitionable", "jax_random_seed_offset"),
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_SILENT_SECONDS, _SHOWN = 5.0, 80  # characters of a value in an error
_calls = itertools.count()  # of `agree`, the same in every process

COORDINATOR = "JAX_COORDINATOR_ADDRESS"

# The variable that reveals a launcher, and HOST:PORT,NUM_PROCESSES,PROCESS_ID from its variables.
# openmpi comes first: srun may have started mpirun, and its variables then describe mpirun's
# daemons. JobSet gives pod 0 of Job 0 this name; its manifest sets all but the last variable.
_OPENMPI = "{JAX_COORDINATOR_ADDRESS},{OMPI_COMM_WORLD_SIZE},{OMPI_COMM_WORLD_RANK}"
_POD = "{JOBSET_NAME}-{REPLICATED_JOB_NAME}-0-0.{JOBSET_NAME}:8476"
_SLURM = "{SLURM_STEP_NODELIST}:{SLURM_JOB_ID},{SLURM_STEP_NUM_TASKS},{SLURM_PROCID}"
_LAUNCHERS = {
    "openmpi": ("OMPI_COMM_WORLD_SIZE", _OPENMPI),
    "jobset": ("JOBSET_NAME", _POD + ",{NUM_PROCESSES},{JOB_COMPLETION_INDEX}"),
    "slurm": ("SLURM_STEP_NODELIST", _SLURM),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(Config):
    """This process is `process_id` of `num_processes`; process 0 listens at `coordinator`,
    HOST:PORT."""

    coordinator: str
    num_processes: Positive
    process_id: NonNegative

    def validate(self) -> None:
        host, port = self.address
        if not host or not 0 < port < 2**16:
            raise UserError(f"a coordinator is HOST:PORT, not {self.coordinator!r}")
        if self.process_id >= self.num_processes:
            raise UserError(
                f"process {self.process_id} of {self.num_processes}: processes are counted from 0 "
                f"to {self.num_processes - 1}"
            )

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the coordinator; port 0 when it has none."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port) if port.isdecimal() else 0


def detect(launcher: str, environ: Mapping[str, str]) -> Processes | None:
    """The processes of this program; None for this process alone.

    `launcher`: none, HOST:PORT,NUM_PROCESSES,PROCESS_ID, the launcher that set the variables of
    `environ` (openmpi, jobset, slurm), or auto, the first of these. JAX_COORDINATOR_ADDRESS,
    HOST:PORT, overrides the address of jobset and slurm. Raises `UserError` naming the missing
    variables or the wrong value.
    """
    if launcher == "none":
        return None
    if launcher == "auto":
        present = (name for name, (sign, _) in _LAUNCHERS.items() if sign in environ)
        launcher = next(present, launcher)
    description = _described(launcher, environ) if launcher in _LAUNCHERS else launcher
    coordinator, *numbers = description.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        known = ", ".join(f"{name} ({sign} is set)" for name, (sign, _) in _LAUNCHERS.items())
        raise UserError(
            f"{description!r} describes no processes{closest(launcher, list(_LAUNCHERS))}; give "
            f"none, auto, a launcher: {known}, or HOST:PORT,NUM_PROCESSES,PROCESS_ID"
        )
    number, count = map(int, reversed(numbers))
    return Processes(coordinator=coordinator, num_processes=count, process_id=number)


def _described(launcher: str, environ: Mapping[str, str]) -> str:
    _, description = _LAUNCHERS[launcher]
    if COORDINATOR in environ:
        description = f"{{{COORDINATOR}}},{description.split(',', 1)[1]}"
    names = [name for _, name, _, _ in string.Formatter().parse(description) if name]
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(
            f"launcher {launcher!r} needs {', '.join(missing)} in the environment: start with it, "
            "or give HOST:PORT,NUM_PROCESSES,PROCESS_ID"
        )
    return description.format_map({name: _read(name, environ[name]) for name in names})


def _read(name: str, value: str) -> str:
    if name == "SLURM_JOB_ID":  # a port above Linux's ephemeral ones; jobs on one node differ
        return str(61440 + int(value) % 4096)
    if name == "SLURM_STEP_NODELIST":  # rack2node007 of rack[2-3]node[007,009-012],login1
        first = re.findall(r"(?:\[[^]]*\]|[^,[])+", value)[0]
        return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)
    return value


def initialize(
    processes: Processes, *, timeout_seconds: int = 300, heartbeat_seconds: int = 60
) -> None:
    """Waits for every process, then connects them, before JAX's first array. JAX aborts them when
    one is not heard of for `heartbeat_seconds`. Raises `UserError` naming the processes that are
    missing after `timeout_seconds`, for another number of processes, and for a port in use."""
    (_call if processes.process_id else _await_callers)(processes, timeout_seconds)
    jax.distributed.initialize(
        processes.coordinator,
        processes.num_processes,
        processes.process_id,
        # JAX would read the launcher's variables itself, and under SLURM and Open MPI take one GPU
        # per process.
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )


def _await_callers(processes: Processes, timeout_seconds: int) -> None:
    """Listens at the coordinator's port until all other processes have called, then answers."""
    deadline = time.monotonic() + timeout_seconds
    missing = set(range(1, processes.num_processes))
    port, is_dual = processes.address[1], socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    callers, problem = [], ""

    def names() -> str:
        return f"process {', '.join(map(str, sorted(missing)))} of {processes.num_processes}"

    try:
        with _telling(lambda: f"{names()} to call {processes.coordinator}") as stack:
            server = socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
            stack.enter_context(server)
            while missing and not problem:
                server.settimeout(max(deadline - time.monotonic(), 1e-3))
                callers.append(stack.enter_context(server.accept()[0]))
                callers[-1].settimeout(5)
                with contextlib.suppress(OSError, ValueError):  # a stranger, or a broken call
                    number, count = map(int, callers[-1].recv(32).split())
                    missing.discard(number)
                    if count != processes.num_processes:
                        problem = (
                            f"process {number} was started as one of {count}, process 0 as one of "
                            f"{processes.num_processes}: start all with the same number"
                        )
            for caller in callers:
                with contextlib.suppress(OSError):
                    caller.sendall(problem.encode() or b"go")
    except TimeoutError:
        raise UserError(
            f"{names()} did not call {processes.coordinator} within {timeout_seconds} s: read its "
            "log, then start all again"
        ) from None
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {port} ({error.strerror}): free it, or choose another"
        ) from error
    if problem:
        raise UserError(problem)


def _call(processes: Processes, timeout_seconds: int) -> None:
    """Calls process 0 until it answers."""
    deadline, reason = time.monotonic() + timeout_seconds, None
    with _telling(lambda: f"process 0 at {processes.coordinator} ({reason or 'it was called'})"):
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection(processes.address, timeout=remaining) as server:
                    reason = None
                    server.sendall(f"{processes.process_id} {processes.num_processes}".encode())
                    if (answer := server.recv(256)) == b"go":
                        return
                    if answer.startswith(b"process "):
                        raise UserError(answer.decode())
            except OSError as error:
                reason = error
            time.sleep(0.5)
    raise UserError(
        f"process {processes.process_id} of {processes.num_processes} did not reach process 0 at "
        f"{processes.coordinator} within {timeout_seconds} s "
        f"({reason or 'another program answers'}): read its log, and check that the port is open"
    )


def _telling(whom: Callable[[], str]) -> contextlib.ExitStack:
    """A context that says on standard error for whom it waits, if it takes some seconds."""
    stack, is_over = contextlib.ExitStack(), threading.Event()

    def tell() -> None:
        if not is_over.wait(_SILENT_SECONDS):
            print(f"waiting for {whom()}", file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    stack.callback(is_over.set)
    return stack


def agree(what: str, values: Mapping[str, Any], seconds: float = 600) -> None:
    """Compares `values`, ready for JSON, by name, and the code, versions and settings of JAX and
    XLA in all processes. Each waits `seconds` for the others. Raises `UserError` in every process
    for one that differs from the first: it would change the results of all silently."""
    if jax.process_count() == 1:
        return
    prefix, limit = f"ttcd_jax/agree/{next(_calls)}", int(1000 * seconds)
    client, number = ocp.multihost.get_jax_distributed_client(), jax.process_index()
    code = [verified.source(), verified.source(Path(__file__).parents[1])]
    values = {**values, "code": code, **{name: metadata.version(name) for name in PACKAGES}}
    values |= {name: str(jax.config.values[name]) for name in _SETTINGS}
    for name in _FLAGS:
        given = os.environ.get(name, "").split()
        values[name] = sorted(x for x in given if not x.startswith("--xla_dump"))
    own = {name: _shown(value) for name, value in values.items()}
    if number == 0:
        client.key_value_set(f"{prefix}/values", json.dumps(own))
    client.wait_at_barrier(f"{what}: told ({prefix})", limit)
    first = json.loads(client.key_value_try_get(f"{prefix}/values"))
    differing = [
        f"{name}: process {number} has {own.get(name)}, process 0 has {first.get(name)}"
        for name in first | own
        if own.get(name) != first.get(name)
    ]
    client.key_value_set(f"{prefix}/differing/{number}", listed(differing, 3))
    client.wait_at_barrier(f"{what}: compared ({prefix})", limit)
    found = sorted(text for _, text in client.key_value_dir_get(f"{prefix}/differing/") if text)
    if found:
        raise UserError(f"the processes of this job differ: {found[0]}; start all of them alike")


def _shown(value: Any) -> str:
    """A value for JSON, a long one by its beginning and its digest."""
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (sha256 {digest[:12]})"
