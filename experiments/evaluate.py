"""Evaluates a run directory and writes JSON, CSV and a picture into it.

    python -m experiments.evaluate --run_dir=DIR --task=ppl [--text=PATH] [--seq_len=N] [--step=N]
    python -m experiments.evaluate --run_dir=DIR --task=recall|needle
                                   [--mesh=data=2,seq=2] [--distributed=slurm]

ppl: perplexity and bits per byte by the length of the context, on the held-out part of the run's
corpus, or on any text file or folder. recall: accuracy by distance of a run on the recall data. A
method with a memory is measured with its fast weights on and off (eta = 0). needle: accuracy of
such a run at values that were read as a prompt and asked for after 16 to 512 tokens of decoding,
with the memory that goes on and with the published one, which is off while decoding. All devices
take part; of several processes (not for needle) the first speaks and writes.
"""

from pathlib import Path
from typing import Any, get_args

from absl import flags

from experiments import cli, processes
from experiments.held_out import text_records
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_enum("task", None, ["ppl", "recall", "needle"], "What to measure.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint; default: the newest.")
flags.DEFINE_string("text", None, "ppl: a text file or a folder of .txt instead of the corpus.")
flags.DEFINE_integer("seq_len", None, "ppl: tokens per row; default: as in training.")
flags.DEFINE_integer(
    "max_rows", 512, "ppl, recall: rows to measure, spread over the data.", lower_bound=1
)
flags.DEFINE_integer("batch_size", 16, "Rows at a time; needle: rows in all.", lower_bound=1)
flags.DEFINE_list("mesh", [], "Devices along mesh axes, as data=2,seq=2; fsdp takes the rest.")
flags.DEFINE_string("label", None, "Name of this run in tables and pictures; default: its method.")

_RECALL_SEED = 1_000_003  # rows no training seed of a few digits can have seen
_DISTANCES = (16, 32, 64, 128, 256, 512)
_MAX_NEEDLES = 4
_TITLES = {
    "ppl": "Held-out text: bits per byte by context length",
    "recall": "Recall accuracy by distance",
    "needle": "Needles read back after decoding",
}


def main(argv: list[str]) -> None:
    import jax

    from ttcd_jax.run.directory import RunDirectory
    from ttcd_jax.sharding.mesh import build_mesh
    from ttcd_jax.train.watchdog import Watchdog

    source = RunDirectory(FLAGS.run_dir).read_config()
    mesh_config = _mesh_config()
    processes.connect()
    with Watchdog(jax.process_count()), jax.set_mesh(build_mesh(mesh_config)):
        result = _evaluated(source)
        if jax.process_index() == 0:
            _write(result)


def _mesh_config():
    from ttcd_jax.sharding.mesh import MeshConfig

    sizes = {}
    for item in FLAGS.mesh:
        axis, _, size = item.partition("=")
        if not size.isdecimal():
            raise UserError(f"--mesh is AXIS=DEVICES,... as in data=2,seq=2, and has {item!r}")
        sizes[axis] = int(size)
    return MeshConfig.from_dict(MeshConfig().to_dict() | sizes)


def _evaluated(source: dict[str, Any]) -> dict[str, Any]:
    """What is written: facts of the run, and the measures of every variant of its model."""
    from ttcd_jax.run.directory import load_run

    run = load_run(FLAGS.run_dir, FLAGS.step)
    if FLAGS.task == "needle":
        num_rows, series = _decoded(source, run)
    else:
        num_rows, series = _scored(source, run)
    result = {
        "task": FLAGS.task,
        "title": _TITLES[FLAGS.task],
        "run_dir": str(Path(FLAGS.run_dir).absolute()),
        "step": run.step,
        "rows": num_rows,
        "text": FLAGS.text,
        "series": series,
    }
    if FLAGS.task != "ppl":
        result["chance"] = _recall_config(source).chance_accuracy
    return result


def _scored(source: dict[str, Any], run) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """(rows, the measures of every variant) of one pass over each row."""
    from ttcd_jax.eval.scorer import score_rows
    from ttcd_jax.run.directory import load_run

    rows = _text_rows(source, run) if FLAGS.task == "ppl" else _recall_rows(source)
    series = {}
    for label, changes in _variants(run.config).items():
        model = load_run(FLAGS.run_dir, run.step, changes).model if changes else run.model
        scores = score_rows(model, rows, batch_size=FLAGS.batch_size)
        series[label] = _measure(scores, rows, run)
    return len(rows["tokens"]), series


def _decoded(source: dict[str, Any], run) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """(rows, the accuracy of every kind of memory) at needles, token by token."""
    import jax

    from ttcd_jax.data.synthetic.recall import needles
    from ttcd_jax.eval.recall import while_decoding
    from ttcd_jax.inference.model import inference_model
    from ttcd_jax.inference.prefill import Memory
    from ttcd_jax.models.config import METHODS, has_in_place_memory

    if jax.process_count() > 1:
        raise UserError(
            f"needle decodes in one process, not in {jax.process_count()}: leave --distributed out"
        )
    config = _recall_config(source)
    rows = needles(
        config,
        seed=_RECALL_SEED,
        num_rows=FLAGS.batch_size,
        num_needles=max(1, min(_MAX_NEEDLES, config.num_keys // 2)),
        num_tokens=max(_DISTANCES),
    )
    name = FLAGS.label or METHODS[run.config.method].label
    memories: dict[str, Memory] = {name: "kept"}
    if has_in_place_memory(run.config):
        memories = {f"{name}, memory {kind}": kind for kind in get_args(Memory)}
    model = inference_model(run.model)
    return FLAGS.batch_size, {
        label: while_decoding(model, rows, _DISTANCES, memory) for label, memory in memories.items()
    }


def _write(result: dict[str, Any]) -> None:
    from ttcd_jax.eval import results
    from ttcd_jax.eval.report import format_table

    folder = Path(FLAGS.run_dir) / "eval" / FLAGS.task
    results.write_results(folder, result)
    print(f"{result['title']} (step {result['step']}, {result['rows']} rows)")
    print(format_table(results.table(result)))
    print(f"written to {folder}")


def _variants(config) -> dict[str, dict[str, Any]]:
    """Label -> changes to the model's configuration."""
    from ttcd_jax.methods import method_named
    from ttcd_jax.models.config import has_in_place_memory, switched_off

    name, off = FLAGS.label or method_named(config.method).label, switched_off(config, 1)
    if off is None or not has_in_place_memory(config):
        return {name: {}}
    return {f"{name}, fast weights on": {}, f"{name}, off (eta = 0)": {"memory": off.memory}}


def _text_rows(source: dict[str, Any], run):
    import grain

    from ttcd_jax.data.packing import DocumentRows
    from ttcd_jax.data.tokenizer import check_tokens

    records = text_records(FLAGS.run_dir, source, run, FLAGS.text)
    seq_len = FLAGS.seq_len or source["data"]["seq_len"]
    parts = [DocumentRows(part, seq_len=seq_len) for part in records]
    whole = grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in parts])
    rows = _stacked(whole)
    check_tokens(rows["targets"], run.config.vocab_size)
    return rows


def _recall_rows(source: dict[str, Any]):
    from ttcd_jax.data.synthetic.recall import RecallRows

    config = _recall_config(source)
    return _stacked(RecallRows(config, seed=_RECALL_SEED, num_rows=FLAGS.max_rows))


def _recall_config(source: dict[str, Any]):
    from ttcd_jax.data.synthetic.recall import RecallConfig

    if source["data"]["type"] != "RecallConfig":
        raise UserError(f"{FLAGS.run_dir} was not trained on recall data: use --task=ppl")
    return RecallConfig.from_dict(source["data"])


def _stacked(rows):
    """--max_rows of a source, spread over it: fields [rows, T]."""
    import numpy as np

    chosen = np.linspace(0, len(rows) - 1, min(FLAGS.max_rows, len(rows))).astype(int)
    made = [rows[int(i)] for i in chosen]
    return {name: np.stack([row[name] for row in made]) for name in made[0]}


def _measure(scores, rows, run) -> list[dict[str, Any]]:
    from ttcd_jax.eval.perplexity import by_position
    from ttcd_jax.eval.recall import attention_reach, by_distance

    if FLAGS.task == "ppl":
        return by_position(scores, rows, run.tokenizer)
    return by_distance(scores, rows, attention_reach(run.config))


if __name__ == "__main__":
    cli.run(main)
