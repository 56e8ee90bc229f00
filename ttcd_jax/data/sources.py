"""Configurations of training data: they make its rows, with a manifest that identifies them, and
open splits of text as token records. Equal manifests mean equal data."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ttcd_jax.config import AtLeast, Bound, Config, differences
from ttcd_jax.data.corpus import CorpusConfig, Split, load_documents, manifest
from ttcd_jax.data.mixture import Packing, RecordsConfig, WeightedConfig, corpus_rows, that_have
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.pipeline import RowSource
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json, sha256

MANIFEST = "data.json"  # of a run's data, in its directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """Documents of a `corpus`, encoded by `tokenizer` and packed into rows of `seq_len` tokens;
    with `packing` "best_fit", none is cut that fits into a row."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    packing: Packing = "concatenate"
    seq_len: Annotated[int, AtLeast(2)]

    rows_are_documents: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return build_tokenizer(self.tokenizer).vocab_size

    def identity(self) -> dict[str, Any]:
        """The part of the manifest that identifies the training text."""
        return manifest(self.corpus, load_documents(self.corpus, "train"))

    def open(self, split: Split) -> list[TokenRecords]:
        """The documents of a split as records in memory."""
        tokenizer = build_tokenizer(self.tokenizer)
        return [encode_documents(load_documents(self.corpus, split), tokenizer)]

    def rows(
        self, seed: int, batch_size: int = 1, shuffle_seeds: Iterator[int] | None = None
    ) -> tuple[RowSource, dict[str, Any]]:
        """(endless rows of the training split, manifest)."""
        documents = load_documents(self.corpus, "train")
        records = encode_documents(documents, build_tokenizer(self.tokenizer))
        options = {"seq_len": self.seq_len, "packing": self.packing, "seed": seed}
        shuffle_seed = next(shuffle_seeds or iter([seed]))
        rows, num_rows = corpus_rows(records, **options, shuffle_seed=shuffle_seed)
        metadata = manifest(self.corpus, documents) | {"num_rows": num_rows}
        if self.tokenizer.path is not None:
            metadata["tokenizer"] = sha256(Path(self.tokenizer.path))
        return rows, metadata


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(WeightedConfig):
    """Corpora of text and folders of records as `parts`, of one tokenizer and one `seq_len`."""

    parts: Annotated[tuple[TextConfig | RecordsConfig, ...], Bound("one or more", bool)]

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
        paths = [part.tokenizer.path for part in self.parts]
        contents = [path and read_json(Path(path)) for path in paths]
        for path, content in zip(paths, contents, strict=True):
            if content != contents[0]:
                raise DataError(
                    f"the tokenizers of MixtureConfig.parts differ ({paths[0] or 'byte'} and "
                    f"{path or 'byte'}): prepare the records by the one of the text"
                )
        return self.parts

    @property
    def tokenizer(self) -> TokenizerConfig:
        return self._alike[0].tokenizer

    @property
    def vocab_size(self) -> int:
        return self._alike[0].vocab_size

    def identity(self) -> dict[str, Any]:
        """The part of the manifest that identifies the training text."""
        return {"kind": "mixture", "parts": [part.identity() for part in self._alike]}

    def open(self, split: Split) -> list[TokenRecords]:
        return that_have(self._alike, lambda part: part.open(split))

    def rows(self, seed: int, batch_size: int = 1) -> tuple[RowSource, dict[str, Any]]:
        """(endless rows of the training splits, manifest)."""
        seeds = itertools.count(seed)
        parts = [part.rows(seed, shuffle_seeds=seeds) for part in self._alike]
        rows, num_rows = self.mixed([(x, found["num_rows"]) for x, found in parts], batch_size)
        manifests = [found for _, found in parts]
        return rows, {"kind": "mixture", "num_rows": num_rows, "parts": manifests}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchesConfig(Config):
    """Batches from the caller of `ttcd_jax.train_run`, rows of `seq_len` tokens."""

    seq_len: Annotated[int, AtLeast(2)]

    vocab_size: ClassVar[int] = 0  # tokens are checked batch by batch
    rows_are_documents: ClassVar[bool] = True


DataConfig = TextConfig | RecordsConfig | MixtureConfig | RecallConfig | BatchesConfig


def text_data(data: dict[str, Any]) -> TextConfig | RecordsConfig | MixtureConfig | None:
    """The data configuration of a run as an object, if it is text."""
    classes = {config.__name__: config for config in (TextConfig, RecordsConfig, MixtureConfig)}
    config = classes.get(str(data["type"]))  # a damaged one may be anything
    return config and config.from_dict(data)


def row_length(data: dict[str, Any]) -> int:
    """Tokens in a row of a run with this data configuration."""
    return data["seq_len"] if "seq_len" in data else RecallConfig.from_dict(data).seq_len


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
    if data["type"] == RecallConfig.__name__:
        raise UserError(
            f"{run_dir} was trained on recall data, not on text: measure it by "
            "experiments.evaluate --task=recall"
        )
    if tokenizer is None:
        raise UserError(
            f"{run_dir} was imported without a tokenizer: import it again with "
            "--tokenizer=FILE.json or --tokenizer=byte"
        )
    if text is not None:
        corpus = CorpusConfig(kind="text", path=text, validation_percent=0)
        return [encode_documents(load_documents(corpus, "train"), tokenizer)]
    if (config := text_data(data)) is None:
        raise UserError(f"{run_dir} was imported and has no corpus: pass --{option}=PATH")
    try:
        check_unchanged(run_dir, config.identity)
        return config.open("validation")
    except DataError as error:
        error.add_note(f"--{option}=PATH gives another text")
        raise


def check_unchanged(
    run_dir: str | os.PathLike[str], identity: Callable[[], dict[str, Any]]
) -> None:
    """Raises `DataError` unless the data are those of the run's manifest, if it has one.
    `identity`: of the data as they are now, the fields of a manifest that are to agree."""
    path = Path(run_dir) / MANIFEST
    if not path.is_file():
        return
    current = identity()
    # Earlier versions stored no digest of the tokenizer.
    stored = {"tokenizer": current.get("tokenizer")} | read_json(path)
    if changed := differences(_shared(stored, current), current):
        raise DataError(
            f"the training data changed since {run_dir} was started ({changed[0]}): restore it, or "
            "choose another --run_dir"
        )


def _shared(stored: Any, current: Any) -> Any:
    """The fields of `stored` that `current` has too, in lists of parts as well."""
    if isinstance(stored, dict) and isinstance(current, dict):
        return {name: _shared(stored.get(name), value) for name, value in current.items()}
    if isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        return [_shared(*pair) for pair in zip(stored, current, strict=True)]
    return stored
