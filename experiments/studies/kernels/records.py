"""Records for the tables of pages, from a report of experiments/studies/kernels, measured on any
machine: `python -m experiments.studies.kernels.records REPORT RECORDS`.

A row per step, op and implementation: of checks the number of cases and the largest error by dtype,
of times the milliseconds by case and pass; of a model's step its columns.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ttcd_kernels.measure import Row

from experiments.studies.kernels.bench import UNIT
from experiments.studies.kernels.programs import FAILED
from experiments.studies.kernels.runner import Job, job_of


def rows_of(report: Row) -> list[Row]:
    """The first line of a file of records, and its rows: of a job measured again the last."""
    rows = list({job_of(row): row for row in report["rows"]}.values())
    made = dict.fromkeys(row["surroundings"] for row in rows)
    found = (report["surroundings"][x] for x in made)
    on = dict.fromkeys(f"jax {x['jax']}, triton {x['triton']}" for x in found)
    steps = dict.fromkeys(row["step"] for row in rows)
    head = {"command": f"python -m experiments.kernels --steps {' '.join(steps)}"}
    head |= report["environment"] | {"on": "; ".join(on)}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        where = row["op"] or row["case"]
        groups.setdefault(f"{row['step']}: {where}, {row['implementation']}", []).append(row)
    return [head, *({"row": name} | dict(_fields(found)) for name, found in groups.items())]


def _fields(rows: list[Row]) -> Iterator[tuple[str, object]]:
    good = [row for row in rows if not row["note"].startswith(FAILED)]
    if rows[0]["step"] == "check":
        yield "passed", f"{len(good)} of {len(rows)}"
        for dtype in dict.fromkeys(row["dtype"] for row in good):
            yield dtype, max(row["max rel. error"] for row in good if row["dtype"] == dtype)
        return
    for row in good:
        for name, value in row.items():
            if name.endswith(UNIT) and value is not None:
                yield f"{row['case']} {name.removesuffix(UNIT)}", value
            elif rows[0]["step"] != "times" and name not in (*Job._fields, "surroundings", "note"):
                yield name, value


if __name__ == "__main__":
    report, records = map(Path, sys.argv[1:])
    lines = rows_of(json.loads(report.read_text()))
    records.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
