"""Training data: a configuration, its rows, and the manifest that pins them."""

import dataclasses
import os
from typing import Annotated, Any

import grain

from ttcd_jax.config import AtLeast, Config
from ttcd_jax.data.corpus import CorpusConfig, load_documents, manifest
from ttcd_jax.data.mixture import ENDLESS, RecordsConfig, mixed_rows
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.synthetic.recall import RecallConfig, RecallRows
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """Documents of a corpus, tokenized and packed into rows of `seq_len` tokens."""

    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    seq_len: Annotated[int, AtLeast(2)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchesConfig(Config):
    """Batches from the caller of `ttcd_jax.train_run`, rows of `seq_len` tokens."""

    seq_len: Annotated[int, AtLeast(2)]


DataConfig = TextConfig | RecordsConfig | RecallConfig | BatchesConfig


def vocab_size(config: DataConfig) -> int:
    """The bound of this data's token ids; 0 for batches, which are checked as they come."""
    if isinstance(config, BatchesConfig):
        return 0
    if isinstance(config, RecallConfig):
        return config.vocab_size
    if isinstance(config, RecordsConfig):
        return config.manifests()[0]["vocab_size"]
    return build_tokenizer(config.tokenizer).vocab_size


def build_source(
    config: TextConfig | RecordsConfig | RecallConfig, *, seed: int
) -> tuple[grain.sources.RandomAccessDataSource, dict[str, Any]]:
    """(endless rows of the training split, manifest). Equal manifests mean equal data."""
    if isinstance(config, RecallConfig):
        rows = RecallRows(config, seed=seed, num_rows=ENDLESS)
        return rows, {"kind": "recall", "seed": seed}
    if isinstance(config, RecordsConfig):
        corpora, weights = config.open("train"), config.weights
        pinned = {"kind": "records", "sha256": [made["sha256"] for made in config.manifests()]}
    else:
        documents = load_documents(config.corpus, "train")
        corpora, weights = [encode_documents(documents, build_tokenizer(config.tokenizer))], ()
        pinned = manifest(config.corpus, documents)
    rows, num_rows = mixed_rows(corpora, weights, seq_len=config.seq_len, seed=seed)
    return rows, pinned | {"num_rows": num_rows}


def held_out(config: TextConfig | RecordsConfig) -> list[TokenRecords]:
    """The validation split: one entry, or one for each folder of records that has one."""
    if isinstance(config, TextConfig):
        documents = load_documents(config.corpus, "validation")
        return [encode_documents(documents, build_tokenizer(config.tokenizer))]
    return config.open("validation")


def text_records(
    run_dir: str | os.PathLike[str],
    data: dict[str, Any],
    tokenizer: Tokenizer | None,
    text: str | None,
) -> list[TokenRecords]:
    """The text to measure a run with the configuration `data` on: that of `text` (a file or a
    folder), else its validation split. Raises `UserError` for a run without text or tokenizer."""
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
            return held_out(config.from_dict(data))
    raise UserError(f"{run_dir} was imported and has no corpus: pass --text=PATH")
