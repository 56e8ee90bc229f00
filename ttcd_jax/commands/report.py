"""Writes one self-contained HTML page, with pictures, and prints the tables of several runs.

    ttcd report --run_dir=DIR [--run_dir=DIR2 ...] [--output=DIR] [--records=FILE]
                [--headroom=CONTROL --headroom=CEILING] [--next=LINE ...]

The page shows everything that was measured of the runs: their evaluations, comparisons of two of
their variants, training curves and speed; of folders of MAD sweeps, their scores; of JSON files of
benchmarks and checks of kernels, their tables. Numbers of the paper are set apart.
Runs that were evaluated on the same task share tables and pictures.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from ttcd_jax import storage
from ttcd_jax.commands import cli
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json
from ttcd_jax.units import printable

if TYPE_CHECKING:
    from ttcd_jax.measure.page import Section

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

    from ttcd_jax.run.directory import RunDirectory
    from ttcd_jax.run.page import write_records

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


def write_report(
    run_dirs: Sequence[Path], output: Path, next_steps: Sequence[str], between: Sequence[str] = ()
) -> "list[Section]":
    """Writes `index.html` and its pictures into `output`; returns the sections of the page. Raises
    `UserError` for a folder of which nothing was measured, and where no task has results `between`
    two columns; `DataError` for damaged results."""
    from ttcd_jax.measure.results import read_all_results
    from ttcd_jax.run import page
    from ttcd_jax.run.directory import METRICS, RunDirectory
    from ttcd_jax.run.reporting import read_metrics

    files = [path for path in run_dirs if path.is_file()]
    sweeps = [path for path in run_dirs if (path / "records").is_dir()]
    others = [path for path in run_dirs if path not in (*files, *sweeps)]
    for path in others:
        RunDirectory(path).check_imports()
    found = find_spec("experiments")  # our checkout's, or somebody else's
    folder = Path(found.origin or "").resolve().parent if found else None
    tables = []
    if folder == cli.CONFIG_DIR.resolve().parent and find_spec("experiments.studies"):
        import_module("experiments.studies.equivalence.tasks")  # they are registered
        from experiments.studies.mad.records import sweep_section

        tables = [sweep_section(path, output / f"mad_{i}.svg") for i, path in enumerate(sweeps)]
    elif sweeps:
        raise UserError(f"{sweeps[0]} is a MAD sweep: only a checkout shows it, not the wheel")
    results = read_all_results(others)
    for name, path in zip(results, others, strict=True):
        if not (results[name] or read_metrics(path / METRICS)):
            raise UserError(f"nothing was measured in {path}: train it, or run ttcd evaluate first")
    runs = [page.Run(*x) for x in zip(results, others, strict=True)]
    options = {"between": between, "others": [*tables, *map(_table, files)]}
    file = output / "index.html"
    return page.write_report(file, runs, results, output, next_steps=next_steps, **options)


def _table(path: Path) -> "Section":
    """The table in a file that a benchmark or a check of kernels has written, with device and
    commit. Raises `DataError` for a file without any."""
    from ttcd_jax.measure.page import Section

    report = read_json(path)
    where, rows = report.get("environment"), report.get("rows")
    rows = rows if isinstance(rows, list) else []
    if not rows or not all(isinstance(row, dict) for row in (*rows, where)):
        raise DataError(f"{path} is no report of a benchmark: it has no rows and environment")
    return Section(f"{path.stem} rows ({where.get('device')}, {where.get('commit')})", rows)


if __name__ == "__main__":
    cli.run(main)
