"""Costs of the library on this machine, case by case.

    python -m experiments.bench CASE [--quick] [--json=FILE] [--OPTION=VALUE ...]

    step     training steps of several --gin, relative to the first: time, memory, MFU
    data     rows per second of the input pipelines of several --gin, or of their rows filled with
             --random_tokens, and their share of a step on --topology
    layer    loss and gradient of fast layers by --forms, --lengths and --remat: time, peak memory
    prefill  long prompts by several --models: time and FLOPs over SWA and IP-TTT, memory
    decode   steps after prompts of --lengths tokens by --models and --batch_sizes
    mad      a sweep of --runs as one program and one run after another

The programs of a table are warmed up, then take turns; a time is the median of --rounds. A program
that does not fit on the device or would take longer than --max_seconds a call is compiled only (0:
every program), and a note gives the reason; "device MiB" is the peak of the process on the device
so far. The JSON file has the rows of the tables, device, versions and commit.
--quick: tiny sizes where no option gives one. Options and their defaults are the fields of the
case's class; an unknown one prints their names. The exit status is 1 if a result is wrong.
"""

import importlib
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_json

FLAGS = flags.FLAGS
flags.DEFINE_bool("quick", False, "Tiny sizes where no option gives one.")
flags.DEFINE_string("json", None, "File for the report, rewritten after every table.")
CASES = {"step": "step.Step", "data": "step.Data", "layer": "layer.Layer", "mad": "mad.Sweep"}
CASES |= {"prefill": "prefill.Prefill", "decode": "prefill.Decode"}


def main(argv: list[str]) -> None:
    name, *arguments = argv[1:] or [""]
    if name not in CASES:
        raise UserError(f"case {name!r} is not one of {', '.join(CASES)}")
    kind = _case(name)
    case = cli.parse_options(kind, f"case {name}", arguments, kind.quick if FLAGS.quick else {})
    import jax
    from ttcd_kernels import measure
    from ttcd_kernels.measure import MIB, over
    from ttcd_kernels.table import format_table

    if name == "mad":
        cli.use_every_core()
    report: dict[str, Any] = {"case": name, "environment": measure.environment()}
    print(" ".join(f"{key}={value}" for key, value in report["environment"].items()), flush=True)
    report |= {"options": case.to_dict(), "rows": []}
    if FLAGS.json:  # a file that cannot be written is reported now
        write_json(Path(FLAGS.json), report)
    for rows in case.tables():
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # a CPU has none
        rows = [row | {"device MiB": over(peak, MIB)} for row in rows]
        report["rows"] += rows
        print(f"\n{format_table(rows, sorted(rows[0], key='note'.__eq__))}", flush=True)
        if FLAGS.json:  # after every table: a long run may be cut off
            write_json(Path(FLAGS.json), report)
    if any(measure.FAILED in row.get("note", "") for row in report["rows"]):
        raise SystemExit("a result is wrong: the notes name it")


def _case(name: str) -> Any:
    module, _, kind = CASES[name].partition(".")
    return getattr(importlib.import_module(f"experiments.studies.bench.{module}"), kind)


def _options(arguments: list[str]) -> type[Config] | None:
    return _case(arguments[1]) if CASES.keys() & {*arguments[1:2]} else None


if __name__ == "__main__":
    cli.run(main, None, _options)
