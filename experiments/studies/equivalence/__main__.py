"""Compares two ways to compute one run: layer by layer, by their predictions, on a task.

    python -m experiments.equivalence --run_dir=DIR --reference=xla,float32
                                      --candidate=streamed:512,bfloat16 [--text=PATH] [--seq_len=N]
                                      [--levels=kernel,distribution,task] [--niah_lengths=4096]
                                      [--max_flip_share=X] [--max_kl=X]

A way names at most one of each: attention (xla, triton, mosaic), the form of the
memory's read (auto, blocked, associative, attention), precision (float32, bfloat16, float64), and
the path: forward (whole rows through the training forward pass), streamed[:PIECE] (a prefill in
pieces), decoded (token by token). The rest is taken from the run's configuration.

kernel: outputs of each block on the reference's input to it, in units in the last place, on the
first batch of rows. distribution: KL(reference || candidate), total variation and flips (changes of
the most likely token) on held-out text, rows of --seq_len tokens of one document each. task:
RULER's needles in a haystack, hidden in the same text and answered greedily both ways; the forward
path computes whole rows again as the answer grows. Writes equivalence.json and a picture per level.
Exit status 1 when the mean KL or the share of flips is above its limit.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_json

_LEVELS = ["kernel", "distribution", "task"]

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
flags.DEFINE_integer("seed", 0, "task: of the samples.", lower_bound=0, upper_bound=2**32 - 1)
flags.DEFINE_string("output", None, "Folder; default: eval/equivalence in the run directory.")
flags.DEFINE_float("max_flip_share", None, "Largest share of flips for exit status 0.")
flags.DEFINE_float("max_kl", None, "Largest mean KL in nats for exit status 0.")


def main(argv: list[str]) -> None:
    _check_levels()
    from ttcd_kernels import measure

    from experiments.studies.equivalence import levels
    from experiments.studies.equivalence.ways import Computed, parse_way
    from ttcd_jax.data.sources import text_records
    from ttcd_jax.run.directory import RunDirectory, load_run, model_config
    from ttcd_jax.tasks.ruler import NIAH

    directory = RunDirectory(FLAGS.run_dir)
    data, config = directory.read_part("data"), model_config(directory)
    ways = parse_way(FLAGS.reference), parse_way(FLAGS.candidate)
    resolved = [way.resolved(config) for way in ways]
    if resolved[0] == resolved[1]:
        raise UserError(f"reference and candidate are the same way, {resolved[0]}: name two")
    lengths = cli.positives("niah_lengths")
    cells = [(task, length) for task in FLAGS.niah_tasks or NIAH for length in lengths]
    _check_among("niah_tasks", FLAGS.niah_tasks, NIAH)
    run = load_run(FLAGS.run_dir, FLAGS.step)
    records = text_records(FLAGS.run_dir, data, run.tokenizer, FLAGS.text)
    seq_len, batch_size = FLAGS.seq_len or data["seq_len"], FLAGS.batch_size
    rows = levels.whole_rows(records, seq_len, FLAGS.max_rows, config.vocab_size)
    pair = Computed(ways[0], run.model), Computed(ways[1], run.model)
    for computed in pair:
        computed.check(batch_size, seq_len, decodes="task" in FLAGS.levels)
    result: dict[str, Any] = {
        "run_dir": str(directory.path),
        "step": run.step,
        "environment": measure.environment(),
        "reference": resolved[0],
        "candidate": resolved[1],
        "text": FLAGS.text,
        "seq_len": seq_len,
    }
    measures = {
        "kernel": lambda: levels.kernel(pair, rows["tokens"][:batch_size]),
        "distribution": lambda: levels.distribution(pair, rows, batch_size),
        "task": lambda: levels.task(
            pair, cells, run.tokenizer, records, batch_size, FLAGS.niah_samples, FLAGS.seed
        ),
    }
    folder = Path(FLAGS.output) if FLAGS.output else directory.path / "eval/equivalence"
    file = folder / "equivalence.json"
    write_json(file, result)  # a folder that cannot be written is reported now
    for name in FLAGS.levels:
        level = measures[name]()
        print(level.text(), end="\n\n", flush=True)
        write_json(file, result := result | {name: level.facts})
        level.draw(folder / f"{name}.png")
    print(f"written to {folder}")
    if facts := result.get("distribution"):
        sys.exit("\n".join(_above_limits(facts["kl"]["mean"], facts["flip_share"])) or 0)


def _check_levels() -> None:
    _check_among("levels", FLAGS.levels or [""], _LEVELS)
    for limit in ("max_kl", "max_flip_share"):
        if FLAGS[limit].value is not None and "distribution" not in FLAGS.levels:
            raise UserError(f"--{limit} limits the level distribution: name it in --levels")


def _check_among(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"--{flag}: {name!r} is not one of {', '.join(known)}")


def _above_limits(kl: float, flip_share: float) -> Iterator[str]:
    measured = {"max_kl": ("KL mean", kl), "max_flip_share": ("share of flips", flip_share)}
    for flag, (name, value) in measured.items():
        limit = FLAGS[flag].value
        if limit is not None and not value <= limit:
            yield f"{name} {value:.3g} is above --{flag} {limit:g}"


if __name__ == "__main__":
    cli.run(main)
