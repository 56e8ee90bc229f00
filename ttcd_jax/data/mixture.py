"""Rows of several folders of token records, drawn by weight: pure functions of (seed, index)."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import grain

from ttcd_jax.config import AtLeast, Config, PositiveFloat
from ttcd_jax.data.corpus import Split
from ttcd_jax.data.packing import PackedRows, Row
from ttcd_jax.data.records import TokenRecords, open_records, read_manifest
from ttcd_jax.errors import DataError, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsConfig(Config):
    """Folders that `python -m experiments.prepare_data` made, in rows of `seq_len` tokens.

    `weights` are the shares of the rows, one for each of `paths`, in any unit; they are kept to a
    hundredth of the smallest. Without weights every row of every folder is equally likely.
    """

    paths: tuple[str, ...]
    weights: tuple[PositiveFloat, ...] = ()
    seq_len: Annotated[int, AtLeast(2)]

    def validate(self) -> None:
        if not self.paths:
            raise UserError("RecordsConfig.paths () names no folder; name one or more")
        if self.weights and len(self.weights) != len(self.paths):
            raise UserError(
                f"RecordsConfig.weights {self.weights} are {len(self.weights)} numbers for "
                f"{len(self.paths)} paths; give one each, or none"
            )

    def manifests(self) -> list[dict[str, Any]]:
        """Of each folder. Raises `DataError` when they were not made by one tokenizer."""
        manifests = [read_manifest(Path(path)) for path in self.paths]
        for path, manifest in zip(self.paths, manifests, strict=True):
            if manifest["tokenizer"] != manifests[0]["tokenizer"]:
                raise DataError(
                    f"{path} was made by another tokenizer ({manifest['tokenizer']}) than "
                    f"{self.paths[0]} ({manifests[0]['tokenizer']}); prepare both with one"
                )
        return manifests

    def open(self, split: Split) -> list[TokenRecords]:
        """The records of the folders that have the split. Raises `DataError` when none has."""
        having = [
            path
            for path, manifest in zip(self.paths, self.manifests(), strict=True)
            if split in manifest["splits"]
        ]
        return [open_records(Path(path), split) for path in having or self.paths]


class MixedRows:
    """A random-access source of `num_rows` rows of the training splits: index -> `PackedRows` row.

    A folder's rows are passed over again and again, shuffled anew each time; which folder comes
    next is fixed by the weights, as evenly as they allow. `num_distinct` counts all folders' rows.
    """

    def __init__(self, config: RecordsConfig, *, seed: int, num_rows: int) -> None:
        sources = [
            PackedRows(records, seq_len=config.seq_len, seed=seed)
            for records in config.open("train")
        ]
        self._num_rows = num_rows
        self.num_distinct = sum(map(len, sources))
        # Seeds of their own: two folders of one size would be passed over in one order.
        parts = [
            grain.MapDataset.source(rows).seed((seed + i) % 2**32).shuffle().repeat(None)
            for i, rows in enumerate(sources)
        ]
        weights = config.weights or tuple(map(len, sources))
        # grain types rows as optional, for datasets with filters; there are none here.
        self._rows: Any = grain.MapDataset.mix(parts, weights)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        return self._rows[int(index)]
