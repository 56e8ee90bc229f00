"""What the memory of a trained model is worth, and of what: its losses under controls."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import numpy as np
from flax import nnx
from ttcd_kernels.table import Row

from ttcd_jax.data.sources import synthetic_data
from ttcd_jax.data.synthetic import HELD_OUT, SyntheticRows
from ttcd_jax.errors import UserError
from ttcd_jax.measure.by_document import Curve, Selection, cells, means_of, means_over_seeds
from ttcd_jax.measure.pictures import Picture, plot_bars
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Series, Subject, register, table_of
from ttcd_jax.methods.in_place import InPlaceSettings
from ttcd_jax.models import config as models
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.row import Control
from ttcd_jax.tasks.documents import FirstTokens
from ttcd_jax.train.layers_on_disk import per_parameter
from ttcd_jax.train.state import with_params

TRAINED, LESS = "as trained", "less as trained"
Name = Literal["off", "layers", "foreign", "shuffled", "no_gap"]


class ControlLoss(NamedTuple):
    """The losses of a document's tokens under a control; of a drawn row, of what it asks."""

    control: str
    document: int
    tokens: int
    nll: float


@register
class Controls(FirstTokens[ControlLoss]):
    """Losses of a model with an in-place memory, as trained and under `controls` (none given: all
    that it can have), on the rows of task position, or what is asked of `max_rows` other rows where
    these are drawn: "off", nothing is read; "layers", the same of every memory alone; "foreign", a
    document reads what another one wrote; "shuffled", errors are stored under the keys of other
    tokens of their chunk; "no_gap", the student's window is the teacher's. `batch_size` whole rows
    are read at once for "foreign" and "shuffled"; it decides whose memory a document reads."""

    name = "controls"
    title = "Controls of a trained memory"
    record = ControlLoss
    key = "control"
    x_label = "control"
    rank = 12
    whole = TRAINED
    is_by_batch = True
    has_variants = False
    sentence = "Nats per token more than as trained: what the control takes from the model."

    controls: tuple[Name, ...] = ()

    def rows(self, subject: Subject) -> Selection:
        chosen, found = self._chosen(subject.model.config), self._rows(subject)
        if "foreign" in chosen and min(self.batch_size, len(found)) < 2:
            raise UserError(
                f"{len(found)} documents in batches of {self.batch_size}: another document's "
                "memory needs two, or leave 'foreign' out of --controls"
            )
        if len(sizes := {ids.size for ids in found.documents}) > 1:
            raise UserError(
                f"documents of {min(sizes)} to {max(sizes)} tokens: task controls reads rows of "
                "one length, as it chooses them without --manifest"
            )
        return found

    def _rows(self, subject: Subject) -> Selection:
        """Rows of text, or drawn ones."""
        if (drawn := synthetic_data(subject.data)) is None:
            return super().rows(subject)
        for name in ("text", "manifest", "seq_len"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"--{name} has no effect: {subject.run_dir} was trained on {drawn.kind} data, "
                    "which has its own rows"
                )
        rows = [*SyntheticRows(drawn, seed=HELD_OUT, num_rows=self.max_rows)]
        ids = [np.concatenate([row["tokens"], row["targets"][-1:]]) for row in rows]
        asked = [np.where(row["loss_mask"], row["targets"], -1) for row in rows]
        return Selection(ids, {"mode": f"drawn rows of {drawn.kind}"}, asked=asked)

    @classmethod
    def refusal(cls, config: models.TransformerConfig) -> str:
        found = models.has_in_place_memory(config)
        return "" if found else f"method {config.method!r} has no in-place memory to be controlled"

    def _chosen(self, config: models.TransformerConfig) -> list[str]:
        """The names of the controls. Raises `UserError` where a model cannot have one."""
        if what := self.refusal(config):
            raise UserError(what)
        for name in self.controls:
            check_control(config, name)
        wanted, lacking = self.controls or get_args(Name), lacks(config)
        return [name for name in get_args(Name) if name in wanted and not lacking.get(name)]

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> Iterator[ControlLoss]:
        documents, asked = rows.documents, rows.asked or [x[1:] for x in rows.documents]
        targets = [np.maximum(x, 0) for x in asked]
        for name, read in self._readers(scorer.model, length=len(documents[0])):
            if isinstance(read, Transformer):
                label = f"{subject.name}, {name}"
                found = self.scorer(subject, label, read).losses(documents, targets)
            else:
                found = scorer.controlled(documents, read, targets)
            for i, (scores, own) in enumerate(zip(found, asked, strict=True)):
                losses = scores.losses[own >= 0]
                yield ControlLoss(name, i, losses.size, float(losses.sum(dtype=np.float64)))

    def _readers(
        self, model: Transformer, length: int
    ) -> Iterator[tuple[str, Transformer | Control]]:
        """What reads rows of `length` tokens, by control: another model of the same parameters, or
        the model with its memories under this control."""
        config, chosen = model.config, self._chosen(model.config)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        yield TRAINED, model
        if "off" in chosen:
            off = models.switched_off(config, length)
            assert off is not None, "an in-place memory has a rate"
            yield "memory off", with_params(off, params)
        for layer, block in enumerate(models.block_configs(config) if "layers" in chosen else ()):
            if written := block.write_param and f"layers/{layer}/{block.write_param}":
                kept = per_parameter(config, lambda name, own=written: name != own)
                less = jax.tree.map(lambda x, by: x if np.all(by) else x * by, params, kept)
                yield f"layer {layer} off", with_params(config, less)
        if "foreign" in chosen:
            yield "another document's memory", "foreign"
        if "shuffled" in chosen:
            yield "shuffled keys", "shuffled"
        if "no_gap" in chosen:
            yield "no gap", with_params(config.replace(**config.without_gap(length)), params)

    @classmethod
    def table(cls, series: Series[ControlLoss]) -> list[Row]:
        """A row per control: nats per token, and less those as trained, in pairs."""
        columns = {}
        for label, (names, means) in means_of(series, lambda x: x.control)[0].items():
            prefix = f"{label}: " if len(series) > 1 else ""
            columns[f"{prefix}nats per token"] = cells(names, means)
            columns[f"{prefix}{LESS}"] = cells(*cls.within([series[label]]))
        return table_of(cls.key, columns)

    @classmethod
    def pictures(
        cls, folder: Path, series: Series[ControlLoss], chance: float | None
    ) -> list[Picture]:
        found = {label: cls.within([records]) for label, records in series.items()}
        bars = {x: dict(zip(y, z.mean.tolist(), strict=True)) for x, (y, z) in found.items()}
        labels = {"title": cls.title, "x_label": cls.x_label, "y_label": f"nats, {LESS}"}
        plot_bars(folder / (path := Path(f"{cls.name}.svg")), series=bars, **labels)
        return [Picture(path, cls.sentence)]

    @classmethod
    def within(cls, seeds: Sequence[Sequence[ControlLoss]]) -> Curve:
        """Of every control, less as trained."""
        others = [[x for x in records if x.control != TRAINED] for records in seeds]
        names = dict.fromkeys(x.control for x in others[0])
        trained = ([x for x in records if x.control == TRAINED] for records in seeds)
        base = [[x._replace(control=name) for name in names for x in found] for found in trained]
        return means_over_seeds(others, lambda x: x.control, base)


def check_control(config: models.TransformerConfig, name: str) -> None:
    """Raises `UserError` for a control that a model with an in-place memory cannot have."""
    if what := lacks(config).get(name):
        raise UserError(f"method {config.method!r} cannot have control {name!r}: {what}")


def lacks(config: models.TransformerConfig) -> dict[str, str]:
    """Of every control what a model with an in-place memory lacks for it."""
    settings = config.settings
    assert isinstance(settings, InPlaceSettings)
    has_keys = settings.stores_keys and settings.chunk_size > 1
    has_writes = any(block.write_param for block in models.block_configs(config))
    return {
        "layers": "" if has_writes else "no parameter P, in which writes are linear",
        "shuffled": "" if has_keys else "no keys, several to a chunk",
        "no_gap": "" if models.layers_with_teacher(config) else "no teacher",
    }
