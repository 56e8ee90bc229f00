"""What a run trains on: a configuration, its rows, and the manifest that pins them."""

import dataclasses
from typing import Any

import grain

from ttcd_jax.config import Config
from ttcd_jax.data.corpus import CorpusConfig, load_documents, manifest
from ttcd_jax.data.packing import PackedRows
from ttcd_jax.data.synthetic.recall import RecallConfig, RecallRows
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer
from ttcd_jax.errors import UserError

_SYNTHETIC_ROWS = 2**31 - 1  # never repeats in practice


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """Documents of a corpus, tokenized and packed into rows of `seq_len` tokens."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    seq_len: int

    def validate(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"TextConfig.seq_len {self.seq_len} must be at least 2")


DataConfig = TextConfig | RecallConfig


def vocab_size(config: DataConfig) -> int:
    """Token ids of this data are below it."""
    if isinstance(config, RecallConfig):
        return config.vocab_size
    return build_tokenizer(config.tokenizer).vocab_size


def build_source(
    config: DataConfig, *, seed: int
) -> tuple[grain.sources.RandomAccessDataSource, dict[str, Any]]:
    """(rows of the training split, manifest). Equal manifests mean equal data."""
    if isinstance(config, RecallConfig):
        rows = RecallRows(config, seed=seed, num_rows=_SYNTHETIC_ROWS)
        return rows, {"kind": "recall", "seed": seed}
    documents = load_documents(config.corpus, "train")
    tokenizer = build_tokenizer(config.tokenizer)
    rows = PackedRows(documents, tokenizer, seq_len=config.seq_len, seed=seed)
    return rows, manifest(config.corpus, documents) | {"num_rows": len(rows)}
