"""Compares two variants of one run: layer by layer, and by their predictions.

    python -m experiments.equivalence --run_dir=DIR --reference=xla,float32
                                      --candidate=streamed:512,bfloat16 [--text=PATH] [--seq_len=N]
                                      [--max_flip_share=X] [--max_kl=X] [--OPTION=VALUE ...]

kernel: outputs of each block on the reference's input to it, in units in the last place.
distribution: KL(reference || candidate), total variation, flips (changes of the most likely token)
and losses on held-out text.

Each level is an evaluation: its results go to eval/equivalence_LEVEL.VARIANTS in the run, and
experiments.report shows them. Exit status 1 when the mean KL or the share of flips is above its
limit.
"""

import sys

from absl import flags

from ttcd_jax.commands import cli
from ttcd_jax.config import Config

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint (default: the newest).")
flags.DEFINE_float("max_flip_share", None, "Largest share of flips for exit status 0.")
flags.DEFINE_float("max_kl", None, "Largest mean KL in nats for exit status 0.")


def main(argv: list[str]) -> None:
    from ttcd_kernels.table import format_table

    from experiments.studies.equivalence.tasks import FLIPS, KL, Distribution, Kernel
    from ttcd_jax.measure.results import evaluate, folder_name
    from ttcd_jax.measure.task import Subject
    from ttcd_jax.run.directory import RunDirectory, load_run
    from ttcd_jax.units import printable

    tasks = [cli.parse_options(x, "the comparison", argv[1:]) for x in (Kernel, Distribution)]
    data, run = RunDirectory(FLAGS.run_dir).read_part("data"), load_run(FLAGS.run_dir, FLAGS.step)
    subject, means = Subject(run.model, run.tokenizer, data, FLAGS.run_dir), {}
    for task in tasks:
        result = evaluate(task, subject, run.step, folder_name(task.name, str(task)))
        path = result.write()
        print(f"{task.title} (step {run.step}, {result.rows} rows)\n{format_table(result.table)}")
        print(printable(f"written to {path}"), end="\n\n", flush=True)
        means |= {row[task.key]: row.get("mean") for row in result.table}
    limits = ("max_kl", "KL mean", means[KL]), ("max_flip_share", "share of flips", means[FLIPS])
    above = [
        f"{title} {mean:.3g} is above --{flag} {limit:g}"
        for flag, title, mean in limits
        if (limit := FLAGS[flag].value) is not None and not mean <= limit
    ]
    sys.exit("\n".join(above) or 0)


def _options(arguments: list[str]) -> type[Config]:
    from experiments.studies.equivalence.tasks import Kernel

    return Kernel  # those of both levels


if __name__ == "__main__":
    cli.run(main, None, _options)
