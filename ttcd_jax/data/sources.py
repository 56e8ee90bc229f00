"""Configurations of training data: they make its rows, with a manifest that identifies them, and
open splits of text as token records. Equal manifests mean equal data."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ttcd_jax.config import AtLeast, Config
from ttcd_jax.data.corpus import CorpusConfig, Split, load_documents, manifest
from ttcd_jax.data.mixture import RecordsConfig, mixed_rows
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.pipeline import RowSource
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.files import sha256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """Documents of a corpus, tokenized and packed into rows of `seq_len` tokens."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    seq_len: Annotated[int, AtLeast(2)]

    @property
    def vocab_size(self) -> int:
        return build_tokenizer(self.tokenizer).vocab_size

    def open(self, split: Split) -> list[TokenRecords]:
        """The documents of a split as records in memory."""
        tokenizer = build_tokenizer(self.tokenizer)
        return [encode_documents(load_documents(self.corpus, split), tokenizer)]

    def rows(self, seed: int) -> tuple[RowSource, dict[str, Any]]:
        """(endless rows of the training split, manifest)."""
        documents = load_documents(self.corpus, "train")
        records = encode_documents(documents, build_tokenizer(self.tokenizer))
        rows, num_rows = mixed_rows([records], seq_len=self.seq_len, seed=seed)
        facts = manifest(self.corpus, documents) | {"num_rows": num_rows}
        if self.tokenizer.path is not None:
            facts["tokenizer"] = sha256(Path(self.tokenizer.path))
        return rows, facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchesConfig(Config):
    """Batches from the caller of `ttcd_jax.train_run`, rows of `seq_len` tokens."""

    seq_len: Annotated[int, AtLeast(2)]

    vocab_size: ClassVar[int] = 0  # tokens are checked batch by batch


DataConfig = TextConfig | RecordsConfig | RecallConfig | BatchesConfig


def text_records(
    run_dir: str | os.PathLike[str],
    data: dict[str, Any],
    tokenizer: Tokenizer | None,
    text: str | None,
) -> list[TokenRecords]:
    """The text to evaluate a run on: that of `text` (a file or a folder), else the validation split
    of `data`, its data configuration. Raises `UserError` for a run without text or tokenizer."""
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
    for config in (TextConfig, RecordsConfig):
        if data["type"] == config.__name__:
            return config.from_dict(data).open("validation")
    raise UserError(f"{run_dir} was imported and has no corpus: pass --text=PATH")
