"""Needles in a haystack: the score of answers, and two ways to compute a run, cell by cell.

A cell is a task at a length. Answers are greedy; the score is the share, in percent, of the values
asked for that an answer contains, whatever the case (RULER's `string_match_all`).
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.equivalence.ways import Computed
from ttcd_jax.data.synthetic.niah import (
    NUM_ANSWER_TOKENS,
    NIAHConfig,
    Sample,
    make_samples,
)
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.eval.scorer import batches

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Percent, mean over samples of the share of `answers` that the prediction contains."""
    shares = [
        np.mean([value.lower() in _CONTROL.sub("\n", text.strip()).lower() for value in values])
        for text, values in zip(predictions, answers, strict=True)
    ]
    return 100 * float(np.mean(shares))


def compare_answers(
    reference: Computed,
    candidate: Computed,
    cells: Sequence[NIAHConfig],
    tokenizer: Tokenizer,
    essay: str,
    *,
    batch_size: int,
) -> list[dict[str, Any]]:
    """One record per cell: both scores, and the share of samples that both ways answer alike, token
    by token up to the end of the document."""
    return [
        _compare_cell(reference, candidate, cell, tokenizer, essay, batch_size) for cell in cells
    ]


def _compare_cell(reference, candidate, cell, tokenizer, essay, batch_size) -> dict[str, Any]:
    samples = make_samples(cell, tokenizer, essay)
    # What has a state writes first, for the forward passes of the other to confirm.
    order = sorted((reference, candidate), key=lambda way: way.way.path == "forward")
    draft = np.zeros((len(samples), NUM_ANSWER_TOKENS), np.int32)
    found = {}
    for way in order:
        draft = found[way] = _answers(way, samples, cell.length, batch_size, draft)
    cut = {way: [_until(ids, tokenizer.eos_id) for ids in found[way]] for way in order}
    texts = {way: [tokenizer.decode(ids) for ids in cut[way]] for way in order}
    answers = [sample.answers for sample in samples]
    same = [a.tolist() == b.tolist() for a, b in zip(cut[reference], cut[candidate], strict=True)]
    return {
        "task": cell.task,
        "length": cell.length,
        "samples": len(samples),
        "reference_score": score(texts[reference], answers),
        "candidate_score": score(texts[candidate], answers),
        "identical_share": float(np.mean(same)),
    }


def _answers(
    way: Computed, samples: list[Sample], length: int, batch_size: int, draft: np.ndarray
) -> np.ndarray:
    """[samples, 128] tokens."""
    parts = []
    for index, count in batches(len(samples), batch_size):
        prompts = [samples[i].tokens for i in index]
        parts.append(way.greedy(prompts, NUM_ANSWER_TOKENS, length, draft[index])[:count])
    return np.concatenate(parts)


def _until(ids: np.ndarray, eos_id: int) -> np.ndarray:
    ends = np.flatnonzero(ids == eos_id)
    return ids[: ends[0]] if ends.size else ids
