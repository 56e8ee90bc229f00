"""What is lost where memories are added: texts of one fact each, and all facts asked for.

    python -m experiments.memories --run_dir=RUN [--run_dir=RUN ...] [--output=FILE]

Runs on evidence read every text alone; the memories of the first n are added or averaged. Beside
it: the same facts as one text. The facts of a row have other keys, evenly asked for, or one key:
then the last value is right.
"""

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ttcd_kernels.table import format_table

from ttcd_jax.commands import cli
from ttcd_jax.data.synthetic import HELD_OUT, EvidenceConfig
from ttcd_jax.inference import inference_model, mean, memories_of, prefill, start_from, start_state
from ttcd_jax.measure.page import Section
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.run.page import write_records

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("run_dir", None, "A run on evidence; may be repeated.", required=True)
flags.DEFINE_string("output", None, "Write a JSON line per row, for the tables of pages.")

_ROWS, _ASKED = 16, 8  # rows of facts, and facts of each that are asked for


def main(argv: list[str]) -> None:
    rows = [row for run_dir in FLAGS.run_dir for row in measured(run_dir)]
    print(format_table(rows))
    if FLAGS.output is not None:
        runs, on = [*map(Path, FLAGS.run_dir)], f"{_ASKED} facts of each of {_ROWS} rows"
        facts = {"seeds": sorted({RunDirectory(x).read_config()["seed"] for x in runs}), "on": on}
        command, sections = cli.command_line("memories"), [Section("Memories", rows)]
        write_records(FLAGS.output, sections, runs, command, **facts)


def measured(run_dir: str) -> list[dict[str, Any]]:
    """The share of right answers by the number of texts, of every way to read them."""
    run, data = load_run(run_dir), EvidenceConfig.from_dict(RunDirectory(run_dir).read_part("data"))
    model, rng = inference_model(run.model), np.random.default_rng(HELD_OUT)
    shape = _ROWS, data.num_keys
    drawn, values = (rng.permuted(np.indices(shape)[1], axis=1) for _ in range(2))
    values = data.num_keys + values % data.num_values
    found = {}
    for kind, keys in (("other keys", drawn), ("one key", np.broadcast_to(drawn[:, :1], shape))):
        facts = data.facts(rng, keys, values).reshape(*shape, data.fact_size)
        alone, state = [], start_state(model, shape[0])
        for n in range(1, shape[1] + 1):
            fresh = prefill(model, start_state(model, shape[0]), facts[:, n - 1])[1]
            alone.append(memories_of(model, fresh))
            _, state = prefill(model, state, facts[:, n - 1])
            if n & (n - 1):
                continue
            asked = np.arange(_ASKED) * n // _ASKED if kind == "other keys" else [n - 1] * _ASKED
            questions = data.questions(rng, keys[:, asked])
            rows = list(zip(*alone, strict=True))
            ways = {
                "added": [sum(x[1:], x[0]) for x in rows],
                "averaged": [mean(x) for x in rows],
                "one text": memories_of(model, state),
            }
            for way, memories in ways.items():
                each = [x for x in memories for _ in asked]
                tokens = questions.reshape(-1, questions.shape[2])
                logits, _ = prefill(model, start_from(model, each), tokens)
                hits = np.asarray(logits).argmax(-1) == values[:, asked].ravel()
                name = f"{run.config.label}: {kind}, {way}"
                found.setdefault(name, {"row": name})[f"{n}"] = float(hits.mean())
    return list(found.values())


if __name__ == "__main__":
    cli.run(main)
