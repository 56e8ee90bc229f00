"""Means over documents with confidence intervals, by the bootstrap (Efron and Tibshirani, 1993)."""

from typing import NamedTuple

import numpy as np

NUM_RESAMPLES, COVERAGE = 1_000, 0.95
_SEED = 0
_MOST_WEIGHTS = 2**23  # in memory at once


class Means(NamedTuple):
    """Means [K] and the ends of their intervals [K]; NaN where they are unknown."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bootstrap(sums: np.ndarray, counts: np.ndarray) -> Means:
    """The means per token of K quantities, from their `sums` over the tokens of each document and
    the `counts` of these tokens, both [documents, K].

    Documents are drawn with replacement `NUM_RESAMPLES` times; an interval holds the middle
    `COVERAGE` of the means. It is unknown with fewer than two documents. Equal arrays have equal
    intervals. For a difference of two models, give the differences of their sums: the interval is
    that of pairs.
    """
    num_documents = len(sums)
    rng = np.random.default_rng(_SEED)
    block = max(1, _MOST_WEIGHTS // num_documents)
    shares = np.full(num_documents, 1 / num_documents)
    means = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for start in range(0, NUM_RESAMPLES, block):
            weights = rng.multinomial(num_documents, shares, min(block, NUM_RESAMPLES - start))
            means.append((weights @ sums) / (weights @ counts))
        tail = 50 * (1 - COVERAGE)
        is_known = (counts > 0).sum(axis=0) > 1
        ends = np.full((2, sums.shape[1]), np.nan)
        drawn = np.concatenate(means)[:, is_known]
        ends[:, is_known] = np.nanpercentile(drawn, [tail, 100 - tail], axis=0)
        return Means(sums.sum(axis=0) / counts.sum(axis=0), *ends)
