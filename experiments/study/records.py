"""The records of a study, of which `experiments.pages` draws tables: a line of JSON for every
variant of a recipe, text and evaluation."""

import itertools
import json
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttcd_kernels.measure import environment

from experiments.study.runs import StudyConfig, Texts, results_file
from ttcd_jax.files import write_whole
from ttcd_jax.measure.by_document import Curve, DocumentTask, differences, means_of
from ttcd_jax.measure.results import read_results
from ttcd_jax.measure.task import MEMORY_ON, digest
from ttcd_jax.methods import method_named
from ttcd_jax.run.directory import RunDirectory

type Seeds = dict[int, list[Any]]  # records by seed


def write_records(config: StudyConfig, texts: Texts, path: Path, file: Path, command: str) -> None:
    """Writes what holds for all lines, then the measured rows."""
    machine, base = environment(), next(iter(config.files()))
    pieces = f"pieces of {config.piece_bytes:,} bytes, at most {config.max_pieces} of a text"
    head = {
        "command": command,
        "commit": machine["commit"],
        "device": f"{machine['cpu_count']} x {machine['device']}",
        "seeds": config.seeds,
        "interval": f"{pieces}, of the mean of the seeds, less {base} in pairs",
    }
    parts = itertools.product(texts, config.evaluations)
    rows = (row for text, task in parts for row in _rows(config, task, text, path))
    write_whole(file, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in (head, *rows)))


def _rows(config: StudyConfig, task: Any, text: str, path: Path) -> Iterator[dict[str, Any]]:
    """By bucket, nats per token of the base, and the differences of all others from it on the same
    tokens and seeds with half of their intervals; `by seed`: nats per token of all tokens. Only
    evaluations of documents have rows."""
    base: Seeds = {}
    for name, file in config.files().items() if isinstance(task, DocumentTask) else ():
        found: dict[str, Seeds] = {}
        for _, seed in config.chosen([name]):
            results = results_file(path / f"{name}-{seed}", task, name, text)
            if results.exists():
                for label, records in read_results(results).series.items():
                    label = label.replace(f"{name}, {text}", name).removesuffix(f", {MEMORY_ON}")
                    found.setdefault(label, {})[seed] = records
        for label, seeds in found.items():
            base, shared = base or seeds, [seed for seed in seeds if seed in (base or seeds)]
            own, others = ([x for seed in shared for x in y[seed]] for y in (seeds, base))
            key = operator.attrgetter(type(task).key)
            is_base = seeds is base
            curve = means_of({"": own}, key)[0][""] if is_base else differences(own, others, key)
            series = {str(seed): records for seed, records in seeds.items()}
            each, _ = means_of(series, lambda x: None if x.document is None else 0)
            means = [round(float(x.mean[0]), 4) for _, x in each.values()]
            row = {"row": label, "text": text, "task": task.name, "seeds": [*seeds]}
            row |= _trained(path / f"{name}-{min(seeds)}", file)
            row |= {"all": round(sum(means) / len(means), 4), "by seed": means}
            yield row | _cells(curve, has_halves=not is_base)


def _cells(curve: Curve, *, has_halves: bool) -> dict[str, float | list[float]]:
    """A mean or [mean, half] by bucket, rounded to 1e-4."""
    cells: dict[str, float | list[float]] = {}
    for name, mean, low, high in zip(curve[0], *curve[1], strict=True):
        half = [] if math.isnan(high) else [round(float(high - low) / 2, 4)]
        value = round(float(mean), 4)
        cells[str(name)] = [value, *half] if has_halves else value
    return cells


def _trained(folder: Path, file: str) -> dict[str, Any]:
    """The method, the budget and the digest of the configuration, its seed apart."""
    config = RunDirectory(folder).read_config()
    corrects = (config["model"]["memory"] or {}).get("corrects_errors")
    label = method_named(config["model"]["method"]).label
    own = {name: x for name, x in config.items() if name not in ("seed", "changes", "sha256")}
    return {
        "method": f"{label} + delta rule" if corrects else label,
        "recipe": file,
        "config": digest(json.dumps(own, sort_keys=True))[:12],
        "steps": config["steps"],
        "tokens": config["steps"] * config["batch_size"] * config["data"]["seq_len"],
    }
