"""Commands as tests run them: `python -m experiments.NAME` or `tests.NAME`, in their own process.

The import of jax takes most of its time. So a server imports it once, and a command is a fork of
the server, before JAX has a backend and its threads: arguments, environment, signals and exit
status are those of a started process. A test that compares processes starts some of them
(`is_forked=False`): forks share the order of their sets.
"""

import ctypes
import functools
import gc
import importlib
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# None of them defines a flag of a command.
IMPORTED = (
    *("ttcd_jax.run.training", "ttcd_jax.measure.results", "ttcd_jax.inference.generate"),
    *("ttcd_jax.run.bindings", "ttcd_jax.measure.page", "ttcd_jax.measure.pictures"),
    "ttcd_jax.commands.plan",
)
# XLA's CPU backend spends most of the suite in LLVM's optimizer and in MLIR passes over every
# fusion: level 0, the older emitters and one piece of code per program compile several times
# faster.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
PR_SET_CHILD_SUBREAPER = 36


def start(program: str | Path, *arguments, is_forked: bool = True, **options) -> subprocess.Popen:
    """A command by its name, or a program among the tests by its path, in the repository's folder;
    `options` are those of `subprocess.Popen`."""
    options = {"cwd": ROOT, "env": cpu_environment(), "text": True} | options
    line = [sys.executable, *_line(program, *arguments)]
    return (_Fork if is_forked else subprocess.Popen)(line, **options)


def _line(program: str | Path, *arguments) -> list[str]:
    """What follows `python`, for `launch`, `tests.parity` or a path."""
    module = program if str(program).startswith("tests.") else f"experiments.{program}"
    named = [program] if isinstance(program, Path) else ["-m", module]
    return [*map(str, (*named, *arguments))]


def run(
    program: str | Path, *arguments, input: str | None = None, timeout: float = 280, **options
) -> subprocess.CompletedProcess:
    """A command or program to its end, `input` on its standard input."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start(program, *arguments, **pipes | options) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def output(program: str | Path, *arguments, **options) -> str:
    """The standard output of a command or program that succeeds."""
    result = run(program, *arguments, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def line(text: str, **options) -> subprocess.CompletedProcess:
    """A command as a page writes it: `.venv/bin/python -m experiments.NAME ...`."""
    python, dash, module, *arguments = shlex.split(text)
    assert (python, dash) == (".venv/bin/python", "-m")
    return run(module.removeprefix("experiments."), *arguments, **options)


def lines_of(page: str) -> list[str]:
    """The lines of the first block of commands in a page of docs/."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[1]
    return [line for line in block.splitlines() if not line.startswith("#")]


def refused(module: str, *arguments, status: int = 2, **options) -> str:
    """The error line of a command with a user's mistake."""
    return mistake(run(module, *arguments, **options), status)


def mistake(result: subprocess.CompletedProcess, status: int = 2) -> str:
    """The error line of a command with a user's mistake, alone on its stderr, or after the line
    that says what is loaded."""
    assert result.returncode == status, result.stderr
    *before, error = result.stderr.splitlines(keepends=True)
    assert all(line.startswith("loading ") for line in before[:1])
    assert error.startswith("error: ")
    assert len(before) <= 1
    return error


def refuse(rows: Sequence[tuple[Sequence, int, str]], **options) -> None:
    """Each line ends with its status and one line, an error that has all words (divided by |)."""
    for line, status, words in rows:
        error = refused(*line, status=status, **options)
        assert all(word in error for word in words.split("|")), (line, error)


def cpu_environment(**variables: str) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu"} | variables


class _Fork(subprocess.Popen):
    """A process that the server forks, and that is a child of this one."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        pipes = rest[3:9]  # read and write end, of stdin, stdout and stderr
        server, its_environment = _server()
        # jax reads them when it is imported.
        assert _of_jax(env) == _of_jax(its_environment), "start it: is_forked=False"
        request = args[1:], str(cwd), env
        standard = [fd if fd >= 0 else i for i, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        socket.send_fds(server, [json.dumps(request).encode()], standard)
        self.pid = int(server.recv(16))
        server.recv(16)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _of_jax(environment) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("JAX_")}


@functools.cache
def _server():
    """The server's socket and environment. What it forks becomes a child of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # OpenBLAS would start its threads when NumPy is imported.
    environment = cpu_environment(OPENBLAS_NUM_THREADS="1")
    options = {"stdin": its, "stdout": subprocess.DEVNULL, "cwd": ROOT, "env": environment}
    subprocess.Popen([sys.executable, __file__], **options)
    its.close()
    return ours, environment


def _serve() -> list[str]:
    """Forks a process for every request; returns in it, with the line that it is to run."""
    sys.path[0] = os.getcwd()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)
    requests = socket.socket(fileno=0)
    while True:
        request, standard, *_ = socket.recv_fds(requests, 2**20, 3)
        if not request:
            sys.exit()  # the tests are over
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would be lost in the fork"
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                break
            requests.send(str(pid).encode())
            os._exit(0)  # its child becomes the test's
        os.waitpid(between, 0)
        requests.send(b"given away")
        for fd in standard:
            os.close(fd)
    requests.detach()
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    arguments, folder, environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:1] = [folder, str(ROOT)]  # where `experiments` is
    return arguments


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        module, *sys.argv[1:] = arguments[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path[:1] = map(str, (Path(arguments[0]).parent, ROOT / "tests", ROOT))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _run(_serve())
