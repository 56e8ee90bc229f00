"""Rows of one corpus or several, drawn by weight: pure functions of (seed, index). Configurations
of training data make them, with a manifest that identifies the data (equal manifests mean equal
data), and open splits of text as token records."""

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add, mul
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import grain
from absl import logging

from ttcd_jax import config as configs
from ttcd_jax import storage
from ttcd_jax.data import records
from ttcd_jax.data.corpus import (
    CorpusConfig,
    EmptySplitError,
    Split,
    has_splits,
    load_documents,
    manifest,
)
from ttcd_jax.data.packing import BestFitRows, DocumentRows, PackedRows, encode_documents
from ttcd_jax.data.pipeline import ENDLESS, RowSource
from ttcd_jax.data.records import Metadata, TokenRecords
from ttcd_jax.data.synthetic import EvidenceConfig, RecallConfig, SyntheticConfig
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json, sha256

MANIFEST = "data.json"  # of a run's data, in its directory

Packing = Literal["concatenate", "best_fit"]
Weights = Sequence[float]


def corpus_rows(
    part: TokenRecords, data: "TextConfig | RecordsConfig", seed: int, shuffle_seed: int
) -> tuple[RowSource, int]:
    """(endless rows of one corpus, number of distinct ones): `seed` orders its documents,
    `shuffle_seed` its rows, anew at each pass."""
    if part.samples_are_rows:
        rows = DocumentRows(part, seq_len=data.seq_len, is_whole=True)
    else:
        kind = {"concatenate": PackedRows, "best_fit": BestFitRows}[data.packing]
        rows = kind(part, seq_len=data.seq_len, seed=seed)
    shuffled = grain.MapDataset.source(rows).seed(shuffle_seed % 2**32).shuffle()
    return shuffled.repeat(None)[:ENDLESS], len(rows)


class MixedRows:
    """Endless rows of `parts`, interleaved as evenly as possible: a random-access source.

    `stages`: (first row, weight of each part) in order, the first from row 0 on. Every part goes on
    where the stage before left it. Weights are exact to a hundredth of the smallest above 0.
    """

    def __init__(self, parts: Sequence[RowSource], stages: Sequence[tuple[int, Weights]]) -> None:
        self._parts = parts
        self._starts = [start for start, _ in stages]
        self._weights = [[int(x * (100 / min(filter(None, xs)))) for x in xs] for _, xs in stages]
        self._before = [[0] * len(parts)]  # rows of each part before each stage
        for stage, (start, stop) in enumerate(itertools.pairwise(self._starts)):
            drawn = _drawn(stop - start, self._weights[stage])
            self._before.append(list(map(add, self._before[-1], drawn)))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        stage = bisect.bisect_right(self._starts, index) - 1
        number, weights = int(index) - self._starts[stage], self._weights[stage]
        drawn = _drawn(number, weights)
        part = next(i for i, n in enumerate(_drawn(number + 1, weights)) if n > drawn[i])
        return self._parts[part][self._before[stage][part] + drawn[part]]


def _drawn(num_rows: int, weights: list[int]) -> list[int]:
    drawn, total = [], sum(weights)
    for weight in weights:
        rest = num_rows * (total - weight) // total if total else num_rows
        drawn.append(num_rows - rest)
        num_rows, total = rest, total - weight
    return drawn


def _that_have[T](parts: Iterable[T], open_part: Callable[[T], list[TokenRecords]]) -> list:
    """The records of all parts that have a split. Raises the error of the first if none has."""
    opened, errors = [], []
    for part in parts:
        try:
            opened += open_part(part)
        except EmptySplitError as error:
            errors.append(error)
    if not opened:
        raise errors[0]
    for error in errors:
        logging.warning("%s; the other parts of the mixture are used", error)
    return opened


class WeightedConfig(configs.Config):
    """Parts, mixed in rows of `seq_len` tokens.

    `weights`: relative shares of the rows, one per part, exact to a hundredth of the smallest.
    Without them every row of every part is equally likely; with a single part they have no effect.
    `stages`: other weights from given steps on, such as ((10000, (5, 5)), (20000, (0, 1))); a part
    of weight 0 is absent from a stage, and goes on after it.
    """

    weights: tuple[configs.PositiveFloat, ...] = ()
    stages: tuple[tuple[configs.NonNegative, tuple[configs.NonNegativeFloat, ...]], ...] = ()
    seq_len: Annotated[int, configs.AtLeast(2)]

    def check_weights(self, parts: str, num_parts: int) -> None:
        """Raises `UserError` for weights that are not one per part, and stages out of order."""
        name, starts = type(self).__name__, [start for start, _ in self.stages]
        if starts != sorted(set(starts)):
            raise UserError(f"{name}.stages begin at steps {starts}: put them in ascending order")
        for field, weights in (("weights", self.weights), *(("stages", w) for _, w in self.stages)):
            if len(weights) != num_parts and (weights or field == "stages"):
                raise UserError(
                    f"{name}.{field} {weights} are {len(weights)} numbers for {num_parts} {parts}; "
                    "give one each, or none"
                )
            least = min((weight for weight in weights if weight), default=0)
            if weights and not 0 < max(weights) <= 1e9 * least:
                raise UserError(f"{name}.{field} {weights} are all 0, or more than 10^9 apart")

    def mixed(
        self, parts: Sequence[tuple[RowSource, int]], batch_size: int, scale: Weights | None = None
    ) -> tuple[RowSource, int]:
        """(endless rows of the parts, number of distinct ones); a stage begins with a batch, and
        weights are multiplied by `scale`."""
        rows, sizes = zip(*parts, strict=True)
        stages = [(step * batch_size, weights) for step, weights in self.stages]
        stages = [(0, self.weights), *stages] if len(parts) > 1 else [(0, ())]
        scale = scale or [1] * len(parts)
        scaled = [(start, list(map(mul, weights, scale)) or sizes) for start, weights in stages]
        return MixedRows(rows, scaled), sum(sizes)


class RecordsConfig(WeightedConfig):
    """Folders of token records (`ttcd prepare`), which are its parts.

    `paths`: a folder of records, several of them, or the parent of those named in `folders`.
    `weights_per` "document": the weights are shares of the documents, converted by each folder's
    mean length. `packing` "best_fit": no document is cut that fits into a row.
    """

    paths: Annotated[str | tuple[str, ...], configs.Bound("one or more", bool), configs.IN_BUCKET]
    folders: tuple[str, ...] = ()
    weights_per: Literal["token", "document"] = "token"
    packing: Packing = "concatenate"

    def validate(self) -> None:
        if self.folders and len(self._paths) > 1:
            raise UserError(
                f"RecordsConfig.folders {self.folders} are names below one path, and there are "
                f"{len(self._paths)}: list all folders in paths, or give one"
            )
        self.check_weights("folders", len(self.folders or self._paths))

    def located(self) -> list[Path]:
        paths = [storage.to_path(path) for path in self._paths]
        is_there = paths[0].is_dir() or storage.address(paths[0]) is not None
        if self.folders and is_there and not storage.fetch(paths[0] / records.MANIFEST).exists():
            return [paths[0] / name for name in self.folders]
        return paths

    @property
    def _paths(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    @property
    def vocab_size(self) -> int:
        return self.manifests()[0]["vocab_size"]

    @property
    def tokenizer(self) -> TokenizerConfig:
        return records.records_tokenizer(self.located()[0])

    def manifests(self) -> list[Metadata]:
        """The manifest of each folder. Raises `DataError` if their tokenizers differ."""
        folders = self.located()
        first, *others = manifests = [records.read_manifest(folder) for folder in folders]
        for folder, other in zip(folders[1:], others, strict=True):
            for key in ("tokenizer", "bos_id", "eos_id"):
                if other[key] != first[key]:
                    raise DataError(
                        f"{folder} was made by another tokenizer ({key} {other[key]}) than "
                        f"{folders[0]} ({first[key]}); prepare both with one"
                    )
        return manifests

    def open(self, split: Split) -> list[TokenRecords]:
        self.manifests()
        return _that_have(self.located(), lambda folder: [records.open_records(folder, split)])

    def rows(
        self, seed: int, batch_size: int = 1, shuffle_seeds: Iterator[int] | None = None
    ) -> tuple[RowSource, Metadata]:
        """(endless rows of the training splits, manifest). Every corpus takes one of
        `shuffle_seeds`: two of one size would otherwise be read in the same order."""
        found, shuffle_seeds = self.identity(), shuffle_seeds or itertools.count(seed)
        corpora = [records.open_records(folder, "train") for folder in self.located()]
        parts = [corpus_rows(x, self, seed, next(shuffle_seeds)) for x in corpora]
        per_document = self.weights_per == "document"
        scale = [float(x.sizes.mean()) if per_document else 1.0 for x in corpora]
        rows, num_rows = self.mixed(parts, batch_size, scale)
        return rows, found | {"num_rows": num_rows}

    def identity(self) -> Metadata:
        return {"kind": "records", "sha256": [manifest["sha256"] for manifest in self.manifests()]}


class TextConfig(configs.Config):
    """Documents of a `corpus`, encoded by `tokenizer` and packed into rows of `seq_len` tokens;
    with `packing` "best_fit", none is cut that fits into a row."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    packing: Packing = "concatenate"
    seq_len: Annotated[int, configs.AtLeast(2)]

    @property
    def vocab_size(self) -> int:
        return build_tokenizer(self.tokenizer).vocab_size

    def identity(self) -> Metadata:
        return manifest(self.corpus, load_documents(self.corpus, "train"))

    def open(self, split: Split) -> list[TokenRecords]:
        documents = load_documents(self.corpus, split)
        return [encode_documents(documents, build_tokenizer(self.tokenizer))]

    def rows(
        self, seed: int, batch_size: int = 1, shuffle_seeds: Iterator[int] | None = None
    ) -> tuple[RowSource, Metadata]:
        documents = load_documents(self.corpus, "train")
        encoded = encode_documents(documents, build_tokenizer(self.tokenizer))
        rows, num_rows = corpus_rows(encoded, self, seed, next(shuffle_seeds or iter([seed])))
        metadata = manifest(self.corpus, documents) | {"num_rows": num_rows}
        if self.tokenizer.path is not None:
            metadata["tokenizer"] = sha256(storage.copy_of(self.tokenizer.path))
        return rows, metadata


class MixtureConfig(WeightedConfig):
    """Corpora of text and folders of records as `parts`, of one tokenizer and one `seq_len`."""

    parts: Annotated[tuple[TextConfig | RecordsConfig, ...], configs.Bound("one or more", bool)]

    def validate(self) -> None:
        self.check_weights("parts", len(self.parts))
        lengths = [part.seq_len for part in self.parts]
        if set(lengths) != {self.seq_len}:
            raise UserError(
                f"MixtureConfig.seq_len {self.seq_len} and those of its parts, {lengths}, differ: "
                "bind one to all"
            )
        if any(part.stages for part in self.parts if isinstance(part, RecordsConfig)):
            raise UserError("a part of MixtureConfig has stages: bind MixtureConfig.stages instead")

    @property
    def _alike(self) -> tuple[TextConfig | RecordsConfig, ...]:
        """The parts. Raises `DataError` if their tokenizers differ."""
        first, *others = tokenizers = [part.tokenizer for part in self.parts]
        contents = [x.path and read_json(storage.copy_of(x.path)) for x in tokenizers]
        for other, content in zip(others, contents[1:], strict=True):
            if content != contents[0] or _ends(first, other) != _ends(other, first):
                raise DataError(
                    f"the tokenizers of MixtureConfig.parts differ ({first.path or 'byte'} and "
                    f"{other.path or 'byte'}): prepare the records by the one of the text, and set "
                    "TokenizerConfig.bos_id and eos_id of the text to those of the records"
                )
        return self.parts

    @property
    def tokenizer(self) -> TokenizerConfig:
        return self._alike[0].tokenizer

    @property
    def vocab_size(self) -> int:
        return self._alike[0].vocab_size

    def identity(self) -> Metadata:
        return {"kind": "mixture", "parts": [part.identity() for part in self._alike]}

    def open(self, split: Split) -> list[TokenRecords]:
        return _that_have(self._alike, lambda part: part.open(split))

    def rows(self, seed: int, batch_size: int = 1) -> tuple[RowSource, Metadata]:
        seeds = itertools.count(seed)
        parts = [part.rows(seed, shuffle_seeds=seeds) for part in self._alike]
        rows, num_rows = self.mixed([(x, found["num_rows"]) for x, found in parts], batch_size)
        manifests = [found for _, found in parts]
        return rows, {"kind": "mixture", "num_rows": num_rows, "parts": manifests}


def _ends(config: TokenizerConfig, other: TokenizerConfig) -> tuple[int | None, int | None]:
    """(bos, eos), which are those of the file only where the configurations differ."""
    is_same = (config.bos_id, config.eos_id) == (other.bos_id, other.eos_id)
    found = config if is_same else build_tokenizer(config)
    return found.bos_id, found.eos_id


class BatchesConfig(configs.Config):
    """Batches from the caller of `ttcd_jax.train_run`, rows of `seq_len` tokens."""

    seq_len: Annotated[int, configs.AtLeast(2)]

    vocab_size: ClassVar[int] = 0  # tokens are checked batch by batch


Texts = TextConfig | RecordsConfig | MixtureConfig
DataConfig = Texts | RecallConfig | EvidenceConfig | BatchesConfig


def text_data(data: dict[str, Any]) -> Texts | None:
    """The data configuration of a run as an object, if it is text."""
    return _one_of(data, *get_args(Texts))


def synthetic_data(data: dict[str, Any]) -> SyntheticConfig | None:
    """The data configuration of a run as an object, if its rows are drawn."""
    return _one_of(data, RecallConfig, EvidenceConfig)


def _one_of(data: dict[str, Any], *kinds: type[configs.Config]) -> Any:
    return next((x.from_dict(data) for x in kinds if x.__name__ == data["type"]), None)


def row_length(data: dict[str, Any]) -> int:
    """Tokens in a row of a run with this data configuration."""
    drawn = synthetic_data(data)
    return data["seq_len"] if drawn is None else drawn.seq_len


def text_records(
    run_dir: str | os.PathLike[str],
    data: dict[str, Any],
    tokenizer: Tokenizer | None,
    text: str | None,
    option: str = "text",
) -> list[TokenRecords]:
    """The text to evaluate a run on: that of `text` (a file or a folder), else the validation split
    of `data`, its data configuration. Raises `UserError` for a run without text or tokenizer, and
    `DataError` for a missing or changed text. Both name the `option` that gives text."""
    if (drawn := synthetic_data(data)) is not None:
        raise UserError(
            f"{run_dir} was trained on {drawn.kind} data, not on text: measure it by "
            f"ttcd evaluate --task={drawn.kind}"
        )
    if data["type"] == BatchesConfig.__name__:
        raise UserError(
            f"{run_dir} was trained on batches of its caller, which have no tokenizer: set "
            "evaluate_every None, or evaluate by a task of your own"
        )
    if tokenizer is None:
        raise UserError(
            f"{run_dir} was imported without a tokenizer: import it again with "
            "--tokenizer=FILE.json or --tokenizer=byte"
        )
    if text is not None:
        if has_splits(Path(text)):
            raise UserError(f"--{option}={text} has splits: name one, --{option}={text}/validation")
        given = CorpusConfig(kind="text", path=text, validation_percent=0)
        return [encode_documents(load_documents(given, "train"), tokenizer)]
    if (config := text_data(data)) is None:
        raise UserError(f"{run_dir} was imported and has no corpus: pass --{option}=PATH")
    try:
        check_unchanged(run_dir, config.identity)
        return config.open("validation")
    except DataError as error:
        error.add_note(f"--{option}=PATH gives another text")
        raise


def check_unchanged(run_dir: str | os.PathLike[str], identity: Callable[[], Metadata]) -> None:
    """Raises `DataError` unless the data are those of the run's manifest, if it has one.
    `identity`: of the data as they are now, the fields of a manifest that are to agree."""
    path = storage.to_path(run_dir) / MANIFEST
    if not path.is_file():
        return
    current = identity()
    # Earlier versions stored no digest of the tokenizer.
    stored = {"tokenizer": current.get("tokenizer")} | read_json(path)
    if changed := configs.differences(_shared(stored, current), current):
        raise DataError(
            f"the training data changed since {run_dir} was started ({changed[0]}): restore it, or "
            "choose another --run_dir"
        )


def _shared(stored: Any, current: Any) -> Any:
    """The fields of `stored` that `current` has too, in lists of parts as well."""
    if isinstance(stored, dict) and isinstance(current, dict):
        # Earlier versions stored no Python, and two may have the same standard library.
        if "python" not in stored or stored.get("sha256") == current.get("sha256"):
            stored = stored | {"python": current.get("python")}
        return {name: _shared(stored.get(name), value) for name, value in current.items()}
    if isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        return [_shared(*pair) for pair in zip(stored, current, strict=True)]
    return stored
