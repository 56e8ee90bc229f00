"""Compares two variants of one run: layer by layer, by their predictions, on a task.

    python -m experiments.equivalence --run_dir=DIR --reference=xla,float32
                                      --candidate=streamed:512,bfloat16 [--text=PATH] [--seq_len=N]
                                      [--levels=kernel,distribution,task] [--niah_lengths=4096]
                                      [--max_flip_share=X] [--max_kl=X] [--OPTION=VALUE ...]

kernel: outputs of each block on the reference's input to it, in units in the last place.
distribution: KL(reference || candidate), total variation, flips (changes of the most likely token)
and losses on held-out text. task: RULER's needles in a haystack, answered greedily by both.

Each level is an evaluation: its results go to eval/equivalence_LEVEL.VARIANTS in the run, and
experiments.report shows them. Exit status 1 when the mean KL or the share of flips is above its
limit.
"""

import sys
from pathlib import Path

from absl import flags

from experiments import cli
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError

_LEVELS = ["kernel", "distribution", "task"]

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint; default: the newest.")
flags.DEFINE_list("levels", _LEVELS, "The levels to compare.")
flags.DEFINE_string("output", None, "Folder of the results; default: eval in the run directory.")
flags.DEFINE_float("max_flip_share", None, "Largest share of flips for exit status 0.")
flags.DEFINE_float("max_kl", None, "Largest mean KL in nats for exit status 0.")


def main(argv: list[str]) -> None:
    for name in FLAGS.levels or [""]:
        if name not in _LEVELS:
            raise UserError(f"--levels: {name!r} is not one of {', '.join(_LEVELS)}")
    limits = [name for name in ("max_kl", "max_flip_share") if FLAGS[name].value is not None]
    for name in limits if "distribution" not in FLAGS.levels else ():
        raise UserError(f"--{name} limits the level distribution: name it in --levels")
    from ttcd_kernels.table import format_table

    from experiments.studies.equivalence.tasks import FLIPS, KL, LEVELS
    from ttcd_jax.measure.results import evaluate, folder_name
    from ttcd_jax.measure.task import Subject
    from ttcd_jax.run.directory import RunDirectory, load_run
    from ttcd_jax.units import printable

    options = "the comparison", argv[1:]
    tasks = {name: cli.parse_options(LEVELS[name], *options) for name in FLAGS.levels}
    data, run = RunDirectory(FLAGS.run_dir).read_part("data"), load_run(FLAGS.run_dir, FLAGS.step)
    subject = Subject(run.model, run.tokenizer, data, FLAGS.run_dir)
    measured = {"max_kl": ("KL mean", KL), "max_flip_share": ("share of flips", FLIPS)}
    above = []
    for name, task in tasks.items():
        folder = folder_name(task.name, str(task))
        if FLAGS.output:
            folder = str(Path(FLAGS.output).absolute() / task.name)
        result = evaluate(task, subject, run.step, folder)
        path = result.write()
        print(f"{task.title} (step {run.step}, {result.rows} rows)\n{format_table(result.table)}")
        print(printable(f"written to {path}"), end="\n\n", flush=True)
        for flag in limits if name == "distribution" else ():
            (title, row), limit = measured[flag], FLAGS[flag].value
            mean = next(x["mean"] for x in result.table if x[task.key] == row)
            if not mean <= limit:
                above.append(f"{title} {mean:.3g} is above --{flag} {limit:g}")
    sys.exit("\n".join(above) or 0)


def _options(arguments: list[str]) -> type[Config]:
    from experiments.studies.equivalence.tasks import Kernel

    return Kernel  # those of every level


if __name__ == "__main__":
    cli.run(main, None, _options)
