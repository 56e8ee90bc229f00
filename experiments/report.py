"""Writes an HTML page with pictures, and prints tables, from the evaluations of several runs.

    python -m experiments.report --run_dir=DIR [--run_dir=DIR2 ...] [--output=DIR] [--next=LINE ...]

Runs that were evaluated on the same task share one table and one picture.
"""

from pathlib import Path

from absl import flags

from experiments import cli

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("run_dir", None, "A run directory; repeat for more.", required=True)
flags.DEFINE_string("output", None, "Folder of the page; default: report/ in the first run.")
flags.DEFINE_multi_string("next", [], "A line of the page's and the terminal's 'next' list.")


def main(argv: list[str]) -> None:
    from ttcd_kernels.table import format_table

    from ttcd_jax.eval.results import write_report
    from ttcd_jax.units import printable

    run_dirs = [Path(path) for path in FLAGS.run_dir]
    output = Path(FLAGS.output) if FLAGS.output else run_dirs[0] / "report"
    sections = write_report(run_dirs, output, FLAGS.next)
    for section in sections:
        print(f"\n{section.title}\n{format_table(section.table)}")
    names = ", ".join(str(x.path) for section in sections for x in section.pictures)
    print("\n" + printable(f"page {output / 'index.html'}, pictures {names} next to it"))
    if FLAGS.next:
        print("\nnext:\n" + "\n".join(f"  {line}" for line in FLAGS.next))


if __name__ == "__main__":
    cli.run(main)
