"""Several processes as one program, one per node with all its GPUs: `detect` reads a flag and the
environment, `initialize` connects, `agree` compares their code and settings.

JAX 0.11.2 detects launchers too, but reads some of SLURM's lists of nodes wrongly, gives a process
under SLURM one GPU, and asks the Kubernetes API about a JobSet. Its `jax.distributed.initialize`
aborts all processes (SIGABRT) when one is missing, and does not name it.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from ttcd_kernels import verified

from ttcd_jax.config import closest
from ttcd_jax.errors import UserError, listed

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_threefry_partitionable", "jax_random_seed_offset"),
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_SILENT_SECONDS, _SHOWN = 5.0, 80  # characters of a value in an error
_calls = itertools.count()  # of `agree`, the same in every process

_FORM = "HOST:PORT,NUM_PROCESSES,PROCESS_ID"
# That form in the variables of a launcher. JobSet gives pod 0 of Job 0 this name; its manifest sets
# all but the last variable.
_POD = "{JOBSET_NAME}-{REPLICATED_JOB_NAME}-0-0.{JOBSET_NAME}:8476"
_LAUNCHERS = {
    "jobset": _POD + ",{NUM_PROCESSES},{JOB_COMPLETION_INDEX}",
    "slurm": "{SLURM_STEP_NODELIST}:{SLURM_JOB_ID},{SLURM_STEP_NUM_TASKS},{SLURM_PROCID}",
}


class Processes(NamedTuple):
    """This process is `number` of `count`; process 0 listens at `coordinator`, HOST:PORT."""

    coordinator: str
    host: str
    port: int
    count: int
    number: int


def detect(description: str, environ: Mapping[str, str]) -> Processes | None:
    """The processes of this program; None for this process alone. `description`: none, a launcher
    (slurm, jobset), or HOST:PORT,NUM_PROCESSES,PROCESS_ID, where {NAME} stands for that variable of
    `environ`. Raises `UserError` naming the missing variables or the wrong value."""
    if description == "none":
        return None
    form, variable = _LAUNCHERS.get(description, description), r"\{(\w+)\}"
    if missing := [name for name in re.findall(variable, form) if name not in environ]:
        raise UserError(
            f"--distributed={description} needs {', '.join(missing)} in the environment: start the "
            f"processes with their launcher, or give {_FORM}"
        )
    text = re.sub(variable, lambda found: _read(found[1], environ[found[1]]), form)
    found = re.fullmatch(r"(\[?([^][,]+)\]?:(\d{1,9})),(\d{1,9}),(\d{1,9})", text, re.ASCII)
    port, count, number = map(int, found.groups()[2:]) if found else (0, 0, 0)
    if not (found and count and 0 < port < 2**16):
        raise UserError(
            f"{text!r} describes no processes{closest(description, list(_LAUNCHERS))}; give none, "
            f"{', '.join(_LAUNCHERS)}, or {_FORM}, where {{NAME}} is a variable of the environment"
        )
    if number >= count:
        raise UserError(f"process {number} of {count}: they are counted from 0 to {count - 1}")
    return Processes(found[1], found[2], port, count, number)


def _read(name: str, value: str) -> str:
    if name == "SLURM_JOB_ID" and value.isdecimal():
        return str(61440 + int(value) % 4096)  # a port above Linux's ephemeral ones
    if name == "SLURM_STEP_NODELIST":  # rack2node007 of rack[2-3]node[007,009-012],login1
        first = re.findall(r"(?:\[[^]]*\]|[^,[])*", value)[0]
        return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)
    return value


def initialize(
    processes: Processes, *, timeout_seconds: int = 300, heartbeat_seconds: int = 60
) -> None:
    """Waits for every process, then connects them, before JAX's first array. JAX aborts them when
    one is not heard of for `heartbeat_seconds`. Raises `UserError`, in all that have come, naming
    those that are missing after `timeout_seconds`, for another count, and for a port in use."""
    (_call if processes.number else _await_calls)(processes, timeout_seconds)
    jax.distributed.initialize(
        processes.coordinator,
        processes.count,
        processes.number,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )


def _await_calls(processes: Processes, seconds: float) -> None:
    """Listens at the coordinator's port until all other processes have called, then answers."""
    count, missing, calls, problem = processes.count, {*range(1, processes.count)}, [], ""

    def absence() -> str:
        numbers = ", ".join(map(str, sorted(missing)))
        return f"process {numbers} of {count} did not call {processes.coordinator}"

    turns, has_ipv6 = _turns(seconds, absence), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            server = socket.create_server(
                ("", processes.port), family=family, dualstack_ipv6=has_ipv6
            )
        except OSError as error:
            text = f"process 0 cannot listen at port {processes.port} ({error.strerror})"
            raise UserError(f"{text}: free it, or choose another") from error
        stack.enter_context(server)
        while missing and not problem:
            if (left := next(turns, None)) is None:
                problem = f"{absence()} within {seconds} s: read its log, then start all again"
                break
            with contextlib.suppress(OSError, ValueError):  # nobody, a stranger, or a broken call
                server.settimeout(min(left, _SILENT_SECONDS))
                calls.append(stack.enter_context(server.accept()[0]))
                calls[-1].settimeout(5)
                number, theirs = map(int, calls[-1].recv(32).split())
                missing.discard(number)
                if theirs != count:
                    problem = (
                        f"process {number} was started as one of {theirs}, process 0 as one of "
                        f"{count}: start all with the same number"
                    )
        for call in calls:
            with contextlib.suppress(OSError):
                call.sendall(problem.encode() or b"go")
    if problem:
        raise UserError(problem)


def _call(processes: Processes, seconds: float) -> None:
    reason: object = "it was called"

    def absence() -> str:
        return (
            f"process {processes.number} of {processes.count} did not reach process 0 at "
            f"{processes.coordinator} ({reason})"
        )

    for left in _turns(seconds, absence):
        try:
            with socket.create_connection(processes[1:3], min(left, _SILENT_SECONDS)) as server:
                server.settimeout(left + _SILENT_SECONDS)  # process 0 names who is missing
                server.sendall(f"{processes.number} {processes.count}".encode())
                if (answer := server.recv(1000)) == b"go":
                    return
                if answer.startswith(b"process "):
                    raise UserError(answer.decode())
                reason = "another program answers"
        except OSError as error:
            reason = error
        time.sleep(0.1)
    raise UserError(
        f"{absence()} within {seconds} s: read its log, and check that the port is open"
    )


def _turns(seconds: float, absence: Callable[[], str]) -> Iterator[float]:
    """The seconds left, while there are any; says on standard error for whom it waits."""
    begun, said = time.monotonic(), _SILENT_SECONDS
    while (waited := time.monotonic() - begun) < seconds:
        if waited >= said:
            print(f"waiting: {absence()} within {waited:.0f} s", file=sys.stderr, flush=True)
            said *= 2
        yield seconds - waited


def agree(what: str, values: Mapping[str, Any], seconds: float = 600) -> None:
    """Compares `values`, ready for JSON, by name, and their `surroundings` in all processes; each
    waits `seconds` for the others. Raises `UserError` in every process for one that differs."""
    if jax.process_count() == 1:
        return
    key, limit = f"ttcd_jax/agree/{next(_calls)}", int(1000 * seconds)
    client, number = ocp.multihost.get_jax_distributed_client(), jax.process_index()
    own = {name: _shown(value) for name, value in {**values, **surroundings()}.items()}
    if number == 0:
        client.key_value_set(f"{key}/values", json.dumps(own))
    first = json.loads(client.blocking_key_value_get(f"{key}/values", limit))
    differing = [
        f"{name}: process {number} has {own.get(name)}, process 0 has {first.get(name)}"
        for name in first | own
        if own.get(name) != first.get(name)
    ]
    client.key_value_set(f"{key}/differing/{number}", listed(differing, 3))
    client.wait_at_barrier(f"{what}: compared ({key})", limit)
    found = sorted(text for _, text in client.key_value_dir_get(f"{key}/differing/") if text)
    if found:
        raise UserError(f"the processes of this job differ: {found[0]}; start all of them alike")


def surroundings() -> dict[str, str]:
    """The code, versions and settings of JAX and XLA of this process, but where XLA dumps."""
    code = {"kernels": verified.source(), "code": verified.source(Path(__file__).parents[1])}
    values = code | {name: metadata.version(name) for name in PACKAGES}
    values |= {name: str(jax.config.values[name]) for name in _SETTINGS}
    given = ((name, x.partition("=")) for name in _FLAGS for x in os.environ.get(name, "").split())
    return values | {f"{y} {x[0]}": x[2] for y, x in given if not x[0].startswith("--xla_dump")}


def _shown(value: Any) -> str:
    """A value for JSON, a long one by its beginning and its digest."""
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... (sha256 {digest[:12]})"
