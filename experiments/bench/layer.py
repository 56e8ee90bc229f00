"""Measures one fast-weight layer, or the memory of a training step by sequence length.

    python -m experiments.bench.layer [--dim=1024 --mlp_dim=2816 --seq_len=32768 --chunk_size=1024]
    python -m experiments.bench.layer --lengths=4096,8192,16384,32768,65536 [--remat=none,block]

First form: forward and gradient of IPTTCDMLP and IPTTCDBlock with the memory read blocked, by an
associative scan over all chunks, or as attention (defaults: a layer of the 340M model); with
--layers=memory of the read alone, which --forms=products sets beside its bare products. Second
form: compile-only peak memory of the training gradient of a two-layer model of width 128. A table
on stdout, with --json also a file that names device, versions and commit. --quick shrinks both to
seconds.
"""

import json
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_integer("dim", 1024, "Width of the layer.", lower_bound=1)
flags.DEFINE_integer("mlp_dim", 2816, "Hidden width of its MLP.", lower_bound=1)
flags.DEFINE_integer("num_heads", 16, "Attention heads.", lower_bound=1)
flags.DEFINE_integer("seq_len", 32768, "Tokens of the one row.", lower_bound=1)
flags.DEFINE_integer("chunk_size", 1024, "Tokens per chunk of the memory.", lower_bound=1)
flags.DEFINE_integer("window", 2048, "The teacher's window.", lower_bound=1)
flags.DEFINE_integer("student_window", 1024, "The student's window.", lower_bound=1)
flags.DEFINE_list("layers", ["IPTTCDMLP", "IPTTCDBlock"], "Which layers.")
flags.DEFINE_list("forms", ["blocked", "associative", "attention"], "Which forms of the read.")
flags.DEFINE_integer("rounds", 3, "Timed rounds; all programs take turns.", lower_bound=1)
flags.DEFINE_float("max_seconds", 60, "What would take longer a call is only compiled.")
flags.DEFINE_list("lengths", [], "Sequence lengths: measure a training step's memory instead.")
flags.DEFINE_list("remat", ["none", "block"], "With --lengths: none, block, dots.")
flags.DEFINE_bool("quick", False, "Tiny sizes, whatever the other flags say.")
flags.DEFINE_string("json", None, "File for the report.")

_CHOICES = {
    "layers": ("memory", "IPTTCDMLP", "IPTTCDBlock"),
    "forms": ("auto", "blocked", "associative", "attention", "products"),
    "remat": ("none", "block", "dots"),
}
_QUICK_LENGTHS = [128, 256]


def main(argv: list[str]) -> None:
    if FLAGS.json and not Path(FLAGS.json).parent.is_dir():
        raise UserError(f"--json: no folder {Path(FLAGS.json).parent}; create it first")
    lengths = [_positive(text) for text in FLAGS.lengths]
    for flag, choices in _CHOICES.items():
        for name in getattr(FLAGS, flag):
            if name not in choices:
                raise UserError(f"--{flag}={name} is not one of {', '.join(choices)}")
    if FLAGS.dim % FLAGS.num_heads:
        raise UserError(f"--num_heads={FLAGS.num_heads} does not divide --dim={FLAGS.dim}")
    from ttcd_kernels import measure

    environment = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    report = _step_report(lengths) if lengths else _layer_report()
    if FLAGS.json:
        text = json.dumps({"environment": environment, **report}, indent=1)
        Path(FLAGS.json).write_text(text + "\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--lengths: {text!r} is not a number of tokens, e.g. 4096,8192")
    return int(text)


def _layer_report() -> dict[str, Any]:
    from ttcd_kernels import measure

    from experiments.bench.layer_cost import Sizes, layer_costs

    sizes = Sizes(**{name: getattr(FLAGS, name) for name in Sizes._fields})
    if FLAGS.quick:
        sizes = Sizes(32, 64, num_heads=4, seq_len=256, chunk_size=32, window=64, student_window=32)
    rows = layer_costs(
        sizes, FLAGS.layers, FLAGS.forms, rounds=FLAGS.rounds, max_seconds=FLAGS.max_seconds
    )
    cells = [
        (
            row.layer,
            row.form,
            measure.milliseconds(row.seconds),
            measure.mebibytes(row.temp_bytes),
            f"{row.tera_flop:.3g}",
            row.note,
        )
        for row in rows
    ]
    print(" ".join(f"{key}={value}" for key, value in sizes._asdict().items()))
    print(measure.table(("layer", "form", "time ms", "temp MiB", "TFLOP", "note"), cells))
    return {"sizes": sizes._asdict(), "rows": [row._asdict() for row in rows]}


def _step_report(lengths: list[int]) -> dict[str, Any]:
    from ttcd_kernels import measure

    from experiments.bench.layer_cost import step_memory
    from ttcd_jax.methods.ipttcd import MemoryConfig
    from ttcd_jax.models.config import TransformerConfig

    config = TransformerConfig(
        vocab_size=258,
        dim=128,
        num_layers=2,
        num_heads=2,
        mlp_dim=384,
        window=512,
        student_window=256,
        fast_layers=(0, 1),
        memory=MemoryConfig(chunk_size=512),
    )
    if FLAGS.quick:
        memory = MemoryConfig(chunk_size=16)
        config = config.replace(dim=16, mlp_dim=32, window=16, student_window=8, memory=memory)
        lengths = _QUICK_LENGTHS
    rows = step_memory(config, lengths, FLAGS.remat)
    cells = [
        (row.remat, f"{row.length:,}", measure.mebibytes(row.temp_bytes), _per_token(row))
        for row in rows
    ]
    print(measure.table(("remat", "tokens", "temp MiB", "bytes per token"), cells))
    return {"config": config.to_dict(), "rows": [row._asdict() for row in rows]}


def _per_token(row) -> str:
    return f"{row.bytes_per_token:,.0f}"


if __name__ == "__main__":
    cli.run(main)
