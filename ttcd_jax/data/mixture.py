"""Rows of one corpus or several, drawn by weight: pure functions of (seed, index)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import grain

from ttcd_jax.config import AtLeast, Config, PositiveFloat
from ttcd_jax.data.corpus import Split
from ttcd_jax.data.packing import DocumentRows, PackedRows
from ttcd_jax.data.pipeline import ENDLESS, RowSource
from ttcd_jax.data.records import MANIFEST, TokenRecords, open_records, read_manifest
from ttcd_jax.errors import DataError, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordsConfig(Config):
    """Folders of token records (`python -m experiments.prepare_data`), in rows of `seq_len` tokens.

    `paths`: a folder of records, several of them, or the parent of those named in `folders`.
    `weights`: relative shares of the rows, one per folder, exact to a hundredth of the smallest;
    with `weights_per` "document", of the documents, converted by each folder's mean length. Without
    weights every row of every folder is equally likely; with a single folder they have no effect.
    """

    paths: str | tuple[str, ...]
    folders: tuple[str, ...] = ()
    weights: tuple[PositiveFloat, ...] = ()
    weights_per: Literal["token", "document"] = "token"
    seq_len: Annotated[int, AtLeast(2)]

    def validate(self) -> None:
        paths = self._paths
        if not all(paths) or not paths:
            raise UserError(f"RecordsConfig.paths {self.paths!r} names no folder; name one or more")
        if self.folders and len(paths) > 1:
            raise UserError(
                f"RecordsConfig.folders {self.folders} are names below one path, and there are "
                f"{len(paths)}: list all folders in paths, or give one"
            )
        names = self.folders or paths
        if self.weights and len(self.weights) != len(names):
            raise UserError(
                f"RecordsConfig.weights {self.weights} are {len(self.weights)} numbers for "
                f"{len(names)} folders; give one each, or none"
            )

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

    def manifests(self) -> list[dict[str, Any]]:
        """The manifest of each folder. Raises `DataError` if their tokenizers differ."""
        folders = self.located()
        manifests = [read_manifest(folder) for folder in folders]
        for folder, manifest in zip(folders, manifests, strict=True):
            if manifest["tokenizer"] != manifests[0]["tokenizer"]:
                raise DataError(
                    f"{folder} was made by another tokenizer ({manifest['tokenizer']}) than "
                    f"{folders[0]} ({manifests[0]['tokenizer']}); prepare both with one"
                )
        return manifests

    def open(self, split: Split) -> list[TokenRecords]:
        """The records of the folders that have the split. Raises `DataError` when none has."""
        folders = self.located()
        with_split = [
            folder
            for folder, manifest in zip(folders, self.manifests(), strict=True)
            if split in manifest["splits"]
        ]
        return [open_records(folder, split) for folder in with_split or folders]

    def rows(self, seed: int) -> tuple[RowSource, dict[str, Any]]:
        """(endless rows of the training splits, manifest)."""
        records = self.open("train")
        weights: Sequence[float] = self.weights if len(records) > 1 else ()
        if weights and len(weights) != len(records):
            raise DataError(
                f"RecordsConfig.weights {self.weights} are for {len(weights)} folders, and "
                f"{len(records)} have a train split: prepare the others with one"
            )
        if weights and self.weights_per == "document":
            weights = [w * x.sizes.mean() for w, x in zip(weights, records, strict=True)]
        rows, num_rows = mixed_rows(records, weights, seq_len=self.seq_len, seed=seed)
        digests = [manifest["sha256"] for manifest in self.manifests()]
        return rows, {"kind": "records", "num_rows": num_rows, "sha256": digests}


def mixed_rows(
    corpora: Sequence[TokenRecords], weights: Sequence[float] = (), *, seq_len: int, seed: int
) -> tuple[RowSource, int]:
    """(an endless random-access source of rows, number of rows of all corpora).

    Every corpus is repeated, reshuffled at each pass. Corpora are interleaved as evenly as possible
    in the proportions `weights`, by default their numbers of rows.
    """
    sources = [
        DocumentRows(records, seq_len=seq_len, is_whole=True)
        if records.samples_are_rows
        else PackedRows(records, seq_len=seq_len, seed=seed)
        for records in corpora
    ]
    # A seed for each: two corpora of one size would otherwise be read in the same order.
    parts = [
        grain.MapDataset.source(rows).seed((seed + i) % 2**32).shuffle().repeat(None)
        for i, rows in enumerate(sources)
    ]
    sizes = [len(rows) for rows in sources]
    return grain.MapDataset.mix(parts, weights or sizes)[:ENDLESS], sum(sizes)
