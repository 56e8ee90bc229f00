"""Several processes as one program: who takes part, and how they find each other.

`detect` reads a flag and the environment, `initialize` connects. One process per node is meant,
with all GPUs of the node.
"""

import contextlib
import dataclasses
import re
import socket
import time
from collections.abc import Callable, Mapping

import jax

from ttcd_jax.config import Config, closest
from ttcd_jax.errors import UserError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
JOBSET_PORT = 8476

_LET_GO = b"go"
_RETRY_SECONDS = 0.5
_CALL_SECONDS = 5.0  # for a caller to say who it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(Config):
    """This process is `process_id` of `num_processes`; process 0 listens at `coordinator`,
    HOST:PORT."""

    coordinator: str
    num_processes: int
    process_id: int

    def validate(self) -> None:
        host, port = self.address
        if not host or not 0 < port < 2**16:
            raise UserError(f"a coordinator is HOST:PORT, not {self.coordinator!r}")
        if not 0 <= self.process_id < self.num_processes:
            raise UserError(
                f"process {self.process_id} of {self.num_processes}: processes are counted from 0 "
                f"to {self.num_processes - 1}"
            )

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the coordinator; port 0 stands for none."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port) if port.isdecimal() else 0


def detect(launcher: str, environ: Mapping[str, str]) -> Processes | None:
    """The processes of this program as `launcher` tells them; None is this process alone.

    none                                 alone
    HOST:PORT,NUM_PROCESSES,PROCESS_ID   as written
    slurm     SLURM_STEP_NODELIST (process 0 runs on the first), SLURM_STEP_NUM_TASKS, SLURM_PROCID,
              SLURM_JOB_ID (the port follows from it): srun sets them
    openmpi   OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK, which mpirun sets, and
              JAX_COORDINATOR_ADDRESS
    jobset    JOBSET_NAME, REPLICATED_JOB_NAME, NUM_PROCESSES, which the JobSet's file sets, and
              JOB_COMPLETION_INDEX, which Kubernetes sets: one Job, a pod per process
    auto      openmpi, jobset or slurm: the first whose first variable is set

    JAX_COORDINATOR_ADDRESS, HOST:PORT, goes before what slurm and jobset tell. Raises `UserError`
    naming the variables that are missing, or what is no process.
    """
    if launcher == "none":
        return None
    if launcher == "auto":
        launcher = _present(environ)
    if launcher in _LAUNCHERS:
        return _LAUNCHERS[launcher](environ)
    parts = launcher.split(",")
    if len(parts) != 3:
        names = ["none", "auto", *_LAUNCHERS]
        raise UserError(
            f"no launcher is called {launcher!r}{closest(launcher, names)}; there are "
            f"{', '.join(names)}, and HOST:PORT,NUM_PROCESSES,PROCESS_ID"
        )
    return _processes(*parts)


def initialize(
    processes: Processes, *, heartbeat_seconds: int = 100, timeout_seconds: int = 300
) -> None:
    """Waits until every process is there, then connects them. Before JAX's first array.

    A process is lost when it was not heard of for `heartbeat_seconds`. Raises `UserError` when a
    process, or the coordinator, did not come within `timeout_seconds`, naming which, and when the
    coordinator's port is taken: JAX itself would abort without an exception.
    """
    meet = _call if processes.process_id else _await_callers
    meet(processes, timeout_seconds)
    jax.distributed.initialize(
        processes.coordinator,
        processes.num_processes,
        processes.process_id,
        # JAX would read the launcher's variables once more, and under SLURM and Open MPI take one
        # GPU per process.
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )


def _present(environ: Mapping[str, str]) -> str:
    # mpirun may have been started by srun, whose variables then tell of mpirun's daemons.
    firsts = {"OMPI_COMM_WORLD_SIZE": "openmpi", "JOBSET_NAME": "jobset"}
    firsts["SLURM_STEP_NODELIST"] = "slurm"
    for variable, launcher in firsts.items():
        if variable in environ:
            return launcher
    raise UserError(
        f"launcher 'auto' found none: not one of {', '.join(firsts)} is set; start the processes "
        "with srun, mpirun or a JobSet, or name the launcher"
    )


def _slurm(environ: Mapping[str, str]) -> Processes:
    nodes, num_processes, process_id, job = _values(
        "slurm",
        environ,
        ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID"),
    )
    # Above Linux's ephemeral ports; jobs that share a node differ.
    port = 61440 + _number("SLURM_JOB_ID", job) % 4096
    coordinator = environ.get(COORDINATOR, f"{_first_host(nodes)}:{port}")
    return _processes(coordinator, num_processes, process_id)


def _first_host(nodes: str) -> str:
    """`rack2node007` of `rack[2-3]node[007,009-012],login1`."""
    first = re.match(r"(\[[^]]*\]|[^,[])*", nodes)
    assert first is not None  # it matches the empty string
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


def _openmpi(environ: Mapping[str, str]) -> Processes:
    num_processes, process_id, coordinator = _values(
        "openmpi", environ, ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", COORDINATOR)
    )
    return _processes(coordinator, num_processes, process_id)


def _jobset(environ: Mapping[str, str]) -> Processes:
    jobset, job, num_processes, process_id = _values(
        "jobset",
        environ,
        ("JOBSET_NAME", "REPLICATED_JOB_NAME", "NUM_PROCESSES", "JOB_COMPLETION_INDEX"),
    )
    # The name that JobSet gives pod 0 of Job 0.
    coordinator = environ.get(COORDINATOR, f"{jobset}-{job}-0-0.{jobset}:{JOBSET_PORT}")
    return _processes(coordinator, num_processes, process_id)


_LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Processes]] = {
    "slurm": _slurm,
    "openmpi": _openmpi,
    "jobset": _jobset,
}


def _values(launcher: str, environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise UserError(
            f"launcher {launcher!r} needs {', '.join(missing)} in the environment: start with it, "
            "or give HOST:PORT,NUM_PROCESSES,PROCESS_ID"
        )
    return [environ[name] for name in names]


def _processes(coordinator: str, num_processes: str, process_id: str) -> Processes:
    return Processes(
        coordinator=coordinator,
        num_processes=_number("the number of processes", num_processes),
        process_id=_number("the number of this process", process_id),
    )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name} must be a whole number, got {text!r}")
    return int(text)


def _await_callers(processes: Processes, timeout_seconds: int) -> None:
    """Listens at the coordinator's port until all other processes have called, then lets go."""
    deadline = time.monotonic() + timeout_seconds
    missing = set(range(1, processes.num_processes))
    with contextlib.ExitStack() as callers, _listen(processes.address[1]) as server:
        waiting = []
        while missing:
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                caller = callers.enter_context(server.accept()[0])
            except TimeoutError:
                raise UserError(
                    f"process {', '.join(map(str, sorted(missing)))} of {processes.num_processes} "
                    f"did not call {processes.coordinator} within {timeout_seconds} s: see why it "
                    "did not start, then start all again"
                ) from None
            with contextlib.suppress(OSError):  # a stranger, or one that will call again
                caller.settimeout(_CALL_SECONDS)
                name = caller.recv(16)
                if name.isdigit():
                    missing.discard(int(name))
                    waiting.append(caller)
        for caller in waiting:
            with contextlib.suppress(OSError):
                caller.sendall(_LET_GO)


def _listen(port: int) -> socket.socket:
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at port {port} ({error.strerror}): end what uses it, or take "
            "another port"
        ) from error


def _call(processes: Processes, timeout_seconds: int) -> None:
    """Calls process 0 again and again until it lets go."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            remaining = max(deadline - time.monotonic(), _RETRY_SECONDS)
            with socket.create_connection(processes.address, timeout=remaining) as server:
                server.sendall(str(processes.process_id).encode())
                if server.recv(len(_LET_GO)) == _LET_GO:
                    return
                reason = "something else answers there"
        except OSError as error:
            reason = str(error)
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise UserError(
                f"process {processes.process_id} of {processes.num_processes} did not reach "
                f"process 0 at {processes.coordinator} within {timeout_seconds} s ({reason}): see "
                "why it did not start, and whether that port is open"
            )
        time.sleep(_RETRY_SECONDS)
