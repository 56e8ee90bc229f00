"""Compares two ways to compute one run: layer by layer, by their predictions, on a task.

    python -m experiments.equivalence --run_dir=DIR --reference=xla,float32
                                      --candidate=streamed:512,bfloat16 [--text=PATH] [--seq_len=N]
                                      [--levels=kernel,distribution,task] [--niah_lengths=4096]
                                      [--max_flip_share=X] [--max_kl=X]

A way names at most one of each: attention (xla, triton, lse, mosaic, reference), the form of the
memory's read (auto, blocked, associative, attention), precision (float32, bfloat16, float64), and
the path: forward (whole rows through the function that is trained), streamed[:PIECE] (a prefill in
pieces), decoded (token by token). The rest is as in the run's configuration.

kernel: outputs of each block on the reference's input to it, in units in the last place, on the
first batch of rows. distribution: KL(reference || candidate), total variation and changes of the
likeliest token on held-out text, rows of --seq_len tokens of one document each. task: RULER's
needles in a haystack, decoded greedily both ways, hidden in the same text; a forward way passes
whole rows over the text as it grows. Writes equivalence.json and equivalence.png. Exit status 1
when the mean KL or the share of flips is above the limit given.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import write_json

_DECODING = (
    "forward: passes over whole rows until every token is confirmed; streamed: a prefill in "
    "pieces, then a step per token; decoded: a step per token, prompts included"
)
_LEVELS = ["kernel", "distribution", "task"]
_LIMITS = {
    "max_kl": ("kl mean", lambda found: found["kl"]["mean"]),
    "max_flip_share": ("flip_share", lambda found: found["flip_share"]),
}

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_list("reference", ["forward"], "The way that counts as right.")
flags.DEFINE_list("candidate", None, "The way that is compared with it.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint; default: the newest.")
flags.DEFINE_string("text", None, "A text file or a folder of .txt instead of the run's corpus.")
flags.DEFINE_integer("seq_len", None, "Tokens per row; default: as in training.", lower_bound=1)
flags.DEFINE_integer(
    "max_rows", 64, "Rows to measure, drawn from all that a document fills.", lower_bound=1
)
flags.DEFINE_integer("batch_size", 1, "Rows at a time.", lower_bound=1)
flags.DEFINE_list("levels", _LEVELS, "The levels to compare.")
flags.DEFINE_list("niah_tasks", [], "task: which of the six; default: all.")
flags.DEFINE_list("niah_lengths", ["4096"], "task: tokens of prompt and answer.")
flags.DEFINE_integer("niah_samples", 8, "task: samples for each task and length.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "task: of the samples.", lower_bound=0)
flags.DEFINE_string("output", None, "Folder; default: eval/equivalence in the run directory.")
flags.DEFINE_float("max_flip_share", None, "Largest share of flips for exit status 0.")
flags.DEFINE_float("max_kl", None, "Largest mean KL in nats for exit status 0.")


def main(argv: list[str]) -> None:
    levels = _levels()
    from ttcd_kernels import measure

    from experiments.equivalence.picture import draw_equivalence
    from experiments.equivalence.ways import Computed, parse_way
    from ttcd_jax.data.sources import text_records
    from ttcd_jax.run.directory import RunDirectory, load_run, model_config

    directory = RunDirectory(FLAGS.run_dir)
    source, config = directory.read_config(), model_config(directory)
    ways = parse_way(FLAGS.reference), parse_way(FLAGS.candidate)
    resolved = [way.resolved(config) for way in ways]
    if resolved[0] == resolved[1]:
        raise UserError(f"reference and candidate are the same way, {resolved[0]}: name two")
    cells = _cells() if "task" in levels else []
    run = load_run(FLAGS.run_dir, FLAGS.step)
    records = text_records(FLAGS.run_dir, source["data"], run.tokenizer, FLAGS.text)
    rows = _whole_rows(records, FLAGS.seq_len or source["data"]["seq_len"], config.vocab_size)
    pair = Computed(ways[0], run.model), Computed(ways[1], run.model)
    for computed in pair:
        computed.check(FLAGS.batch_size, rows["tokens"].shape[1], decodes=bool(cells))
    result: dict[str, Any] = {
        "run_dir": str(directory.path),
        "step": run.step,
        "environment": measure.environment(),
        "reference": resolved[0],
        "candidate": resolved[1],
        "text": FLAGS.text,
        "seq_len": rows["tokens"].shape[1],
    }
    measures = {
        "kernel": lambda: _kernel(pair, rows["tokens"]),
        "distribution": lambda: _distribution(pair, rows),
        "task": lambda: _task(pair, cells, run.tokenizer, records),
    }
    folder = Path(FLAGS.output) if FLAGS.output else directory.path / "eval/equivalence"
    file = folder / "equivalence.json"
    write_json(file, result)  # a folder that cannot be written is reported now
    for level in levels:
        result[level] = measures[level]()
        write_json(file, result)
    draw_equivalence(folder / "equivalence.png", result)
    print(f"written to {folder}")
    sys.exit(_status(result))


def _levels() -> list[str]:
    for level in FLAGS.levels or [""]:
        if level not in _LEVELS:
            raise UserError(f"--levels: {level!r} is not one of {', '.join(_LEVELS)}")
    limits = [flag for flag in _LIMITS if getattr(FLAGS, flag) is not None]
    if limits and "distribution" not in FLAGS.levels:
        raise UserError(f"--{limits[0]} limits the level distribution: name it in --levels")
    return FLAGS.levels


def _cells() -> list[Any]:
    """The tasks at each length."""
    from experiments.equivalence.niah import TASKS, NIAHConfig

    lengths = cli.positives("niah_lengths")
    sizes = {"num_samples": FLAGS.niah_samples, "seed": FLAGS.seed}
    cells = itertools.product(FLAGS.niah_tasks or TASKS, lengths)
    return [NIAHConfig(task=task, length=length, **sizes) for task, length in cells]


def _whole_rows(records: list, seq_len: int, vocab_size: int) -> dict[str, Any]:
    """Tokens and targets of up to --max_rows rows that a document fills, drawn from all. Raises
    `DataError` when there is none."""
    import numpy as np

    from ttcd_jax.data.packing import DocumentRows
    from ttcd_jax.data.tokenizer import check_tokens

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
    positions = [(part, i) for part in parts for i in range(len(part))]
    drawn = (positions[i] for i in np.random.default_rng(0).permutation(len(positions)))
    filled = (row for part, i in drawn if (row := part[i])["loss_mask"].all())
    chosen = list(itertools.islice(filled, FLAGS.max_rows))
    rows = {name: np.stack([row[name] for row in chosen]) for name in ("tokens", "targets")}
    check_tokens(rows["targets"], vocab_size)
    return rows


def _essay(records: list, tokenizer: Any, length: int) -> str:
    """Prose of at least `length` tokens, if the documents have so many."""
    texts, count = [], 0
    for part in records:
        for document, size in enumerate(part.sizes):
            if count >= length:
                return " ".join(texts)
            texts.append(tokenizer.decode(part.read(document, 0, int(size))))
            count += int(size)
    return " ".join(texts)


def _kernel(pair: tuple[Any, Any], tokens: Any) -> dict[str, Any]:
    from experiments.equivalence.compare import compare_layers

    found = compare_layers(*pair, tokens[: FLAGS.batch_size])
    names = [("layer", found["layers"] or []), ("attention", found["attention"] or [])]
    table = [
        {"outputs of": f"{name} {row['layer']}"} | {key: row[key] for key in found["whole_model"]}
        for name, rows in names
        for row in rows
    ]
    table.append({"outputs of": "whole model"} | found["whole_model"])
    _print(f"Units in the last place ({found['tokens']:,} tokens)", table)
    return found


def _distribution(pair: tuple[Any, Any], rows: dict[str, Any]) -> dict[str, Any]:
    from experiments.equivalence.compare import QUANTILES, compare_predictions, summarize

    found = summarize(compare_predictions(*pair, rows, batch_size=FLAGS.batch_size))
    table = [
        {"distance": label} | {name: found[key][name] for name in ("mean", *QUANTILES)}
        for key, label in (("kl", "KL (nats)"), ("tv", "total variation"))
    ]
    nll = found["reference_nll"], found["candidate_nll"]
    _print(
        f"Next tokens ({found['tokens']:,} positions in {found['rows']:,} rows)",
        table,
        f"likeliest token differs: {100 * found['flip_share']:.4f} %",
        f"loss: reference {nll[0]:.6f}, candidate {nll[1]:.6f} nats",
    )
    return found


def _task(pair: tuple[Any, Any], cells: list, tokenizer: Any, records: list) -> dict[str, Any]:
    from experiments.equivalence.niah import compare_answers

    essay = _essay(records, tokenizer, max(cell.length for cell in cells))
    sizes = {"batch_size": FLAGS.batch_size}
    found = [compare_answers(*pair, cell, tokenizer, essay, **sizes) for cell in cells]
    _print("Needles in a haystack (scores in percent)", found)
    return {"note": _DECODING, "cells": found}


def _print(title: str, table: list[dict[str, Any]], *notes: str) -> None:
    from ttcd_jax.eval.report import format_table

    print(title, format_table(table), *notes, sep="\n", end="\n\n", flush=True)


def _status(result: dict[str, Any]) -> int:
    """1 when a limit is exceeded, which is printed."""
    status = 0
    for flag, (name, value_of) in _LIMITS.items():
        limit = getattr(FLAGS, flag)
        if limit is not None and not (value := value_of(result["distribution"])) <= limit:
            print(f"{name} {value:.3g} is above --{flag} {limit:g}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    cli.run(main)
