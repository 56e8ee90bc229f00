"""Rows of one corpus or several, drawn by weight: pure functions of (seed, index)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import grain

from ttcd_jax.config import AtLeast, Config, PositiveFloat
from ttcd_jax.data.corpus import Split
from ttcd_jax.data.packing import PackedRows
from ttcd_jax.data.pipeline import ENDLESS, RowSource
from ttcd_jax.data.records import TokenRecords, open_records, read_manifest
from ttcd_jax.errors import DataError, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsConfig(Config):
    """Folders of `python -m experiments.prepare_data`, in rows of `seq_len` tokens.

    `weights`: the shares of the rows, one for each of `paths`, in any unit, exact to a hundredth of
    the smallest. Without weights every row of every folder is equally likely.
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

    @property
    def vocab_size(self) -> int:
        return self.manifests()[0]["vocab_size"]

    def manifests(self) -> list[dict[str, Any]]:
        """The manifest of each folder. Raises `DataError` unless one tokenizer made all."""
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

    def rows(self, seed: int) -> tuple[RowSource, dict[str, Any]]:
        """(endless rows of the training splits, manifest)."""
        digests = [manifest["sha256"] for manifest in self.manifests()]
        records = self.open("train")
        rows, num_rows = mixed_rows(records, self.weights, seq_len=self.seq_len, seed=seed)
        return rows, {"kind": "records", "num_rows": num_rows, "sha256": digests}


def mixed_rows(
    corpora: Sequence[TokenRecords], weights: Sequence[float] = (), *, seq_len: int, seed: int
) -> tuple[RowSource, int]:
    """(an endless random-access source of rows, number of rows of all corpora).

    A corpus is passed over again and again, shuffled anew each time. `weights`, by default the
    numbers of rows, determine the order of the corpora, as even as they allow.
    """
    sources = [PackedRows(records, seq_len=seq_len, seed=seed) for records in corpora]
    # A seed for each: two corpora of one size would be passed over in one order.
    parts = [
        grain.MapDataset.source(rows).seed((seed + i) % 2**32).shuffle().repeat(None)
        for i, rows in enumerate(sources)
    ]
    sizes = [len(rows) for rows in sources]
    return grain.MapDataset.mix(parts, weights or sizes)[:ENDLESS], sum(sizes)
