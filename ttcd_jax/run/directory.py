"""The run directory: the files that a run writes. Evaluation needs no others.

config.json      configuration, its changes    config.gin        the recipe and its parameters
data.json        manifest of the data          environment.json  versions and device
checkpoints/     Orbax steps with digests      metrics.jsonl, tensorboard/
metrics.jsonl.repeated                         records before an interruption, made again
evaluations.json                               digests of the data of its evaluations
eval/            results of evaluations        lock              held by the training process

An imported run has import.json (origin, digests, dtypes) instead of data.json, and its
tokenizer.json if it came with one.
"""

import contextlib
import fcntl
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
from ttcd_kernels import measure

from ttcd_jax import storage
from ttcd_jax.config import check_text
from ttcd_jax.data.records import sealed
from ttcd_jax.data.sources import MANIFEST, check_unchanged, text_data
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import CheckpointError, DataError, UserError
from ttcd_jax.files import parse_json, read_json, sha256, write_json, write_whole
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.registry import IMPORTED_MODULES, check_imported
from ttcd_jax.run.config import LAYOUT, accepted_changes, upgraded
from ttcd_jax.run.model_changes import changed_model
from ttcd_jax.sharding.distributed import PACKAGES
from ttcd_jax.train.checkpoint import Checkpoints, complete_steps, fetch_steps
from ttcd_jax.train.state import abstract_params, params_shardings, placed_as, with_params

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.json"
REHEARSAL = "rehearsal-"  # and the number of its process: a folder
TOKENIZER = "tokenizer.json"
IMPORTED = "imported"  # the data type of an imported run
IMPORT = "import.json"

# 1 stored layers stacked, 2 stored them one by one, 3 has a sha256 of config.json in it.
FORMAT = 3

_OF_THE_FILE = ("format", "sha256", "changes", "imports")  # no fields of the configuration
# The files of a claim in the order they are written: without the last it was not finished.
_CLAIM = ("environment.json", MANIFEST, "config.gin", "config.json")


class RunDirectory:
    """Paths and small files of one run. Raises `OSError` for one in a bucket that cannot be
    reached, unless it `may_be_unreachable`."""

    def __init__(self, path: str | os.PathLike[str], *, may_be_unreachable: bool = False) -> None:
        if not isinstance(path, str | os.PathLike):
            raise UserError(f"a run directory is a path, not {path!r:.60}")
        check_text("the run directory", str(path), in_bucket=True)
        self.path = storage.to_path(path).absolute()
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:  # Orbax cannot write there
            raise UserError(
                f"the run directory {self.path} has a name that is not UTF-8: choose another, or "
                "set LC_ALL=C.UTF-8"
            ) from error
        self.checkpoints = self.path / "checkpoints"
        with contextlib.suppress(*[OSError] * may_be_unreachable):
            self.fetch()

    def fetch(self, *, is_locked: bool = False) -> None:
        """Brings the copy of a directory in a bucket up to date, its checkpoints as far as their
        digests; not that of a run on this machine, which has locked it."""
        if storage.address(self.path) is None:
            return
        with contextlib.suppress(BlockingIOError):
            for file in () if is_locked else self.path.glob("lock"):
                with file.open() as handle:
                    storage.lock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            storage.fetch(self.path, lambda x: x.partition("/")[0] not in ("lock", "checkpoints"))
            fetch_steps(self.checkpoints)

    @property
    def is_claimed(self) -> bool:
        """Whether a run has written its configuration here."""
        return (self.path / "config.json").exists()

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration. Raises `UserError` without one or for another format,
        `CheckpointError` for one that is not as it was written."""
        config = self._read("config.json")
        version = config.get("format", 1)
        if version not in (2, FORMAT):
            raise UserError(
                f"{self.path} is a run directory of format {version}, this version reads {FORMAT}: "
                "train it, or import its checkpoint, again"
            )
        is_sealed = version == FORMAT or "sha256" in config
        if is_sealed and config != sealed({x: config[x] for x in config if x != "sha256"}):
            raise CheckpointError(
                f"{self.path / 'config.json'} was edited or damaged since it was written: restore "
                "a copy (a run's fields are changed by launch --param=... --change=...)"
            )
        self.check_imports()
        return upgraded({x: config[x] for x in config if x not in _OF_THE_FILE})

    def check_imports(self) -> None:
        """Raises `UserError` for a run whose modules this process has not imported."""
        if self.is_claimed:
            check_imported(str(self.path), self._read("config.json").get("imports", []))

    def read_part(self, name: str) -> dict[str, Any]:
        """The configuration `model` or `data`. Raises `UserError` for none."""
        part, file = self.read_config().get(name), self.path / "config.json"
        if not isinstance(part, dict) or "type" not in part:
            raise UserError(f"{file} has no {name} with a type: it is damaged, restore a copy")
        return part

    def claim(
        self,
        config: dict[str, Any],
        source: str | None,
        data: dict[str, Any],
        layout: Sequence[str] = LAYOUT,
        changes: Sequence[str] = (),
    ) -> None:
        """Writes the files of a new run, or checks that the run here is the same apart from the
        fields `layout` and `changes`. The latter are recorded. Called under the lock: unfinished
        files of a killed process are removed. Raises `UserError` naming differing fields,
        `DataError` for other data."""
        for path in (x for name in (*_CLAIM, METRICS) for x in self.path.glob(f".{name}.*")):
            path.unlink()
        accepted = self.accepted_changes(config, changes, layout)
        if not self.is_claimed:
            self.check_free()
            self.write(config, data, MANIFEST, source)
            return
        check_unchanged(self.path, lambda: data)
        if accepted:
            history = self._read("config.json").get("changes", [])
            self._write_config(config, source, [*history, *accepted])

    def accepted_changes(
        self, config: dict[str, Any], named: Sequence[str] | None, layout: Sequence[str] = LAYOUT
    ) -> list[dict[str, Any]]:
        """What `run.config.accepted_changes` accepts of the run here, if there is one, after which
        step. Raises `UserError` for any other difference, and for fewer steps than are done."""
        old = self.read_config() if self.is_claimed else config
        accepted = accepted_changes(self.path, old, config, named, layout)
        done = max(complete_steps(self.checkpoints), default=0)
        if accepted and config["steps"] < done:
            raise UserError(
                f"RunConfig.steps {config['steps']} is below the {done} steps that {self.path} has "
                f"done: take {done} or more, or choose another --run_dir"
            )
        return [{"step": done} | x for x in accepted]

    def check_free(self) -> None:
        """Raises `UserError` for a folder that is not empty and holds no run."""
        unfinished = *(f".{name}." for name in (*_CLAIM, METRICS)), REHEARSAL  # of killed processes
        found = os.listdir(self.path) if self.path.is_dir() else ()
        names = {name for name in found if name != "lock" and not name.startswith(unfinished)}
        if names != set(_CLAIM[: len(names)]) and not self.is_claimed:
            raise UserError(
                f"{self.path} is not empty and holds no run (no config.json): choose another "
                "--run_dir"
            )

    def write(
        self, config: dict[str, Any], origin: dict[str, Any], name: str, source: str | None = None
    ) -> None:
        """Writes the files of a new run: of its `origin` the file `name`, which for a run that is
        trained is `MANIFEST`, for an imported one `IMPORT`."""
        environment = {
            "command": sys.argv,
            "commit": measure.environment()["commit"],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "devices": [device.device_kind for device in jax.devices()],
        }
        write_json(self.path / "environment.json", environment)
        write_json(self.path / name, origin)
        self._write_config(config, source, [])

    def _write_config(
        self, config: dict[str, Any], source: str | None, changes: list[dict[str, Any]]
    ) -> None:
        if source is not None:
            write_whole(self.path / "config.gin", source)
        old = self._read("config.json").get("imports", []) if self.is_claimed else []
        content: dict[str, Any] = {"format": FORMAT, "changes": changes}
        if imports := [*dict.fromkeys([*old, *IMPORTED_MODULES])]:
            content["imports"] = imports
        write_json(self.path / "config.json", sealed(content | config))

    def read_import(self) -> dict[str, Any] | None:
        """The origin of an imported run; None for a run that was trained."""
        return self._read(IMPORT) if (self.path / IMPORT).exists() else None

    @contextlib.contextmanager
    def lock(self, *, waits: bool = False) -> Iterator[None]:
        """Locks the directory; while another process holds it, waits or raises `UserError`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            handle = os.fdopen(os.open(self.path / "lock", flags, 0o666), "a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be a run directory ({error.strerror}): choose another "
                "--run_dir"
            ) from error
        with handle:
            try:
                storage.lock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError as error:
                handle.seek(0)
                owner = handle.read().strip() or "another process"  # that has not written its name
                raise UserError(
                    f"{self.path} is in use by {owner}: wait for it, or choose another --run_dir"
                ) from error
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            handle.flush()
            with storage.lease(self.path):
                self.fetch(is_locked=True)
                yield

    def _read(self, name: str) -> dict[str, Any]:
        if not (self.path / name).is_file():
            raise UserError(f"{self.path} is not a run directory: it has no {name}")
        return read_json(self.path / name)


def load_params(
    run_dir: str | os.PathLike[str], step: int | None = None, changes: Sequence[str] = ()
) -> tuple[dict[str, Any], TransformerConfig, int]:
    """(parameters, configuration, step) of a run, on the mesh in use (`jax.set_mesh`) if there is
    one, else on the first device. The arguments and errors are those of `load_run`."""
    directory = RunDirectory(run_dir)
    if step is not None and type(step) is not int:
        raise UserError(f"step {step!r} is not a number")
    config = model_config(directory)
    changed = changed_model(config, changes)
    length = directory.read_part("data").get("seq_len")
    if changed.sink_tokens > config.sink_tokens == 0 and changed.sink_reach is None and length:
        # What the model was trained on saw them from no farther.
        least = (changed.window or 0) + changed.sink_tokens
        changed = changed.replace(sink_reach=max(length, least))
    params = abstract_params(config)
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        params = placed_as(params, params_shardings(config, mesh))
    with open_checkpoints(directory, config) as checkpoints:
        step, state = checkpoints.restore({"params": params}, step)
    return state["params"], changed, step


def open_checkpoints(
    directory: RunDirectory, model: TransformerConfig | None = None
) -> contextlib.closing[Checkpoints]:
    """The checkpoints of a run, read-only: of `model`, or without one as stored."""
    return contextlib.closing(Checkpoints(directory.checkpoints, model=model, is_read_only=True))


def model_config(directory: RunDirectory) -> TransformerConfig:
    """The model configuration of a run directory; no checkpoint is needed."""
    return TransformerConfig.from_dict(directory.read_part("model"))


class LoadedRun(NamedTuple):
    """A trained model with its configuration. `tokenizer` is None for synthetic data, and for an
    imported run without one."""

    model: Transformer
    config: TransformerConfig
    step: int
    tokenizer: Tokenizer | None


def load_run(
    run_dir: str | os.PathLike[str], step: int | None = None, changes: Sequence[str] = ()
) -> LoadedRun:
    """The model of a run directory at its newest intact checkpoint, or at `step`, with the
    `changes` of its configuration that `ttcd_jax.run.model_changes` allows.

        run = load_run("runs/quickstart/text")
        logits = run.model(tokens)                       # [B, T, V]
        run = load_run("runs/quickstart/text", changes=["TransformerConfig.window=None"])

    Reads only `config.json` and the checkpoint's parameters. Raises `UserError` for a folder that
    is not a run directory, a configuration unknown to this version and a refused change,
    `CheckpointError` for a checkpoint that is missing, damaged or of another model.
    """
    params, config, step = load_params(run_dir, step, changes)
    model, tokenizer = with_params(config, params), run_tokenizer(RunDirectory(run_dir))
    return LoadedRun(model, config, step, tokenizer)


def run_tokenizer(directory: RunDirectory) -> Tokenizer | None:
    """The tokenizer of the run's data, None without one."""
    config = tokenizer_config(directory)
    return config and build_tokenizer(config)


def tokenizer_config(directory: RunDirectory) -> TokenizerConfig | None:
    """Its configuration; the file in the directory takes precedence over the configured path."""
    data = directory.read_part("data")
    if "tokenizer" in data:
        config = TokenizerConfig.from_dict(data["tokenizer"])
    elif (text := text_data(data)) is not None:
        config = text.tokenizer
    else:
        return None
    copy = directory.path / TOKENIZER
    if config.kind == "json" and copy.is_file():
        return config.replace(path=str(copy))
    if config.path is not None and (directory.path / MANIFEST).is_file():
        found = read_json(directory.path / MANIFEST)
        stored = {x.get("tokenizer") for x in (found, *found.get("parts", ()))} - {None}
        if stored and sha256(storage.copy_of(config.path)) not in stored:
            raise DataError(
                f"{config.path} is another tokenizer than that which {directory.path} was trained "
                "with: restore a copy"
            )
    return config


def imported_texts(directory: RunDirectory) -> dict[str, str]:
    """The text files of the import that a run descends from, as far as its ancestors are there."""
    if (metadata := directory.read_import()) is not None:
        return metadata.get("text_files", {})
    start = directory.read_config().get("start_from")
    ancestor = RunDirectory(start) if isinstance(start, str) else None
    return imported_texts(ancestor) if ancestor is not None and ancestor.is_claimed else {}


def chat_template(directory: RunDirectory) -> str:
    """The chat template that the checkpoint of a run came with. Raises `UserError` for none."""
    texts, path = imported_texts(directory), directory.path
    settings = parse_json(texts.get("tokenizer_config.json", "{}").encode(), path)
    template = texts.get("chat_template.jinja") or settings.get("chat_template")
    if isinstance(template, list):  # several by their names, one with tools
        named = {str(x.get("name")): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(f"{path} has no chat template: it is not of a checkpoint that answers")
    return template
