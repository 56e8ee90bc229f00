"""Measures the kernels and their peers: a table on stdout, JSON with device and versions.

    python -m ttcd_kernels.bench [--op dual_window] [--shapes tiny|cpu|paper] [--json FILE]

Times are medians of rounds in which all implementations take turns; memory is what the compiler
reports. `tiny` takes seconds, `cpu` some minutes on two cores, `paper` wants a GPU.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ttcd_kernels import measure
from ttcd_kernels.dual_window import bench as dual_window
from ttcd_kernels.dual_window.shapes import SHAPES

OPS = {"dual_window": dual_window}


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    op = OPS[options.op]
    environment = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    rows = op.run(options.shapes)
    print(op.table(rows))
    if options.json is None:
        return
    report: dict[str, Any] = {"op": options.op, "environment": environment}
    report["shapes"] = op.describe(options.shapes)
    report["rows"] = [row._asdict() for row in rows]
    options.json.write_text(json.dumps(report, indent=1) + "\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ttcd_kernels.bench",
        description="Time and memory of the kernels and their peers.",
        allow_abbrev=False,
    )
    parser.add_argument("--op", choices=OPS, default="dual_window", help="what to measure")
    parser.add_argument("--shapes", choices=SHAPES, default="tiny", help="which set of shapes")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}; create it first")
    return options


if __name__ == "__main__":
    main()
