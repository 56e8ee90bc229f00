"""Writes one self-contained HTML page, with pictures, and prints the tables of several runs.

    ttcd report --run_dir=DIR [--run_dir=DIR2 ...] [--output=DIR] [--records=FILE]
                [--headroom=CONTROL --headroom=CEILING] [--next=LINE ...]

The page shows everything that was measured of the runs: their evaluations, comparisons of two of
their variants, training curves and speed; of folders of MAD sweeps, their scores; of JSON files of
benchmarks and checks of kernels, their tables. Numbers of the paper are set apart.
Runs that were evaluated on the same task share tables and pictures.
"""

from absl import flags

from ttcd_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_multi_string(
    "run_dir", None, "A run or MAD sweep, or a JSON file of a benchmark; repeat.", required=True
)
flags.DEFINE_string("output", None, "Folder of the page (default: report/ in the first run).")
_HEADROOM = (
    "Twice, two columns of losses: the control under a window, and the ceiling under full "
    "attention. Shown is the share between them that every other model gives back."
)
flags.DEFINE_multi_string("headroom", [], _HEADROOM)
flags.DEFINE_string("records", None, "Write a JSON line per row, for the tables of pages.")
flags.DEFINE_multi_string("next", [], "A line of the page's and the terminal's 'next' list.")


def main(argv: list[str]) -> None:
    from ttcd_kernels.table import format_table

    from ttcd_jax import storage
    from ttcd_jax.commands.report.sections import write_report
    from ttcd_jax.errors import UserError
    from ttcd_jax.run.directory import RunDirectory
    from ttcd_jax.run.page import write_records
    from ttcd_jax.units import printable

    paths = [storage.to_path(x) for x in FLAGS.run_dir]
    paths = [x if storage.address(x) is None else RunDirectory(x).path for x in paths]
    run_dirs = [*{path.resolve(): path for path in reversed([*paths])}.values()][::-1]
    first = run_dirs[0].parent if run_dirs[0].is_file() else run_dirs[0]
    if len(FLAGS.headroom) not in (0, 2) or len({*FLAGS.headroom}) == 1:
        names = ", ".join(FLAGS.headroom)
        raise UserError(f"--headroom names a control and a ceiling, got {names}: give two columns")
    output = cli.output_folder(FLAGS.output or first / "report")
    sections = write_report(run_dirs, output, FLAGS.next, FLAGS.headroom)
    if FLAGS.records is not None:
        write_records(FLAGS.records, sections, run_dirs, cli.command_line("report"))
    for section in sections:
        print(f"\n{section.title}\n{format_table(section.table)}")
    if (page := output / "index.html").exists():
        print("\n" + printable(f"page {page}, pictures next to it"))
    if FLAGS.next:
        print("\nnext:\n" + "\n".join(f"  {line}" for line in FLAGS.next))


if __name__ == "__main__":
    cli.run(main)
