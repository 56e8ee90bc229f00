"""Costs of the library on this machine, case by case.

    python -m experiments.bench CASE [--quick] [--records=FILE] [--OPTION=VALUE ...]

    step     training steps of several --gin, relative to the first: time, memory, MFU
    data     rows per second of the input pipelines of several --gin, and their share of a step
    prefill  long prompts by several --models: time and FLOPs over SWA and IP-TTT, memory
    decode   steps after prompts of --lengths tokens by --models and --batch_sizes

The programs of a table are warmed up, then take turns; a time is the median of --rounds. A program
that does not fit on the device or would take longer than --max_seconds a call is compiled only (0:
every program), and a note gives the reason; "device MiB" is the peak of the process on the device
so far. --records is rewritten after every table. --quick: tiny sizes where no option gives one.
Options and their defaults are the fields of the case's class; an unknown one prints their names.
"""

from absl import flags

from ttcd_jax.commands import cli
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_bool("quick", False, "Tiny sizes where no option gives one.")
flags.DEFINE_string("records", None, "Write a JSON line per row, for the tables of pages.")
flags.DEFINE_alias("json", "records")  # as earlier scripts have it


def main(argv: list[str]) -> None:
    import jax
    from ttcd_kernels import measure
    from ttcd_kernels.measure import MIB, over
    from ttcd_kernels.table import format_table

    from experiments.studies.bench.cases import CASES
    from ttcd_jax.measure.page import Section
    from ttcd_jax.run.page import write_records

    name, *arguments = argv[1:] or [""]
    if name not in CASES:
        raise UserError(f"case {name!r} is not one of {', '.join(CASES)}")
    kind = CASES[name]
    case = cli.parse_options(kind, f"case {name}", arguments, kind.quick if FLAGS.quick else {})
    print(" ".join(f"{key}={value}" for key, value in measure.environment().items()), flush=True)
    sections: list[Section] = []
    for rows in case.tables():
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # a CPU has none
        rows = [row | {"device MiB": over(peak, MIB)} for row in rows]
        sections.append(Section(name, rows))
        print(f"\n{format_table(rows, sorted(rows[0], key='note'.__eq__))}", flush=True)
        if FLAGS.records is not None:  # a long run may be cut off
            write_records(FLAGS.records, sections, (), cli.command_line("bench"))


def _options(arguments: list[str]) -> type[Config] | None:
    from experiments.studies.bench.cases import CASES

    return CASES.get("".join(arguments[1:2]))


if __name__ == "__main__":
    cli.run(main, None, _options)
