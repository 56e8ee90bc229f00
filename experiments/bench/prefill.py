"""Measures how fast long prompts are read, and what follows them is decoded, by several methods.

    python -m experiments.bench.prefill [--gin=prefill/default.gin] [--lengths=65536,262144]
        [--batch_sizes=1,4] [--windows=2048,8192,16384] [--models=swa,ipttt,ipttcd_naive,ipttcd]
        [--decode_batches=1,2,4,8,16,32,64] [--json=FILE] [--picture=FOLDER]

One file describes the shape of all models; method and windows are set here (the student sees half
of the teacher's), parameters and tokens are random. Rows are read in pieces from an empty state,
the models take turns. Times and FLOPs (logits of the last token only) stand beside those of SWA and
IP-TTT; "beyond" is what the times' ratio is above the FLOPs'. Naive IP-TTCD must give the fused
one's logits, else the exit status is 1. What would not fit or would take too long is left out and
named. Then memory by length, and decoding behind --decode_context tokens under the first window.
--quick shrinks everything to seconds.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string("gin", "prefill/default.gin", "A file in experiments/configs/, or a path.")
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")
flags.DEFINE_list("lengths", ["65536", "262144"], "Tokens of a row.")
flags.DEFINE_list("batch_sizes", ["1", "4"], "Rows.")
flags.DEFINE_list("windows", ["2048", "8192", "16384"], "Attention windows, the teacher's.")
flags.DEFINE_list("models", ["swa", "ipttt", "ipttcd_naive", "ipttcd"], "Which models.")
flags.DEFINE_integer("piece_size", 4096, "Tokens of a row that are read at once.", lower_bound=1)
flags.DEFINE_string("compute", None, "Dtype of weights and products; default: bfloat16 on a GPU.")
flags.DEFINE_integer("rounds", 5, "Timed rounds; the models take turns.", lower_bound=1)
flags.DEFINE_float("max_seconds", 120, "What would take longer a call is not run; 0: nothing.")
flags.DEFINE_bool("whole_rows", False, "Compile the training forward too: its memory by length.")
flags.DEFINE_list("decode_batches", [], "Batch sizes of decoding; none: prefill only.")
flags.DEFINE_integer("decode_context", 8192, "Tokens in front of it.", lower_bound=1)
flags.DEFINE_integer("decode_steps", 64, "Tokens decoded per timed round.", lower_bound=1)
flags.DEFINE_bool("quick", False, "Tiny sizes, whatever the other flags say.")
flags.DEFINE_string("json", None, "File for the report, rewritten after every case.")
flags.DEFINE_string("picture", None, "Folder for the pictures.")

_QUICK = {
    "gin": "prefill/cpu.gin",
    "param": [
        "TransformerConfig.vocab_size=64",
        "TransformerConfig.dim=16",
        "TransformerConfig.num_layers=1",
        "TransformerConfig.head_dim=8",
        "TransformerConfig.mlp_dim=32",
        "MemoryConfig.chunk_size=8",
        "TargetMemoryConfig.chunk_size=8",
    ],
    "lengths": ["32", "64"],
    "batch_sizes": ["2"],
    "windows": ["8"],
    "piece_size": 16,
    "rounds": 1,
    "decode_batches": ["2"],
    "decode_context": 16,
    "decode_steps": 2,
}


def main(argv: list[str]) -> None:
    if FLAGS.quick:
        for name, value in _QUICK.items():
            setattr(FLAGS, name, value)
    numbers = {
        name: _positives(name) for name in ("lengths", "batch_sizes", "windows", "decode_batches")
    }
    _check_outputs()
    from ttcd_kernels import measure

    config = _shape()
    _check_sizes(config, numbers)
    environment = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    sizes = numbers | {name: getattr(FLAGS, name) for name in ("models", "piece_size", "rounds")}
    report: dict[str, Any] = {"environment": environment, "config": config.to_dict()} | sizes
    report |= {"prefill": [], "memory": [], "decode": []}
    for kind, rows in _measured(config, numbers):
        print(f"\n{_TABLES[kind](rows)}", flush=True)
        report[kind] += [row._asdict() for row in rows]
        if FLAGS.json:  # after every case: a long run may be cut off
            Path(FLAGS.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if FLAGS.picture:
        from experiments.bench.prefill_picture import draw_prefill

        print("\n" + "\n".join(map(str, draw_prefill(Path(FLAGS.picture), report))))
    failed = [row["label"] for row in report["prefill"] if row["note"].startswith(measure.FAILED)]
    if failed:
        raise SystemExit(f"failed: {', '.join(dict.fromkeys(failed))}; the notes above say why")


def _positives(flag: str) -> list[int]:
    for text in getattr(FLAGS, flag):
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise UserError(f"--{flag}: {text!r} is not a positive number, e.g. 4,16")
    numbers = [int(text) for text in getattr(FLAGS, flag)]
    if not numbers and flag != "decode_batches":
        raise UserError(f"--{flag} is empty")
    return numbers


def _check_outputs() -> None:
    if FLAGS.json and not Path(FLAGS.json).parent.is_dir():
        raise UserError(f"--json: no folder {Path(FLAGS.json).parent}; create it first")
    if FLAGS.picture and not Path(FLAGS.picture).is_dir():
        raise UserError(f"--picture: no folder {FLAGS.picture}; create it first")


def _shape():
    """The configuration of the file, in the dtype to compute in. Raises `UserError`."""
    import jax

    from experiments.bench.prefill_models import COMPETITORS
    from experiments.gin_loading import load_config
    from ttcd_jax.models.config import TransformerConfig
    from ttcd_jax.precision import Precision

    for name in FLAGS.models or [""]:
        if name not in COMPETITORS:
            raise UserError(f"--models={name} is not one of {', '.join(COMPETITORS)}")
    config = load_config(TransformerConfig, FLAGS.gin, FLAGS.param, config_dir=cli.CONFIG_DIR)
    compute = FLAGS.compute or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return config.replace(precision=Precision(param=compute, compute=compute))


def _check_sizes(config, numbers: dict[str, list[int]]) -> None:
    """Rows are whole pieces, and pieces and chunks fit: one program then reads every piece behind
    the first windows. Raises `UserError`."""
    size = FLAGS.piece_size
    named = [("lengths", length) for length in numbers["lengths"]]
    if numbers["decode_batches"]:
        named.append(("decode_context", FLAGS.decode_context))
    for flag, length in named:
        if length % size:
            raise UserError(f"--piece_size={size} does not divide {length} of --{flag}")
    for chunk in (config.memory.chunk_size, config.target_memory.chunk_size):
        small, large = sorted((size, chunk))
        if large % small or (size > chunk and (size // chunk).bit_count() > 1):
            raise UserError(
                f"--piece_size={size} and chunk_size {chunk}: pieces must be chunks times a power "
                "of two, or divide them"
            )


def _measured(config, numbers: dict[str, list[int]]) -> Iterator[tuple[str, list[Any]]]:
    """(part of the report, its next rows), case by case."""
    from experiments.bench import prefill_cost as cost
    from experiments.bench.prefill_models import COMPETITORS, Models

    limits = {name: getattr(FLAGS, name) for name in ("piece_size", "rounds", "max_seconds")}
    built = Models(config)
    for window in numbers["windows"]:
        models = {name: built.build(name, window) for name in FLAGS.models}
        settings = [
            cost.Setting(length, batch_size, window)
            for batch_size in numbers["batch_sizes"]
            for length in numbers["lengths"]
        ]
        for setting in settings:
            yield "prefill", cost.prefill_rows(models, setting, **limits)
        if window != numbers["windows"][0]:
            continue
        fused = {name: model for name, model in models.items() if not COMPETITORS[name].is_naive}
        yield (
            "memory",
            cost.memory_rows(
                fused,
                settings[: len(numbers["lengths"])],
                piece_size=FLAGS.piece_size,
                has_whole_rows=FLAGS.whole_rows,
            ),
        )
        for batch_size in numbers["decode_batches"]:
            steps = {"steps": FLAGS.decode_steps, **limits}
            yield "decode", cost.decode_rows(fused, batch_size, FLAGS.decode_context, **steps)


def _prefill_table(rows) -> str:
    from ttcd_kernels import measure

    from experiments.bench.prefill_cost import BASELINES

    header = ["tokens", "window", "model", "ms", "min", "max", "tokens/s"]
    header += [name for base in BASELINES for name in (f"/ {base}", "FLOPs", "beyond %")]
    header += ["program MiB", "state MiB", "device MiB", "distance", "note"]
    cells = []
    for row in rows:
        line = [f"{row.batch_size} x {row.length:,}", f"{row.window:,}", row.label]
        line += map(measure.milliseconds, (row.seconds, row.min_seconds, row.max_seconds))
        line.append(_rate(row))
        for base in BASELINES:
            time, flops = (row._asdict()[f"{kind}_over_{base}"] for kind in ("time", "flops"))
            line += [measure.ratio(time), measure.ratio(flops)]
            line.append(measure.percent(time / flops - 1 if time and flops else None))
        line += map(measure.mebibytes, (row.program_bytes, row.state_bytes, row.device_bytes))
        line += ["-" if row.distance is None else f"{row.distance:.0e}", row.note]
        cells.append(line)
    return measure.table(header, cells)


def _memory_table(rows) -> str:
    from ttcd_kernels import measure

    header = "tokens", "window", "model", "state MiB", "in pieces MiB", "row at once MiB", "note"
    cells = [
        (
            f"{row.batch_size} x {row.length:,}",
            f"{row.window:,}",
            row.label,
            *map(measure.mebibytes, (row.state_bytes, row.piece_bytes, row.whole_bytes)),
            row.note,
        )
        for row in rows
    ]
    return measure.table(header, cells)


def _decode_table(rows) -> str:
    from ttcd_kernels import measure

    header = "batch", "behind", "model", "ms a step", "tokens/s", "/ swa", "state MiB"
    cells = [
        (
            f"{row.batch_size}",
            f"{row.context:,}",
            row.label,
            measure.milliseconds(row.seconds),
            _rate(row),
            measure.ratio(row.time_over_swa),
            measure.mebibytes(row.state_bytes),
            row.note,
        )
        for row in rows
    ]
    return measure.table((*header, "note"), cells)


def _rate(row) -> str:
    return "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"


_TABLES = {"prefill": _prefill_table, "memory": _memory_table, "decode": _decode_table}


if __name__ == "__main__":
    cli.run(main)
