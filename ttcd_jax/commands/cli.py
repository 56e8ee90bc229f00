"""The entry point of every command: flags, and one line and an exit status for a user's mistake.

Exit statuses are those of docs/errors.md; 2 also for a kernel by name that cannot run here, a
missing package and a file refused by the system, 6 for any full disk and exhausted memory.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import multiprocessing
import os
import re
import select
import shlex
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from ttcd_jax.allocation import take_device_memory
from ttcd_jax.config import Config, check_text
from ttcd_jax.errors import ResourceError, UserError
from ttcd_jax.files import full_disk
from ttcd_jax.registry import import_modules
from ttcd_jax.run.bindings import find_gin_file, read_file
from ttcd_jax.storage import SCHEMES, root, to_path, user_cache
from ttcd_jax.units import OF_OUTPUT, printable

_PACKAGE = Path(__file__).parents[1]
_CONFIG_DIRS = (_PACKAGE / "configs", _PACKAGE.parent / "experiments" / "configs")
CONFIG_DIR = next((path for path in _CONFIG_DIRS if path.is_dir()), _CONFIG_DIRS[0])
_MOST_QUOTED = 1000  # characters at either end of a longer error
_IN_BUCKETS = ("run_dir", "output", "records", "verify", "tokenizer", "memory")
_IN_BUCKETS += ("save_state", "load_state", "save_memory", "load_memory")
_MAY_BE_IN_BUCKET = {"an argument", *(f"--{name}" for name in _IN_BUCKETS)}  # of `convert`
_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")
_OF_JAX = re.compile("Unable to initialize backend|for JAX flag|for environment 'JAX_")

flags.DEFINE_multi_string(
    "import",
    [],
    "A module that registers your own methods, tasks, metrics, optimizers or trackers, as "
    "my_package.my_method; its code is run. Runs name those that they need.",
)

# What the arguments after the flags choose: a class of options, or a text for --help.
type OptionsOf = Callable[[list[str]], type[Config] | str | None]


class _SaysLoading:
    """A finder of modules that finds none: it says, once, that a slow package is imported."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "jax":
            sys.meta_path.remove(_SaysLoading)  # pyright: ignore[reportArgumentType]
            if multiprocessing.parent_process() is None:
                with contextlib.suppress(OSError):  # nobody reads it
                    print("loading JAX", file=sys.stderr, flush=True)


if "jax" not in sys.modules:
    sys.meta_path.insert(0, _SaysLoading)  # pyright: ignore[reportArgumentType]


def run(
    main: Callable[[list[str]], None],
    arguments: Sequence[str] | None = (),
    options: OptionsOf | None = None,
) -> NoReturn:
    """Parses the flags, calls `main([program, *values of arguments])` and ends the process.

    `arguments` names the required arguments after the flags; with None every argument that is not
    a flag is passed to `main`. `options` gives the class of the options that flags and the
    arguments after them choose, if they choose one: --help shows its fields, or a text.
    """
    open_standard_streams()
    for name in {"import", "distributed"} & {*flags.FLAGS}:  # which --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
    logging.set_verbosity(logging.WARNING)  # jax reports which backends it did not find
    with mistakes_reported():
        app.run(main, flags_parser=functools.partial(_parse_flags, arguments, options))
    raise AssertionError("app.run ends in SystemExit")


@contextlib.contextmanager
def mistakes_reported() -> Iterator[None]:
    """Sets the share of a device that JAX takes; whatever is raised inside ends the process with a
    line and a status of those above. Raises as well for a variable with which nothing works."""
    try:
        try:
            take_device_memory()
            disabled = os.environ.get("JAX_DISABLE_JIT", "").lower()
            if disabled in ("1", "y", "yes", "t", "true", "on"):
                raise UserError("JAX_DISABLE_JIT is set, and programs here are compiled: unset it")
            yield
        finally:
            sys.stdout.flush()
    except UserError as error:
        _leave(f"error: {error}{_notes(error)}", error.exit_code)
    except ImportError as error:
        if (package := _missing_package(error)) is None:
            raise
        _leave(f"error: this needs {package}, which is missing: pip install {package}", 2)
    except KeyboardInterrupt:
        _leave("interrupted", 128 + signal.SIGINT)
    except (ValueError, AssertionError, RuntimeError, MemoryError) as error:
        _leave_if_unsupported(error)
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        _leave(
            f"error: out of memory ({str(error).partition(chr(10))[0]}): take a smaller batch, "
            "shorter rows or more devices; launch --dry_run prints the bytes of a step"
            + _notes(error),
            ResourceError.exit_code,
        )
    except OSError as error:
        is_closed = isinstance(error, BrokenPipeError) and _output_is_closed()
        if not is_closed and not full_disk(error):
            if error.filename is not None and not _is_ours(error.filename):
                _leave(f"error: {error.filename}: {error.strerror}", UserError.exit_code)
            raise
        # Python flushes stdout once more when it exits: give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_closed:
            sys.exit(128 + signal.SIGPIPE)
        _leave(f"error: {error}: make room", ResourceError.exit_code)


def define_distributed() -> None:
    """Defines the flag of commands that run as one job of several processes, which `connect`."""
    flags.DEFINE_string(
        "distributed",
        "none",
        "How several processes find each other: none, slurm, jobset, or "
        "HOST:PORT,NUM_PROCESSES,PROCESS_ID, where {NAME} is a variable of the environment.",
    )


def recipe_options(_: Sequence[str]) -> str:
    """For --help: what the file of --gin leaves to --param by a name."""
    name = flags.FLAGS.gin
    bindings = read_file(find_gin_file(name, CONFIG_DIR), CONFIG_DIR).values() if name else ()
    if not (lines := [f'  --param="{x.owner}={x.value!r}"' for x in bindings if not x.field]):
        return ""
    return "\n".join([f"\nvalues of {name}, besides all that `ttcd show {name}` has:", *lines, ""])


def command_line(command: str) -> str:
    """The command as the user has written it."""
    is_old = "experiments" in sys.modules
    program = ("python", "-m", f"experiments.{command}") if is_old else ("ttcd", command)
    return shlex.join([*program, *sys.argv[1:]])


def connect(lost_seconds: float = 60.0) -> None:
    """Joins the other processes of the job, if any. One that is not heard of for twice
    `lost_seconds` is lost, also before the first step. Call it before JAX's first array."""
    import jax

    from ttcd_jax.sharding.distributed import detect, initialize
    from ttcd_jax.train.watchdog import Watchdog

    processes = detect(flags.FLAGS.distributed, os.environ)
    if processes is not None:
        with Watchdog(processes.count):
            initialize(processes, heartbeat_seconds=math.ceil(2 * lost_seconds))
            jax.devices()  # waits until each process knows those of the others


def clean_up_on_sigterm() -> None:
    """Makes SIGTERM end the process as Ctrl-C does: unfinished files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def keep_programs() -> None:
    """Keeps compiled programs in JAX_COMPILATION_CACHE_DIR, else in the user's cache folder."""
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # default: 1
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # which jax has read
        jax.config.update("jax_compilation_cache_dir", str(user_cache()))


def output_folder(output: str | os.PathLike[str]) -> Path:
    """The folder of --output. Raises `UserError` for a file."""
    if (folder := to_path(output)).is_file():
        raise UserError(f"--output={folder} is a file: name a folder")
    return folder


def parse_options[C: Config](
    config: type[C], owner: str, options: Iterable[str], defaults: Mapping[str, Any] | None = None
) -> C:
    """A configuration from `name=value` or `--name=value`; other fields keep their value in
    `defaults` or the class. The values of a tuple are separated by commas, except strings, which
    take one option each. Raises `UserError` for an option that `owner` does not take."""
    types, values = typing.get_type_hints(config), {}
    hints = {field.name: types[field.name] for field in dataclasses.fields(config)}
    for option in options:
        name, equals, text = option.removeprefix("--").partition("=")
        if name not in hints or not equals:
            takes = ", ".join(f"{name}=VALUE" for name in hints)
            raise UserError(f"{owner} has no option {option!r}: it takes {takes}")
        hint = hints[name]
        if hint == tuple[str, ...]:
            values[name] = (*values.get(name, ()), text)
        elif typing.get_origin(hint) is tuple:
            values[name] = tuple(_literal(part) for part in text.split(","))
        else:
            values[name] = text if str in (hint, *typing.get_args(hint)) else _literal(text)
    return config(**{**(defaults or {}), **values})


def _literal(text: str) -> Any:
    """The Python literal that `text` spells, else `text` itself; the field checks its type."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _missing_package(error: ImportError) -> str | None:
    """The package that is absent, or raises this; None where a name of ours or in a package is."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if error.name and str(error).startswith("cannot import name"):
        return None
    package = error.name or frame.f_globals["__name__"].partition(".")[0]
    ours = ("ttcd_jax", "ttcd_kernels", "experiments", "__main__", *sys.stdlib_module_names)
    return None if "." in package or package in ours else package


def _show_options(options: OptionsOf, command_line: list[str]) -> None:
    """Prints the options of a command besides its flags, where the command line chooses them."""
    line, rest = [x for x in command_line if not re.fullmatch(r"--?help\w*|-\?", x)], []
    with contextlib.suppress(flags.Error):  # a required flag may be missing
        rest = flags.FLAGS(line, known_only=True)
    import_modules(flags.FLAGS["import"].value or ())
    if (config := options(rest)) is None or isinstance(config, str):
        return print(config or "", end="")
    print(f"\n{inspect.getdoc(config)}\n\noptions and their defaults:")
    for field in dataclasses.fields(config):
        default = "VALUE" if field.default is dataclasses.MISSING else field.default
        values = default if isinstance(default, tuple) else [default]
        print(f"  --{field.name}={','.join(map(str, values))}")


def _parse_flags(
    names: Sequence[str] | None, options: OptionsOf | None, command_line: list[str]
) -> list[str]:
    flags.FLAGS.set_gnu_getopt(True)  # flags may follow arguments
    try:
        program, *rest = flags.FLAGS(command_line, known_only=names is None)
    except flags.Error as error:
        text = " ".join(str(error).split())
        if found := re.search(r"Flag --(\w+) must have a value other than None", text):
            text = f"--{found[1]} is missing. {flags.FLAGS[found[1]].help.partition(';\n')[0]}"
        raise UserError(text) from None
    except SystemExit:
        # Only a help flag exits while flags are parsed, and absl calls that a failure.
        if options is not None:
            _show_options(options, command_line)
        sys.exit(0)
    _check_texts(rest)
    import_modules(flags.FLAGS["import"].value or ())
    if names is None:
        return [program, *rest]
    if len(rest) > len(names):
        extra = rest[len(names)]
        raise UserError(f"unexpected argument {extra!r}; options are written --name=value")
    if len(rest) < len(names):
        raise UserError(f"{names[len(rest)]} is missing; the command takes {' '.join(names)}")
    return [program, *rest]


def open_standard_streams() -> None:
    """Opens those that the caller closed, or files of ours would get their numbers. Lines printed
    or logged may quote anything: control characters are escaped here, for all."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in {sys.stdout, sys.stderr}:
        stream.write = lambda text, write=stream.write: write(_shown(text))


def _shown(text: str) -> str:
    """Text for a reader: printable, paths of copies as the addresses of what they are copies of."""
    for scheme in SCHEMES:
        text = text.replace(f"{root()}/{scheme}/", f"{scheme}://")
    return printable(text, OF_OUTPUT)


def _check_texts(arguments: Sequence[str]) -> None:
    """Raises `UserError` for a flag or an argument that is empty, or in a bucket in vain."""
    texts = [("an argument", text) for text in arguments]
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        if flag.present:
            values = (flag.value or [""]) if isinstance(flag.value, list) else [flag.value]
            texts += [(f"--{name}", value) for value in values if isinstance(value, str)]
    for name, text in texts:
        check_text(name, text, in_bucket=name in _MAY_BE_IN_BUCKET)


def _is_ours(file: str | bytes) -> bool:
    """Whether a file is a part of the program: that it is missing is no user's mistake."""
    path = Path(os.fsdecode(file)).absolute()
    return path.is_relative_to(_PACKAGE) or path.is_relative_to(CONFIG_DIR.parent)


def _notes(error: Exception) -> str:
    notes = getattr(error, "__notes__", ())  # longer ones are a library's, on its traceback
    return "".join(f"; {note}" for note in notes if "\n" not in note)


def _leave(message: str, status: int) -> NoReturn:
    if len(message) > 3 * _MOST_QUOTED:  # it quotes a value; the remedy is at the end
        message = f"{message[:_MOST_QUOTED]} ... {message[-_MOST_QUOTED:]}"
    with contextlib.suppress(OSError):  # the log may be on the same full disk
        print(printable(message), file=sys.stderr)
    sys.exit(status)


def _leave_if_unsupported(error: Exception) -> None:
    """Ends the process if a kernel refused to run here (it has imported `dispatch`, which is slow),
    or JAX to start with its variables; that there is no device it asserts without a word."""
    dispatch, text = sys.modules.get("ttcd_kernels.dispatch"), str(error)
    if isinstance(error, AssertionError) and not text:
        try:
            sys.modules["jax"].devices()
        except AssertionError:
            text = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')} has no device here: unset it"
            _leave(f"error: {text}", UserError.exit_code)
    elif _OF_JAX.search(text) or (dispatch and isinstance(error, dispatch.Unsupported)):
        _leave(f"error: {text}", UserError.exit_code)


def _output_is_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
