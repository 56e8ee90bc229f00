"""What a window takes from a model, and what a memory can give back; no training is needed.

Task *gap*, of a layer of attention and SwiGLU, whose student has another window in this layer
alone, with the features z of the MLP under the layer's own window and under the student's:

    e = (z_T - z_S) W_down

The share of |e|^2 that a prediction p explains is 1 - |e - p|^2 / |e|^2, over the second half of
every document. Predictions: the mean of the other documents; a regression on z_S, fitted on them,
with the best ridge in hindsight; memories of this document, which read with a lag of a chunk: the
sum of outer products with the best rate in hindsight, and the delta rule; the delta rule on what
the regression leaves. What the last explains beyond the regression, only this document's context
can.

Task *stream*: the student is the whole model under a window. After one late layer the residual
streams of teacher and student differ by d. The student stores d, token by token, under the features
z of its MLP by the delta rule, and what it reads is added to its stream:

    S <- S + rate k (d - k S),   k = z / |z|,   k read before it is written

The *headroom* is the student's loss less the teacher's: all that a memory can give back. Beside the
share of it that comes back stand controls: the error of the layer's own MLP, as IP-TTCD writes it;
a linear map of z in the memory's place, fitted on other documents; another document's memory; and
the memory of the first two thirds, frozen, in the last third alone.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from ttcd_kernels.table import Row as TableRow

from ttcd_jax.config import DISTINCT, AtLeast, Bound, NonNegative, Positive
from ttcd_jax.data.sources import text_records
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.inference.decode import embedded, nats
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.measure.pictures import Picture, plot_bars
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Differences, Series, Subject, Task, digest, register
from ttcd_jax.models.config import block_configs
from ttcd_jax.nn.attention import Attention
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.mlp import SwiGLU
from ttcd_jax.nn.row import Row
from ttcd_jax.nn.windows import attend
from ttcd_jax.train.state import with_params

CHUNK, RATE = 64, 0.5  # the lag of a memory's read; the rate of the delta rule
RIDGES = (0.01, 0.1, 1.0, 10.0)  # times the mean eigenvalue
STREAM, LOCAL, FROZEN = "the stream's error", "the layer's own error", "frozen after two thirds"
MAP, FOREIGN = "linear map of others", "another document's memory"
Features = Float[Array, "T F"]
Matrix = Float[Array, "T D"]
_Views = tuple[Features, Matrix, Matrix]


class LayerGap(NamedTuple):
    """Means over documents: |e| / |y_T|, and the shares of |e|^2 explained."""

    layer: int
    window: int  # the student's
    size: float
    mean: float
    regression: float
    sum: float
    delta_rule: float
    both: float
    context: float  # both less regression


class WindowTask[Record: tuple[Any, ...]](Task[list[np.ndarray], Record]):
    """A student sees a window and `sinks` first tokens. It reads `length` tokens, from token
    `start` on, of the first `max_documents` documents of `text` (a file or folder; None: the run's
    held-out text) that have them; of two or more, since others explain one."""

    has_variants = False

    sinks: NonNegative = 4
    start: NonNegative = 0
    length: Positive = 2048
    max_documents: Annotated[int, AtLeast(2)] = 3
    text: str | None = None

    def documents(self, subject: Subject, *windows: int) -> list[np.ndarray]:
        """The rows. Raises `UserError` for students' windows that show all that the model sees."""
        seen = min(subject.model.config.window or self.length, self.length)
        for window in windows:
            if window >= seen or window + self.sinks >= self.length:
                raise UserError(
                    f"window {window} with {self.sinks} sinks loses nothing of the {seen} tokens "
                    "that the model sees: take a smaller window, or a greater --length"
                )
        found: list[np.ndarray] = []
        stop = self.start + self.length
        for part in text_records(subject.run_dir, subject.data, subject.tokenizer, self.text):
            for document, size in enumerate(part.sizes.tolist()):
                if size >= stop and len(found) < self.max_documents:
                    found.append(np.asarray(part.read(document, self.start, stop), np.int32))
        if len(found) < 2:
            raise DataError(
                f"{len(found)} documents have {stop} tokens, and others explain one: give two or "
                "more, or a smaller --start or --length"
            )
        return found

    def measured_on(self, rows: list[np.ndarray], subject: Subject) -> dict[str, str]:
        return {"": digest([row.tolist() for row in rows])}


@register
class Gap(WindowTask[LayerGap]):
    """What students of the `windows` miss in every one of `layers` (none given: all)."""

    name = "gap"
    title = "What a student's window misses, and who can explain it"
    record = LayerGap
    key = "layer"
    x_label = "layer"
    value = "context"
    y_label = "context's share"
    sentence = (
        "The share of what the student misses that only this document's context explains: beyond a "
        "linear map of its features, fitted on other documents."
    )
    rank = 45

    windows: Annotated[tuple[Positive, ...], DISTINCT] = (16, 128)
    layers: tuple[NonNegative, ...] = ()

    def rows(self, subject: Subject) -> list[np.ndarray]:
        count = subject.model.config.num_layers
        if any(layer >= count for layer in self.layers):
            raise UserError(f"layers {self.layers} of a model of {count}: they count from 0")
        if any(x.mixer.num_streams > 1 for x in block_configs(subject.model.config)):
            method = subject.model.config.method
            raise UserError(f"task gap is for models of one stream, and {method!r} has two")
        return self.documents(subject, *self.windows)

    def measure(
        self, scorer: Scorer, rows: list[np.ndarray], subject: Subject
    ) -> Iterator[LayerGap]:
        model = scorer.inference
        streams = embeddings = [embedded(model, jnp.asarray(row)[None]) for row in rows]
        for layer, block in enumerate(model.modules):
            if not self.layers or layer in self.layers:
                for window in self.windows:
                    found = [_views(block, h, window, self.sinks) for h in streams]
                    yield LayerGap(layer, window, *_explained(found))
            streams = [*map(functools.partial(_after, block), streams, embeddings)]

    @classmethod
    def table(cls, series: Series[LayerGap]) -> list[TableRow]:
        """A row per layer and window."""
        return [
            x._asdict() | ({"layer": f"{label}, {x.layer}"} if len(series) > 1 else {})
            for label, records in series.items()
            for x in records
        ]

    @classmethod
    def columns(cls, series: Series[LayerGap]) -> dict[str, dict[Any, Any]]:
        """By layer, of every window."""
        found: dict[str, dict[Any, Any]] = {}
        for label, x in ((label, x) for label, records in series.items() for x in records):
            name = ", ".join(filter(None, (label, f"student's window {x.window}")))
            found.setdefault(name, {})[str(x.layer)] = x.context
        return found

    @classmethod
    def curves(cls, series: Series[LayerGap]) -> dict[str, tuple[list[Any], list[Any]]]:
        return {name: ([*x], [*x.values()]) for name, x in cls.columns(series).items()}


@nnx.jit
def _after(block: Any, h: jax.Array, embeddings: jax.Array) -> jax.Array:
    return block.forward(h, Row.of(h, embeddings=embeddings))[0]


@functools.partial(nnx.jit, static_argnums=(2, 3))
def _views(block: Any, h: jax.Array, window: int, sinks: int) -> _Views:
    """(the student's features, e, the teacher's output)."""
    attention, mlp = block.mixer, block.mlp
    if not (isinstance(attention, Attention) and isinstance(mlp, SwiGLU)):
        raise UserError(
            f"a layer of {type(attention).__name__} and {type(mlp).__name__} has no student: task "
            "gap is for attention and SwiGLU"
        )
    row = Row.of(h)
    (mixed, _), (teacher, _) = (block.inputs(name, h, row) for name in ("mixer", "mlp"))
    qkv, own = attention.project(mixed, row.positions, row.offsets)
    beside = own._replace(count=max(sinks, own.count), offsets=row.offsets)
    (out,) = attend(*qkv, None, (window,), attention.config.attention_implementation, beside)
    seen, eps = h + attention.project_out(out), block.config.mlp.dims.norm_eps
    student, y = rms_norm(seen, block.mlp_norm[...], eps), mlp.plain(teacher)
    return mlp.features(student)[0], (y - mlp.plain(student))[0], y[0]


def _explained(documents: list[_Views]) -> tuple[float, ...]:
    """The fields of `LayerGap` after the first two."""
    wide = _wide(documents)
    grams, found = [_gram(z, e) for z, e, _ in wide], []
    for index, (z, e, y) in enumerate(wide):
        gram, target = map(sum, zip(*grams[:index], *grams[index + 1 :], strict=True))
        maps = [_fitted(gram, target, ridge) for ridge in RIDGES]
        regression = max(maps, key=lambda x, z=z, e=e: _share(e, z @ x))
        mean = jnp.concatenate([x for _, x, _ in wide[:index] + wide[index + 1 :]]).mean(0)
        size = jnp.linalg.norm(e) / jnp.linalg.norm(y)
        found.append([float(x) for x in (size, *_shares(z, e, regression, mean))])
    means = np.mean(found, 0).tolist()
    return *means, means[-1] - means[2]


def _wide[Tree](tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


@jax.jit
def _gram(z: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.matmul(z.T, z, precision="highest"), jnp.matmul(z.T, e, precision="highest")


@jax.jit
def _fitted(gram: jax.Array, target: jax.Array, ridge: float) -> jax.Array:
    """The map [F, D] of a ridge regression."""
    weight = ridge * jnp.trace(gram) / len(gram) * jnp.eye(len(gram), dtype=gram.dtype)
    return jax.scipy.linalg.solve(gram + weight, target, assume_a="pos")


@jax.jit
def _share(e: jax.Array, prediction: jax.Array) -> jax.Array:
    half = len(e) // 2
    return 1 - jnp.sum((e - prediction)[half:] ** 2) / jnp.sum(e[half:] ** 2)


@jax.jit
def _shares(z: jax.Array, e: jax.Array, regression: jax.Array, mean: jax.Array) -> list[jax.Array]:
    half, linear = len(e) // 2, z @ regression
    total = _remembered(z, e, corrects=False)[0]
    best = jnp.sum(total[half:] * e[half:]) / jnp.maximum(jnp.sum(total[half:] ** 2), 1e-30)
    delta = _remembered(z, e, corrects=True)[0]
    both = linear + _remembered(z, e - linear, corrects=True)[0]
    return [_share(e, x) for x in (mean, linear, best * total, delta, both)]


@functools.partial(jax.jit, static_argnames=("corrects", "rate", "until", "lags"))
def _remembered(
    z: Features,
    error: Matrix,
    *,
    corrects: bool,
    rate: float = RATE,
    until: int | None = None,
    lags: bool = True,
) -> tuple[Matrix, Float[Array, "F D"]]:
    """(what a memory of the tokens before, with `lags` of the chunks before, returns for every z;
    the memory at the end). It begins empty and is written by the first `until` tokens (None: all),
    by the delta rule if it `corrects`."""
    key, length = _unit(z), len(z)
    is_written = jnp.arange(length) < (length if until is None else until)
    parts = (key, error.astype(key.dtype), is_written)
    parts = [jnp.pad(x, ((0, -length % CHUNK),) + ((0, 0),) * (x.ndim - 1)) for x in parts]
    parts = [x.reshape(-1, CHUNK, *x.shape[1:]) for x in parts]

    def token(memory: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
        k, e, writes = operands
        answer = k @ memory
        left = rate * (e - answer) if corrects else e
        return memory + jnp.outer(k, jnp.where(writes, left, 0)), answer

    def chunk(memory: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
        end, answers = jax.lax.scan(token, memory, operands)
        return end, operands[0] @ memory if lags else answers

    empty = jnp.zeros((key.shape[1], error.shape[1]), key.dtype)
    memory, read = jax.lax.scan(chunk, empty, tuple(parts))
    return read.reshape(-1, error.shape[1])[:length], memory


def _unit(z: Features) -> Features:
    return z / jnp.maximum(jnp.linalg.norm(z, axis=-1, keepdims=True), 1e-12)


class Share(NamedTuple):
    """The share of the headroom (nats) of a document that comes back."""

    document: int
    memory: str
    share: float
    headroom: float


@register
class Stream(WindowTask[Share]):
    """The share of the headroom that a memory gives back, and its controls: between the model under
    `window` and under its own. The memory is in `layer` (None: at four fifths of the layers) and
    has this `rate`. Measured over the last two thirds of the tokens."""

    name = "stream"
    title = "Distilling the stream without training: the share of the headroom"
    record = Share
    key = "memory"
    x_label = "memory"
    value = "share"
    y_label = "share of the headroom"
    sentence = "The share of what a shorter window costs that comes back: higher is better."
    rank = 46

    window: Positive = 128
    layer: NonNegative | None = None
    rate: Annotated[float, Bound("above 0, at most 1", lambda rate: 0 < rate <= 1)] = 0.3
    length: Annotated[int, AtLeast(4)] = 3072

    def rows(self, subject: Subject) -> list[np.ndarray]:
        config = subject.model.config
        if (self.layer or 0) >= config.num_layers:
            raise UserError(f"layer {self.layer} of a model of {config.num_layers}: from 0 on")
        return self.documents(subject, self.window)

    def measure(self, scorer: Scorer, rows: list[np.ndarray], subject: Subject) -> Iterator[Share]:
        config = scorer.model.config
        at = config.num_layers * 4 // 5 if self.layer is None else self.layer
        changes = {"window": self.window, "sink_tokens": self.sinks}
        short = config.overridden({**vars(config), **changes}, changes)
        params = nnx.to_pure_dict(nnx.state(scorer.model, nnx.Param))
        teacher, student = scorer.inference, inference_model(with_params(short, params))
        tokens = [jnp.asarray(row) for row in rows]
        lessons = [_lesson(teacher, student, x, at + 1) for x in tokens]
        for index, (row, own) in enumerate(zip(tokens, lessons, strict=True)):
            top, low = (_losses(*x, at + 1, row) for x in ((student, own.h), (teacher, own.theirs)))
            for name, added in self._added(own, lessons[:index] + lessons[index + 1 :]).items():
                found = _losses(student, own.h + added.astype(own.h.dtype), at + 1, row)
                start = len(row) // 3 * (2 if name == FROZEN else 1)
                above, between, below = (float(x[start:].mean()) for x in (top, found, low))
                if not (headroom := above - below):
                    raise UserError(f"window {self.window} loses nothing: no layer has attention")
                yield Share(index, name, (above - between) / headroom, headroom)

    def _added(self, own: "_Lesson", others: "list[_Lesson]") -> dict[str, jax.Array]:
        """What every memory adds to the student's stream after the layer."""
        read = functools.partial(_remembered, corrects=True, rate=self.rate, lags=False)
        grams = (_gram(x.z, x.stream) for x in others)
        linear = _fitted(*map(sum, zip(*grams, strict=True)), 1.0)
        foreign = read(others[0].z, others[0].stream)[1]
        return {
            STREAM: read(own.z, own.stream)[0],
            LOCAL: read(own.z, own.local)[0],
            FROZEN: read(own.z, own.stream, until=2 * (len(own.z) // 3))[0],
            MAP: own.z @ linear,
            FOREIGN: _unit(own.z) @ foreign,
        }

    @classmethod
    def columns(cls, series: Series[Share]) -> dict[str, dict[Any, Any]]:
        """By memory the mean share, the least and the greatest of a document."""
        found = {x: {} for x in ("share", "least", "most", "headroom", "documents")}
        for label, records in series.items():
            for name in dict.fromkeys(x.memory for x in records):
                own = (x[2:] for x in records if x.memory == name)
                shares, rooms = zip(*own, strict=True)
                values = float(np.mean(shares)), min(shares), max(shares), float(np.mean(rooms))
                row = f"{label}, {name}" if len(series) > 1 else name
                for column, value in zip(found.values(), (*values, len(shares)), strict=True):
                    column[row] = value
        return found

    @classmethod
    def differences(
        cls, seeds: Sequence[Sequence[Share]], base: Sequence[Sequence[Share]]
    ) -> Differences:
        """Of the memory's share, not of its controls'."""
        return {STREAM: super().differences(seeds, base)[f"share/{STREAM}"]}

    @classmethod
    def pictures(cls, folder: Path, series: Series[Share], chance: float | None) -> list[Picture]:
        bars = {x: cls.columns({x: y})["share"] for x, y in series.items()}
        labels = {"title": cls.title, "x_label": cls.x_label, "y_label": cls.y_label}
        plot_bars(folder / (path := Path("stream.svg")), series=bars, **labels)
        return [Picture(path, cls.sentence)]


class _Lesson(NamedTuple):
    """Of a document: the student's stream and the teacher's after the layer, the student's features
    there, the errors of the stream and of the layer's MLP."""

    h: Float[Array, "1 T D"]
    theirs: Float[Array, "1 T D"]
    z: Features
    stream: Matrix
    local: Matrix


def _lesson(teacher: InferenceModel, student: InferenceModel, row: jax.Array, stop: int) -> _Lesson:
    start = embedded(teacher, row[None])
    (h, z, y), (theirs, _, x) = (_through(x, start, 0, stop) for x in (student, teacher))
    return _Lesson(h, theirs, *_wide((z[0], (theirs - h)[0], (x - y)[0])))


def _through(
    model: InferenceModel, h: jax.Array, first: int, stop: int | None = None
) -> tuple[jax.Array, Any, Any]:
    """After these layers: the stream, and of the last the features of its MLP and their output."""
    found = h, None, None
    for block in model.modules[first:stop]:
        found = _layer(block, found[0])
    return found


@nnx.jit
def _layer(block: Any, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not isinstance(block.mlp, SwiGLU) or block.config.is_in_place:
        raise UserError("task stream is for models without memory whose MLPs are SwiGLU")
    row = Row.of(h)
    x, _ = block.inputs("mlp", h, row)
    return block.forward(h, row)[0], block.mlp.features(x), block.mlp.plain(x)


def _losses(model: InferenceModel, h: jax.Array, first: int, tokens: jax.Array) -> jax.Array:
    """Nats of tokens 1 .. T - 1, from the stream before layer `first`."""
    h, *_ = _through(model, h, first)
    return nats(model, h[:, :-1], tokens[None, 1:])[0]
