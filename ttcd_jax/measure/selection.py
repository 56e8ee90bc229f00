"""Documents that several runs are evaluated on: their choice, and its manifest on disk."""

import dataclasses
import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json, read_arrays

_QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_BLANK_TOKENS = 1024  # decoded at once


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """Token ids [T] of each document, facts of the choice, and the digest of the tokenizer ("":
    unknown)."""

    documents: Sequence[np.ndarray]
    stats: dict[str, Any]
    tokenizer: str = ""

    def __len__(self) -> int:
        return len(self.documents)

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "flat_tokens": np.concatenate(self.documents).astype(np.int32),
            "lengths": np.array([ids.size for ids in self.documents], np.int32),
            "document_stats_json": np.array(json.dumps(self.stats)),
        }

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of documents and facts."""
        parts = (array.tobytes() for array in self._arrays.values())
        return hashlib.sha256(b"".join(hashlib.sha256(x).digest() for x in parts)).hexdigest()

    def manifest(self) -> bytes:
        """An npz file with the published arrays, `flat_tokens` int32, `lengths` int32 and
        `document_stats_json`, and the digest of the tokenizer."""
        file, made_by = io.BytesIO(), np.array(self.tokenizer)
        np.savez_compressed(file, allow_pickle=False, tokenizer=made_by, **self._arrays)
        return file.getvalue()


def plain_documents(records: Iterable[TokenRecords], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids [T] of the documents in order, without the bos and eos that were added to them; blank
    ones are left out."""
    for part in records:
        for number, size in enumerate(part.sizes.tolist()):
            ids = part.read(number, 0, size)
            if not part.samples_are_rows:
                start, stop = ids[0] == tokenizer.bos_id, ids[-1] == tokenizer.eos_id
                ids = ids[int(start) : size - int(stop)]
            pieces = (ids[i : i + _BLANK_TOKENS] for i in range(0, ids.size, _BLANK_TOKENS))
            if any(tokenizer.decode(piece).strip() for piece in pieces):
                yield ids


def select(
    documents: Iterable[np.ndarray],
    cut: Callable[[np.ndarray], np.ndarray],
    *,
    min_tokens: int,
    max_documents: float = math.inf,
    max_tokens: float = math.inf,
) -> Selection:
    """The first documents of `min_tokens` or more, each reduced by `cut`, until one of both limits
    is reached, with the published facts about lengths. Raises `DataError` if there is none."""
    lengths: list[int] = []
    chosen: list[np.ndarray] = []
    num_tokens = 0
    for ids in documents:
        lengths.append(ids.size)
        if ids.size >= min_tokens:
            chosen.append(cut(ids).astype(np.int32))
            num_tokens += chosen[-1].size
            if num_tokens >= max_tokens or len(chosen) >= max_documents:
                break
    if not chosen:
        raise DataError(
            f"none of {len(lengths)} documents has {min_tokens} tokens (longest: "
            f"{max(lengths, default=0)}): take shorter rows or contexts, or name longer documents "
            "by --text=PATH"
        )
    eligible = [length for length in lengths if length >= min_tokens]
    stats = {
        "sampled_docs": len(lengths),
        "sampled_doc_length_quantiles": _quantiles(lengths),
        "eligible_docs": len(eligible),
        "eligible_total_tokens": sum(eligible),
        "selected_total_tokens": num_tokens,
        "min_doc_tokens": min_tokens,
        "selected_doc_length_quantiles": _quantiles([ids.size for ids in chosen]),
    }
    for least in _LENGTHS:
        stats[f"sampled_docs_ge_{least}"] = sum(length >= least for length in lengths)
        stats[f"eligible_docs_ge_{least}"] = sum(length >= least for length in eligible)
        stats[f"eligible_tokens_ge_{least}"] = sum(n for n in eligible if n >= least)
    return Selection(chosen, stats)


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    ordered = sorted(lengths)
    values = {name: ordered[int((len(ordered) - 1) * q)] for name, q in _QUANTILES.items()}
    return values | {"max": ordered[-1]}


def read_manifest(path: Path, tokenizer: str) -> Selection:
    """The selection of a manifest, of `Selection.manifest` or of the authors' code, whose ids may
    be outside the vocabulary. Raises `DataError` for a file that is none, and for one of another
    tokenizer."""
    try:
        arrays = read_arrays(path)
        tokens, lengths = arrays["flat_tokens"], arrays["lengths"]
        stats = parse_json(str(arrays["document_stats_json"]).encode(), path)
        made_by = str(arrays.get("tokenizer", ""))
        arrays_are_lists = all(x.ndim == 1 and x.dtype.kind in "iu" for x in (tokens, lengths))
        if not (arrays_are_lists and lengths.size and lengths.min() > 1):
            raise ValueError("its arrays are of another kind")
        if lengths.max() > tokens.size or lengths.sum(dtype=np.int64) != tokens.size:
            raise ValueError(f"it has {tokens.size} tokens, and other lengths: {lengths[:3]}...")
    except (LookupError, ValueError) as error:
        raise DataError(
            f"{path} is no manifest of documents ({error}): name the documents.npz of an evaluation"
        ) from error
    if made_by and tokenizer and made_by != tokenizer:
        raise DataError(
            f"{path} was made by another tokenizer ({made_by[:12]}) than the run's "
            f"({tokenizer[:12]}): evaluate runs of one tokenizer together"
        )
    return Selection(np.split(tokens, np.cumsum(lengths[:-1])), stats, made_by or tokenizer)
