"""The levels at which two ways are compared, each with its facts, a table and bars; the rows to
measure."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ttcd_kernels.table import format_table

from experiments.studies.equivalence.compare import (
    QUANTILES,
    compare_answers,
    compare_layers,
    compare_predictions,
    summarize,
)
from experiments.studies.equivalence.ways import Computed
from ttcd_jax.data.packing import DocumentRows
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.measure.pictures import plot_bars
from ttcd_jax.tasks.ruler import make_samples
from ttcd_jax.tasks.ruler.documents import Sources, prose_of
from ttcd_jax.tokens import check_tokens

Pair = tuple[Computed, Computed]  # reference, candidate
Facts = dict[str, Any]


class Level(NamedTuple):
    """The result of one level."""

    title: str
    facts: Facts  # for JSON
    table: list[Facts]
    bars: list[Facts]  # a group of bars each
    series: tuple[str, ...]  # the values of a group
    axes: tuple[str, str]  # the key of a group's name, the name of the values
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        return "\n".join((self.title, format_table(self.table), *self.notes))

    def draw(self, path: Path) -> None:
        x, y = self.axes
        groups = [bar[x] for bar in self.bars]
        series = {name: [bar[name] for bar in self.bars] for name in self.series}
        plot_bars(path, title=self.title, x_label=x, y_label=y, groups=groups, series=series)


def whole_rows(
    records: Sequence[TokenRecords], seq_len: int, max_rows: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """Tokens and targets [rows, T] of up to `max_rows` random rows that one document fills. Raises
    `DataError` when there is none."""
    longest = max(part.sizes.max(initial=0) for part in records)
    if longest <= seq_len:
        raise DataError(
            f"no document fills a row: the longest has {longest} tokens and a row with its last "
            f"target takes {seq_len + 1}; pass a smaller --seq_len, or --text"
        )
    parts = [
        DocumentRows(part, seq_len=seq_len, min_tokens=seq_len + 1)
        for part in records
        if part.sizes.max(initial=0) > seq_len
    ]
    indices = [(part, i) for part in parts for i in range(len(part))]
    drawn = (indices[i] for i in np.random.default_rng(0).permutation(len(indices)))
    filled = (row for part, i in drawn if (row := part[i])["loss_mask"].all())
    chosen = list(itertools.islice(filled, max_rows))
    rows = {name: np.stack([row[name] for row in chosen]) for name in ("tokens", "targets")}
    check_tokens(rows["targets"], vocab_size)
    return rows


def kernel(pair: Pair, tokens: np.ndarray) -> Level:
    rows = compare_layers(*pair, tokens)
    shares = ("equal_share", "within_1_ulp", "within_2_ulp")
    title = f"Units in the last place ({tokens.size:,} tokens)"
    facts = {"tokens": tokens.size, "outputs": rows}
    return Level(title, facts, rows, rows, shares, ("outputs of", "share of elements"))


def distribution(pair: Pair, rows: dict[str, np.ndarray], batch_size: int) -> Level:
    facts = summarize(compare_predictions(*pair, rows, batch_size=batch_size))
    table = [
        {"distance": label} | {name: facts[key][name] for name in ("mean", *QUANTILES)}
        for key, label in (("kl", "KL (nats)"), ("tv", "total variation"))
    ]
    axes = "position (tokens)", "mean"
    bars = [{axes[0]: f"{x['start']}-{x['stop'] - 1}"} | x for x in facts["by_position"]]
    notes = (
        f"likeliest token differs: {100 * facts['flip_share']:.4f} %",
        f"loss: reference {facts['reference_nll']:.6f}, "
        f"candidate {facts['candidate_nll']:.6f} nats",
    )
    title = f"Next tokens ({facts['tokens']:,} positions in {facts['rows']:,} rows)"
    return Level(title, facts, table, bars, ("tv", "flip_share"), axes, notes)


def task(
    pair: Pair,
    cells: Sequence[tuple[str, int]],
    tokenizer: Tokenizer | None,
    records: Sequence[TokenRecords],
    batch_size: int,
    num_samples: int,
    seed: int,
) -> Level:
    """The answers to the samples of every cell (task of RULER, length in tokens, bos included),
    whose needles are hidden in the text of the documents."""
    assert tokenizer is not None, "text_records refuses a run without one"
    longest = max(length for _, length in cells)
    sources = Sources(lambda: prose_of(records, tokenizer, longest))
    answers = []
    for name, length in cells:
        samples = make_samples(
            name,
            length=length,
            num_samples=num_samples,
            count=lambda text: 1 + len(tokenizer.encode(text)),
            sources=sources,
            seed=seed,
        )
        sizes = {"length": length, "batch_size": batch_size}
        facts = compare_answers(*pair, name, samples, tokenizer, **sizes)
        answers.append({"task": name, "length": length} | facts)
    axes, scores = ("task, length (tokens)", "score (%)"), ("reference_score", "candidate_score")
    bars = [{axes[0]: f"{x['task']}, {x['length']:,}"} | x for x in answers]
    title = "Needles in a haystack (scores in percent)"
    return Level(title, {"cells": answers}, answers, bars, scores, axes)
