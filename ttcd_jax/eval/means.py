"""Means over documents with confidence intervals."""

from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

_COVERAGE = 0.95
_LEAST_DOCUMENTS = 5  # with an interval


class Means(NamedTuple):
    """Means [K] and the ends of their intervals [K]; NaN where they are unknown."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def means_over_documents(sums: np.ndarray, counts: np.ndarray) -> Means:
    """The means per token of K quantities, from their `sums` over the tokens of each document and
    the `counts` of these tokens, both [documents, K].

    A mean is the ratio of the two totals, its variance that of a ratio estimator (Cochran, Sampling
    Techniques, 1977, 6.3), and its interval Student's t with one degree of freedom less than
    documents with tokens, which holds for few documents too. It is unknown with fewer than five,
    whose losses say too little of others. For a difference of two models, give the differences of
    their sums: the interval is that of pairs.
    """
    documents = (counts > 0).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = sums.sum(axis=0) / counts.sum(axis=0)
        variance = ((sums - mean * counts) ** 2).sum(axis=0) * documents / (documents - 1)
        half = stdtrit(documents - 1, (1 + _COVERAGE) / 2) * np.sqrt(variance) / counts.sum(axis=0)
    half = np.where(documents >= _LEAST_DOCUMENTS, half, np.nan)
    return Means(mean, mean - half, mean + half)
