"""The gap between student and teacher by position, and what the memory leaves of it."""

import functools
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ttcd_kernels.table import Row as TableRow

from ttcd_jax.config import Positive
from ttcd_jax.data.sources import synthetic_data
from ttcd_jax.data.synthetic import HELD_OUT, SyntheticRows
from ttcd_jax.errors import UserError
from ttcd_jax.measure.pictures import Picture, plot_lines
from ttcd_jax.measure.scorer import Scorer, batches, placed, whole
from ttcd_jax.measure.task import Arrays, RowTask, Series, Subject, register
from ttcd_jax.memory.distillation import Distillation, summary
from ttcd_jax.models.config import TransformerConfig, layers_with_teacher
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.tasks.perplexity import Perplexity, buckets


class LayerDistances(NamedTuple):
    """Means over positions `start` to `stop` of a layer (`memory.distillation.summary`); None where
    nothing can be measured, NaN of a model whose outputs are."""

    layer: int
    context: str
    start: int
    stop: int
    tokens: int
    gap: float | None
    gap_on: float | None
    gap_both: float | None
    cosine: float | None
    closer: float | None
    change: float | None
    loss: float | None
    loss_on: float | None
    window_share: float | None = None


_MEASURES = LayerDistances._fields[5:]


@register
class StudentTeacher(RowTask[LayerDistances]):
    """The student's distance to the teacher in every layer that has both, with the memory off and
    on, and where the memory moves the student (`ttcd_jax.memory.distillation`). At most `max_rows`
    rows are those of task ppl, with its `text` and `seq_len`; of a run on drawn rows, such
    rows."""

    name = "distillation"
    title = "The student's distance to the teacher, by position"
    record = LayerDistances
    key = "layer"
    x_label = "position (tokens)"
    rank = 40
    has_variants = False
    is_detail = True
    value = "gap_on"
    shaping = ("seq_len",)  # layers may differ
    is_lower_better = True
    opposite = "cosine", "closer"

    max_rows: Positive = 64
    text: str | None = None
    seq_len: Positive | None = None

    @classmethod
    def refusal(cls, config: TransformerConfig) -> str:
        text = f"method {config.method!r} has no student and teacher to compare: task distillation "
        found = layers_with_teacher(config)
        return "" if found else f"{text}is for those that learn from a longer window"

    def source(self, subject: Subject) -> Any:
        if what := self.refusal(subject.model.config):
            raise UserError(f"{subject.run_dir}: {what}")
        if (drawn := synthetic_data(subject.data)) is not None:
            for name in ("text", "seq_len"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"--{name} has no effect: {subject.run_dir} was trained on "
                        f"{drawn.kind} data, which has its own rows"
                    )
            return SyntheticRows(drawn, seed=HELD_OUT, num_rows=self.max_rows)
        return Perplexity(text=self.text, seq_len=self.seq_len).source(subject)

    def measure(self, scorer: Scorer, rows: Arrays, subject: Subject) -> Iterator[LayerDistances]:
        """A record for every bucket of positions and layer."""
        found = distances(scorer.model, rows, scorer.batch_size)
        is_token = rows.get("segment_ids", np.ones_like(rows["tokens"])) > 0
        is_known = not np.isnan(found.on[:, is_token]).any()
        for context, start, stop in buckets(is_token.shape[1]):
            counted = is_token[:, start:stop]
            part = jax.tree.map(lambda x, cut=np.s_[..., start:stop]: jnp.asarray(x[cut]), found)
            measures = summary(part, jnp.asarray(counted))
            for index, layer in enumerate(layers_with_teacher(scorer.model.config)):
                values = {name: float(x[index]) for name, x in measures.items()}
                if is_known:  # else a NaN is no mean of nothing
                    values = {x: y if math.isfinite(y) else None for x, y in values.items()}
                bucket = layer, context, start, stop, int(counted.sum())
                yield LayerDistances(*bucket, **values)

    @classmethod
    def columns(cls, series: Series[LayerDistances]) -> dict[str, dict[Any, Any]]:
        """Over all positions: a column per measure, and run if there are several."""
        found = {}
        for name, records in series.items():
            prefix = f"{name}: " if len(series) > 1 else ""
            overall = [x for x in records if x.context == "all"]
            for measure in _MEASURES:
                found[f"{prefix}{measure}"] = {x.layer: getattr(x, measure) for x in overall}
        return found

    @classmethod
    def table(cls, series: Series[LayerDistances]) -> list[TableRow]:
        """A row per layer."""
        return sorted(super().table(series), key=operator.itemgetter(cls.key))

    @classmethod
    def pictures(
        cls, folder: Path, series: Series[LayerDistances], chance: float | None
    ) -> list[Picture]:
        """One for every layer."""
        drawn = []
        for layer in sorted({record.layer for records in series.values() for record in records}):
            lines = {}
            for name, records in series.items():
                own = [record for record in records if record.layer == layer]
                parts = [record for record in own if record.context != "all"] or own
                stops = [x.stop for x in parts]
                lines[f"{name}, memory off"] = stops, [x.gap for x in parts]
                lines[f"{name}, memory on"] = stops, [x.gap_on for x in parts]
            path = folder / f"{cls.name}_{layer}.svg"
            title, y_label = f"Layer {layer}: distance to the teacher", "|y_T - y| / |y_T|"
            plot_lines(path, title=title, x_label=cls.x_label, y_label=y_label, series=lines)
            sentence = (
                f"Distance in layer {layer} of the student's output to the teacher's, in units of "
                "the teacher's, by position: the memory closes the gap where its line is lower."
            )
            drawn.append(Picture(Path(path.name), sentence))
        return drawn


def distances(model: Transformer, rows: Arrays, batch_size: int) -> Distillation:
    """The distances [Y, rows, T] of `rows` (fields of `ttcd_jax.data.packing`), computed in
    batches, which are sharded over the mesh in use; every process gets all."""
    fields = {name: rows[name] for name in ("tokens", "segment_ids") if name in rows}
    count, results = len(rows["tokens"]), []
    for index in batches(count, batch_size):
        batch = placed({name: field[index] for name, field in fields.items()})
        results.append(jax.device_get(_measured(*nnx.split(model), batch)))
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[:, :count], *results)


@functools.partial(jax.jit, static_argnums=0)
def _measured(
    graph: nnx.GraphDef[Transformer], params: nnx.GraphState, batch: dict[str, Any]
) -> Distillation:
    """One program for every evaluation of a model, however often its parameters change."""
    model = nnx.merge(graph, params)
    return whole(model.distillation(batch["tokens"], batch.get("segment_ids")))
