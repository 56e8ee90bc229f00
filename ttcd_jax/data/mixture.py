"""Rows of one corpus or several, drawn by weight: pure functions of (seed, index)."""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, pairwise
from operator import add, mul
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import grain

from ttcd_jax.config import AtLeast, Config, NonNegative, NonNegativeFloat, PositiveFloat
from ttcd_jax.data.best_fit import BestFitRows
from ttcd_jax.data.corpus import EmptySplitError, Split
from ttcd_jax.data.packing import DocumentRows, PackedRows
from ttcd_jax.data.pipeline import ENDLESS, RowSource
from ttcd_jax.data.records import (
    MANIFEST,
    TokenRecords,
    open_records,
    read_manifest,
    records_tokenizer,
)
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError, UserError

Packing = Literal["concatenate", "best_fit"]
Weights = Sequence[float]


def corpus_rows(
    records: TokenRecords, *, seq_len: int, packing: Packing, seed: int, shuffle_seed: int
) -> tuple[RowSource, int]:
    """(endless rows of one corpus, number of distinct ones): `seed` orders its documents,
    `shuffle_seed` its rows, anew at each pass."""
    if records.samples_are_rows:
        rows = DocumentRows(records, seq_len=seq_len, is_whole=True)
    else:
        kind = {"concatenate": PackedRows, "best_fit": BestFitRows}[packing]
        rows = kind(records, seq_len=seq_len, seed=seed)
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
        self._weights = [_integers(weights) for _, weights in stages]
        self._before = [[0] * len(parts)]  # rows of each part before each stage
        for (start, stop), weights in zip(pairwise(self._starts), self._weights, strict=False):
            self._before.append(list(map(add, self._before[-1], _drawn(stop - start, weights))))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        stage = bisect.bisect_right(self._starts, index) - 1
        number, weights = int(index) - self._starts[stage], self._weights[stage]
        drawn = _drawn(number, weights)
        part = next(i for i, n in enumerate(_drawn(number + 1, weights)) if n > drawn[i])
        return self._parts[part][self._before[stage][part] + drawn[part]]


def _integers(weights: Weights) -> list[int]:
    scale = 100 / min(weight for weight in weights if weight)
    return [int(weight * scale) for weight in weights]


def _drawn(num_rows: int, weights: list[int]) -> list[int]:
    """Rows of each part among the first `num_rows`."""
    drawn, total = [], sum(weights)
    for weight in weights:
        rest = num_rows * (total - weight) // total if total else num_rows
        drawn.append(num_rows - rest)
        num_rows, total = rest, total - weight
    return drawn


def that_have[T](parts: Iterable[T], open_part: Callable[[T], list[TokenRecords]]) -> list:
    """The records of all parts that have a split. Raises the error of the first if none has."""
    opened, errors = [], []
    for part in parts:
        try:
            opened += open_part(part)
        except EmptySplitError as error:
            errors.append(error)
    if not opened:
        raise errors[0]
    return opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedConfig(Config):
    """Parts, mixed in rows of `seq_len` tokens.

    `weights`: relative shares of the rows, one per part, exact to a hundredth of the smallest.
    Without them every row of every part is equally likely; with a single part they have no effect.
    `stages`: other weights from given steps on, such as ((10000, (5, 5)), (20000, (0, 1))); a part
    of weight 0 is absent from a stage, and goes on after it.
    """

    weights: tuple[PositiveFloat, ...] = ()
    stages: tuple[tuple[NonNegative, tuple[NonNegativeFloat, ...]], ...] = ()
    seq_len: Annotated[int, AtLeast(2)]

    rows_are_documents: ClassVar[bool] = False

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
        for _, weights in stages:
            if len(weights) not in (0, len(parts)):
                raise DataError(
                    f"{type(self).__name__} has weights {weights} for {len(weights)} parts, and "
                    f"{len(parts)} have a train split: prepare the others with one"
                )
        scale = scale or [1] * len(parts)
        scaled = [(start, list(map(mul, weights, scale)) or sizes) for start, weights in stages]
        return MixedRows(rows, scaled), sum(sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsConfig(WeightedConfig):
    """Folders of token records (`python -m experiments.prepare_data`), which are its parts.

    `paths`: a folder of records, several of them, or the parent of those named in `folders`.
    `weights_per` "document": the weights are shares of the documents, converted by each folder's
    mean length. `packing` "best_fit": no document is cut that fits into a row.
    """

    paths: str | tuple[str, ...]
    folders: tuple[str, ...] = ()
    weights_per: Literal["token", "document"] = "token"
    packing: Packing = "concatenate"

    def validate(self) -> None:
        paths = self._paths
        if not all(paths) or not paths:
            raise UserError(f"RecordsConfig.paths {self.paths!r} names no folder; name one or more")
        if self.folders and len(paths) > 1:
            raise UserError(
                f"RecordsConfig.folders {self.folders} are names below one path, and there are "
                f"{len(paths)}: list all folders in paths, or give one"
            )
        self.check_weights("folders", len(self.folders or paths))

    def located(self) -> list[Path]:
        """The folders of records."""
        paths = [Path(path) for path in self._paths]
        if self.folders and paths[0].is_dir() and not (paths[0] / MANIFEST).exists():
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
        """The tokenizer of the first folder."""
        return records_tokenizer(self.located()[0])

    def manifests(self) -> list[dict[str, Any]]:
        """The manifest of each folder. Raises `DataError` if their tokenizers differ."""
        folders = self.located()
        manifests = [read_manifest(folder) for folder in folders]
        for folder, manifest in zip(folders, manifests, strict=True):
            for key in ("tokenizer", "bos_id", "eos_id"):
                if manifest[key] != manifests[0][key]:
                    raise DataError(
                        f"{folder} was made by another tokenizer ({key} {manifest[key]}) than "
                        f"{folders[0]} ({manifests[0][key]}); prepare both with one"
                    )
        return manifests

    def open(self, split: Split) -> list[TokenRecords]:
        self.manifests()
        return that_have(self.located(), lambda folder: [open_records(folder, split)])

    def rows(
        self, seed: int, batch_size: int = 1, shuffle_seeds: Iterator[int] | None = None
    ) -> tuple[RowSource, dict[str, Any]]:
        """(endless rows of the training splits, manifest). Every corpus takes one of
        `shuffle_seeds`: two of one size would otherwise be read in the same order."""
        shuffle_seeds = shuffle_seeds or count(seed)
        corpora = self.open("train")
        options = {"seq_len": self.seq_len, "packing": self.packing, "seed": seed}
        parts = [corpus_rows(x, **options, shuffle_seed=next(shuffle_seeds)) for x in corpora]
        per_document = self.weights_per == "document"
        scale = [float(x.sizes.mean()) if per_document else 1.0 for x in corpora]
        rows, num_rows = self.mixed(parts, batch_size, scale)
        return rows, self.identity() | {"num_rows": num_rows}

    def identity(self) -> dict[str, Any]:
        """The part of the manifest that identifies the records."""
        return {"kind": "records", "sha256": [manifest["sha256"] for manifest in self.manifests()]}
