"""The page of what a command is given: runs, sweeps of MAD, and files of tables."""

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json
from ttcd_jax.measure.page import Section
from ttcd_jax.measure.results import read_all_results
from ttcd_jax.run import page
from ttcd_jax.run.directory import METRICS, RunDirectory
from ttcd_jax.run.reporting import read_metrics


def write_report(
    run_dirs: Sequence[Path], output: Path, next_steps: Sequence[str], between: Sequence[str] = ()
) -> list[Section]:
    """Writes `index.html` and its pictures into `output`; returns the sections of the page. Raises
    `UserError` for a folder of which nothing was measured, and where no task has results `between`
    two columns; `DataError` for damaged results."""
    files = [path for path in run_dirs if path.is_file()]
    sweeps = [path for path in run_dirs if (path / "records").is_dir()]
    others = [path for path in run_dirs if path not in (*files, *sweeps)]
    for path in others:
        RunDirectory(path).check_imports()
    if _has_studies():
        importlib.import_module("experiments.studies.equivalence.tasks")  # they are registered
    elif sweeps:
        raise UserError(f"{sweeps[0]} is a MAD sweep: only a checkout shows it, not the wheel")
    results = read_all_results(others)
    for name, path in zip(results, others, strict=True):
        if not (results[name] or read_metrics(path / METRICS)):
            raise UserError(f"nothing was measured in {path}: train it, or run ttcd evaluate first")
    runs = [page.Run(*x) for x in zip(results, others, strict=True)]
    tables = [_sweep(path, output / f"mad_{i}.svg") for i, path in enumerate(sweeps)]
    tables += map(_table, files)
    options = {"between": between, "others": tables, "next_steps": next_steps}
    return page.write_report(output / "index.html", runs, results, output, **options)


def _has_studies() -> bool:
    """Whether `experiments` is the folder of our checkout, and not somebody else's."""
    found = find_spec("experiments")
    folder = Path(found.origin or "").resolve().parent if found else None
    return folder == CONFIG_DIR.resolve().parent and find_spec("experiments.studies") is not None


def _sweep(path: Path, picture: Path) -> Section:
    from experiments.studies.mad.records import sweep_section

    return sweep_section(path, picture)


def _table(path: Path) -> Section:
    """The table in a file that a benchmark or a check of kernels has written, with device and
    commit. Raises `DataError` for a file without any."""
    report = read_json(path)
    where, rows = report.get("environment"), report.get("rows")
    rows = rows if isinstance(rows, list) else []
    if not rows or not all(isinstance(row, dict) for row in (*rows, where)):
        raise DataError(f"{path} is no report of a benchmark: it has no rows and environment")
    return Section(f"{path.stem} rows ({where.get('device')}, {where.get('commit')})", rows)
