"""Perplexity by the length of the context: how much a token's past helps to predict it."""

import itertools
import math
from typing import Any

import numpy as np

from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.eval.scorer import Scores

_FIRST_EDGE = 32


def bucket_edges(length: int) -> list[int]:
    """0, 32, 64, 128, ... up to `length`, which closes the last bucket."""
    edges = [0]
    edge = _FIRST_EDGE
    while edge < length:
        edges.append(edge)
        edge *= 2
    return [*edges, length]


def by_position(
    scores: Scores, rows: dict[str, np.ndarray], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """One record per position bucket and one, `all`, over everything.

    `bits_per_byte` divides by the bytes of the targets, so tokenizers compare; it is None where no
    target has bytes.
    """
    length = rows["tokens"].shape[1]
    edges = bucket_edges(length)
    num_bytes = tokenizer.num_bytes(rows["targets"])
    records = []
    for start, stop in [*itertools.pairwise(edges), (0, length)]:
        part = np.s_[:, start:stop]
        mask = rows["loss_mask"][part]
        if not mask.any():
            continue
        nats = float(scores.losses[part][mask].astype(np.float64).sum())
        tokens, size = int(mask.sum()), int(num_bytes[part][mask].sum())
        records.append(
            {
                "context": "all" if stop - start == length else f"{start}-{stop - 1}",
                "start": start,
                "stop": stop,
                "tokens": tokens,
                "perplexity": math.exp(min(nats / tokens, 700)),
                "bits_per_byte": nats / math.log(2) / size if size else None,
            }
        )
    return records
