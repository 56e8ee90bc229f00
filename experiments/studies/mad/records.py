"""What a sweep records: a JSON file per finished setting and method, complete or absent."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments.studies.mad.tasks import PUBLISHED, MADConfig, TaskName
from ttcd_jax.config import Bound, Config, NonNegative, NonNegativeFloat, Positive, differences
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import lock, read_json, write_whole
from ttcd_jax.models.config import TransformerConfig

# The methods with published scores, and the two without a memory.
MAD_METHODS = (*PUBLISHED, "swa", "full")
MADMethod = Annotated[str, Bound(f"one of {', '.join(MAD_METHODS)}", MAD_METHODS.__contains__)]
Layers = tuple[float, float] | None  # a number of each fast layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """AdamW (beta 0.9 and 0.999, eps 1e-8) without a clip or warm-up, decay on every tensor, the
    rate constant within an epoch: 1e-6 + (rate - 1e-6) (1 + cos(pi epoch / epochs)) / 2; the
    fewest epochs with `max_steps`. The published code differs, mostly by accident: its cosine is
    never applied (`schedule="constant"`), its score is that of the epoch with the lowest loss on
    the *test* rows, not of the last one, and a run ends at a test accuracy above 0.999."""

    epochs: Positive = 200
    max_steps: Positive | None = None
    batch_size: Positive = 128
    schedule: Literal["cosine", "constant"] = "cosine"

    def steps_per_epoch(self, num_train: int) -> int:
        """The number of batches of an epoch, the last of which may be partial."""
        return -(-num_train // self.batch_size)

    def num_epochs(self, num_train: int) -> int:
        if self.max_steps is None:
            return self.epochs
        return min(self.epochs, -(-self.max_steps // self.steps_per_epoch(num_train)))


class Recorded(Config):
    """A part of a record: JSON has its fields, not its class."""

    def to_dict(self) -> dict[str, Any]:
        return {name: x for name, x in super().to_dict().items() if name != "type"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures(Recorded):
    """The scores of MAD on the test rows, the same with the memory switched off (`*_off`), and of
    each fast layer `memory_ratio`, |eta S| / |W_base| after the last token, `gate_mean`, and
    `key_rank`, the effective rank of the keys. What is not finite, or does not exist, is None, and
    not in the file."""

    gate_mean: Layers = None
    key_rank: Layers = None
    loss: float | None = None
    loss_off: float | None = None
    macro_accuracy: float
    macro_accuracy_off: float | None = None
    memory_ratio: Layers = None
    micro_accuracy: float
    micro_accuracy_off: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: x for name, x in super().to_dict().items() if x is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point(Recorded):
    """An evaluation of a run; a loss is None where it is not finite: JSON has no NaN."""

    epoch: Positive
    macro_accuracy: float
    loss: float | None
    training_loss: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Recorded):
    """A run: `failed_at`, the first step that was not finite, or None; `metrics` after the last
    epoch, None if it failed; `curve`, every evaluation up to the failure."""

    rate: NonNegativeFloat
    weight_decay: NonNegativeFloat
    seed: NonNegative
    failed_at: NonNegative | None
    metrics: Measures | None
    curve: tuple[Point, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Recorded):
    """A setting and a method: its runs are trained together and recorded in one file."""

    task: TaskName
    setting: str
    method: MADMethod
    data: MADConfig
    num_train: Positive
    num_test: Positive
    published_num_train: Positive
    epochs: Positive
    steps: Positive
    recipe: RecipeConfig
    model: TransformerConfig

    @property
    def name(self) -> str:
        return f"{self.task}.{self.setting}.{self.method}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Job):
    """A finished job: where and in how many seconds it was computed, and its runs."""

    environment: Annotated[dict, Bound("the facts of a device", lambda x: "device" in x)]
    seconds: float
    runs: tuple[Run, ...]


def read(path: Path) -> Record:
    """The record in a file. Raises `DataError` for a damaged one."""
    try:
        source = read_json(path)
        for run in source["runs"]:
            run["curve"] = tuple(Point(**point) for point in run["curve"])
            run["metrics"] = None if run["metrics"] is None else Measures(**run["metrics"])
        source["runs"] = tuple(Run(**run) for run in source["runs"])
        parts = {"data": MADConfig, "recipe": RecipeConfig, "model": TransformerConfig}
        source |= {name: part.from_dict(source[name]) for name, part in parts.items()}
        return Record(**source)
    except (ValueError, LookupError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}"
        text = f"{path} is damaged ({cause}): delete the file and run the sweep again"
        raise DataError(text) from error


def gather(sweeps: Sequence[Path]) -> list[Record]:
    """The records of several sweeps. Raises `UserError` where one has none, two have the same job,
    or trained a task by other settings, `DataError` where a file is damaged."""
    records: dict[str, Record] = {}
    known: dict[tuple[str, str], tuple[Path, dict[str, Any]]] = {}
    for sweep in sweeps:
        if not (sweep / "records").is_dir():
            raise UserError(f"{sweep} holds no records: give the folder of a sweep")
        for path in sorted((sweep / "records").glob("*.json")):
            if path.name in records:
                raise UserError(
                    f"{sweep} has {path.stem}, and so has another of the sweeps: show one of them "
                    "without --beside"
                )
            records[path.name] = record = read(path)
            for part, settings in _settings(record).items():
                first, expected = known.setdefault((record.task, part), (path, settings))
                if changed := differences(expected, settings):
                    text = f"{path} is of other settings than {first} ({changed[0]})"
                    raise UserError(f"{text}: show one of their sweeps alone")
    return list(records.values())


def _settings(record: Record) -> dict[str, dict[str, Any]]:
    """What the scores of a task have in common: all of them, those of a setting, of a method."""
    found = record.to_dict()
    found["runs"] = [[run.rate, run.weight_decay, run.seed] for run in record.runs]
    found |= {name: found["model"][name] for name in ("init_std", "precision")}
    found["model"]["vocab_size"] = None
    parts = {"": ("init_std", "precision", "recipe", "num_test", "runs")}
    parts |= {record.setting: ("data", "num_train", "epochs", "steps"), record.method: ("model",)}
    return {part: {name: found[name] for name in names} for part, names in parts.items()}


def record_path(sweep: Path, job: Job) -> Path:
    return sweep / "records" / f"{job.name}.json"


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process does the job of record `path`: it is not recorded yet, and no other
    process of this machine has claimed it. The claim ends with the block, or with the process."""
    locks = path.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / path.stem).open("w") as handle:
        try:
            lock(handle)
        except BlockingIOError:
            yield False
            return
        yield not path.exists()


def write(path: Path, record: Record) -> None:
    """Writes the record atomically; it is on disk when this returns."""
    write_whole(path, json.dumps(record.to_dict(), indent=1, allow_nan=False) + "\n")
