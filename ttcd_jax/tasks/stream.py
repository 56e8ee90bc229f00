"""Distilling the stream without training: a model under a window, one late layer of which learns,
token by token, from the same model under its own window.

After that layer the residual streams of teacher and student differ by d. The student stores d under
the features z of its MLP by the delta rule, and what it reads is added to its stream:

    S <- S + rate k (d - k S),   k = z / |z|,   read with a lag of up to a chunk

The *headroom* is the student's loss less the teacher's: all that a memory can give back. Beside the
share of it that comes back stand controls: the error of the layer's own MLP, as IP-TTCD writes it;
a linear map of z in the memory's place, fitted on other documents; another document's memory; and
the memory of the first two thirds, frozen, in the last third alone.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from ttcd_kernels.table import Row as TableRow

from ttcd_jax.config import Bound, NonNegative, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.inference.decode import head_weight
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.measure.pictures import Picture, plot_bars
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Series, Subject, register
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.mlp import SwiGLU
from ttcd_jax.nn.row import Row
from ttcd_jax.tasks.gap import WindowTask, block_of, embedded, fitted, remembered, unit
from ttcd_jax.train.loss import token_scores
from ttcd_jax.train.state import with_params

STREAM, LOCAL, FROZEN = "the stream's error", "the layer's own error", "frozen after two thirds"
MAP, FOREIGN = "linear map of others", "another document's memory"


class Recovered(NamedTuple):
    """The share of the headroom (nats) of a document that comes back."""

    document: int
    memory: str
    share: float
    headroom: float


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream(WindowTask[Recovered]):
    """The share of the headroom that a memory gives back, and its controls: between the model under
    `window` and under its own. The memory is in `layer` (None: at four fifths of the layers) and
    has this `rate`. Measured over the last two thirds of the tokens."""

    name = "stream"
    title = "Distilling the stream without training: the share of the headroom"
    record = Recovered
    key = "memory"
    x_label = "memory"
    value = "share"
    rank = 46

    window: Positive = 128
    layer: NonNegative | None = None
    rate: Annotated[float, Bound("above 0, at most 1", lambda rate: 0 < rate <= 1)] = 0.3
    length: Annotated[int, Bound("3 or more", lambda length: length >= 3)] = 3072

    def rows(self, subject: Subject) -> list[np.ndarray]:
        config = subject.model.config
        if (self.layer or 0) >= config.num_layers:
            raise UserError(f"layer {self.layer} of a model of {config.num_layers}: from 0 on")
        if config.window is not None and config.window <= self.window:
            raise UserError(
                f"window {self.window} is not shorter than the model's {config.window}: nothing is "
                "lost, take a smaller --window"
            )
        return super().rows(subject)

    def measure(self, scorer: Scorer, rows: list[np.ndarray], subject: Subject) -> list[Recovered]:
        config = scorer.model.config
        at = config.num_layers * 4 // 5 if self.layer is None else self.layer
        changes = {"window": self.window, "sink_tokens": self.sinks}
        short = config.overridden({**vars(config), **changes}, changes)
        params = nnx.to_pure_dict(nnx.state(scorer.model, nnx.Param))
        teacher, student = map(inference_model, (scorer.model, with_params(short, params)))
        beyond = range(at + 1, config.num_layers)
        tokens = [jnp.asarray(row) for row in rows]
        lessons = [_lesson(teacher, student, x, at) for x in tokens]
        records = []
        for index, (row, own) in enumerate(zip(tokens, lessons, strict=True)):
            others = [x for number, x in enumerate(lessons) if number != index]
            third, low = len(row) // 3, _loss(teacher, own.last, row)
            top = _loss(student, _through(student, own.after, beyond), row)
            for name, added in self._added(own, others).items():
                with_memory = _loss(student, _through(student, own.after + added, beyond), row)
                start = 2 * third if name == FROZEN else third
                means = [float(x[start:].mean()) for x in (top, with_memory, low)]
                share = (means[0] - means[1]) / (means[0] - means[2])
                records.append(Recovered(index, name, share, means[0] - means[2]))
        return records

    def _added(self, own: "_Lesson", others: "list[_Lesson]") -> dict[str, jax.Array]:
        """What every memory adds to the student's stream after the layer."""
        key = unit(own.z)
        read = functools.partial(_remembered, corrects=True, rate=self.rate)
        gram = sum(x.z.T @ x.z for x in others)
        linear = fitted(gram, sum(x.z.T @ x.stream for x in others), 1.0)
        foreign = read(unit(others[0].z), others[0].stream)[1]
        return {
            STREAM: read(key, own.stream)[0],
            LOCAL: read(key, own.local)[0],
            FROZEN: read(key, own.stream, until=2 * (len(key) // 3))[0],
            MAP: own.z @ linear,
            FOREIGN: key @ foreign,
        }

    @classmethod
    def table(cls, series: Series[Recovered]) -> list[TableRow]:
        """A row per memory: the mean share, the least and the greatest of a document."""
        rows = []
        for label, records in series.items():
            for name in dict.fromkeys(x.memory for x in records):
                found = (x[2:] for x in records if x.memory == name)
                shares, headroom = zip(*found, strict=True)
                rows.append(
                    {"memory": f"{label}, {name}" if len(series) > 1 else name}
                    | {"share": float(np.mean(shares)), "least": min(shares), "most": max(shares)}
                    | {"headroom": float(np.mean(headroom)), "documents": len(shares)}
                )
        return rows

    @classmethod
    def pictures(
        cls, folder: Path, series: Series[Recovered], chance: float | None
    ) -> list[Picture]:
        path = folder / "stream.png"
        bars = {x: [row["share"] for row in cls.table({x: y})] for x, y in series.items()}
        names = [STREAM, LOCAL, FROZEN, MAP, FOREIGN]
        labels = {"title": cls.title, "x_label": cls.x_label, "y_label": "share of the headroom"}
        plot_bars(path, **labels, groups=names, series=bars)
        sentence = "The share of what a shorter window costs that comes back: higher is better."
        return [Picture(Path(path.name), sentence)]


class _Lesson(NamedTuple):
    """Of a document: the student's stream after the layer, its features there, the errors of the
    stream and of the layer's MLP, and the teacher's last stream."""

    after: Float[Array, "1 T D"]
    z: Float[Array, "T F"]
    stream: Float[Array, "T D"]
    local: Float[Array, "T D"]
    last: Float[Array, "1 T D"]


_remembered = jax.jit(remembered, static_argnames=("corrects", "rate", "until"))


def _lesson(
    teacher: InferenceModel, student: InferenceModel, tokens: jax.Array, at: int
) -> _Lesson:
    start = embedded(teacher, tokens[None])
    (after, z, y), (theirs, _, x) = (
        _layer(block_of(model, at), _through(model, start, range(at)))
        for model in (student, teacher)
    )
    last = _through(teacher, theirs, range(at + 1, teacher.config.num_layers))
    return _Lesson(after, z[0], (theirs - after)[0], (x - y)[0], last)


def _through(model: InferenceModel, h: jax.Array, layers: range) -> jax.Array:
    """The stream after these layers."""
    for layer in layers:
        h = _layer(block_of(model, layer), h)[0]
    return h


@nnx.jit
def _layer(block: Any, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(stream after a block, features of its MLP, their output)."""
    if not isinstance(block.mlp, SwiGLU) or block.config.is_in_place:
        raise UserError("task stream is for models without memory whose MLPs are SwiGLU")
    row = Row.of(h)
    x, _ = block.inputs("mlp", h, row)
    return block.forward(h, row)[0], block.mlp.features(x), block.mlp.plain(x)


@jax.jit
def _loss(model: InferenceModel, h: jax.Array, tokens: jax.Array) -> jax.Array:
    """Nats of tokens 1 .. T - 1."""
    hidden = rms_norm(h, model.final_norm[...], model.config.norm_eps)
    return token_scores(hidden[:, :-1], head_weight(model), tokens[None, 1:])[0][0]
