"""Costs of the library on this machine, case by case.

    python -m experiments.bench CASE [--quick] [--json=FILE] [flags of the case: CASE --help]

    step     training steps of several --gin over the first; the cost of a checkpoint
    data     batches per second of the input pipelines of several --gin
    layer    loss and gradient of fast layers by --forms, --lengths and --remat: time, peak memory
    prefill  long prompts by several --models: time and FLOPs over SWA and IP-TTT, memory
    decode   steps after prompts of --lengths tokens by --models and --batch_sizes
    mad      a sweep of --runs as one program and one run after another

The programs of a table are warmed up, then take turns; a time is the median of --rounds. A program
that does not fit on the device or would take longer than --max_seconds a call is compiled only (0:
every program), and a note gives the reason; "device MiB" is the peak of the process on the device
until then. The JSON file has the rows of the tables, device, versions and commit.
--quick: tiny sizes where no flag gives one. The exit status is 1 if a result is wrong.
"""

import dataclasses
import importlib
import json
import sys
import typing
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_bool("quick", False, "Tiny sizes where no flag gives one.")
flags.DEFINE_string("json", None, "File for the report, rewritten after every table.")
CASES = {"step": "step", "data": "step", "layer": "layer", "mad": "mad"}
CASES |= {"prefill": "prefill", "decode": "prefill"}


def main(argv: list[str]) -> None:
    name = argv[1]
    if name not in CASES:
        raise UserError(f"case {name!r} is not one of {', '.join(CASES)}")
    if FLAGS.json and not Path(FLAGS.json).parent.is_dir():
        raise UserError(f"--json: no folder {Path(FLAGS.json).parent}; create it first")
    case = _case(name)
    hints = typing.get_type_hints(case.options)
    given = {flag: _value(flag, hints[flag]) for flag in hints if FLAGS[flag].value is not None}
    options = case.options(**(case.quick if FLAGS.quick else {}) | given)
    import jax
    from ttcd_kernels import measure
    from ttcd_kernels.measure import MIB, over
    from ttcd_kernels.table import format_table

    if name == "mad":
        cli.use_every_core()
    report: dict[str, Any] = {"case": name, "environment": measure.environment()}
    print(" ".join(f"{key}={value}" for key, value in report["environment"].items()), flush=True)
    report |= {"options": options.to_dict(), "rows": []}
    for rows in case.measured(options):
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # a CPU has none
        rows = [row | {"device MiB": over(peak, MIB)} for row in rows]
        report["rows"] += rows
        print(f"\n{format_table(rows, sorted(rows[0], key='note'.__eq__))}", flush=True)
        if FLAGS.json:  # after every table: a long run may be cut off
            Path(FLAGS.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any(measure.FAILED in row.get("note", "") for row in report["rows"]):
        raise SystemExit("a result is wrong: the notes name it")


def _case(name: str) -> Any:
    return importlib.import_module(f"experiments.bench.{CASES[name]}").CASES[name]


def _define_flags(name: str) -> None:
    """A flag per field of the case's options."""
    hints = typing.get_type_hints(_case(name).options)
    kinds = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
    for field in dataclasses.fields(_case(name).options):
        define: Any = kinds.get(hints[field.name], flags.DEFINE_string)
        if typing.get_origin(hints[field.name]) is tuple:
            several = field.name in ("gin", "param")  # their values may contain a comma
            define = flags.DEFINE_multi_string if several else flags.DEFINE_list
        define(field.name, None, f"Default: {field.default}.")


def _value(flag: str, hint: Any) -> Any:
    if hint == tuple[int, ...]:
        return tuple(cli.positives(flag))
    if getattr(FLAGS, flag) == []:
        raise UserError(f"--{flag} is empty")
    return getattr(FLAGS, flag)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if argument in CASES:
            _define_flags(argument)
            break
    cli.run(main, ["CASE"])
