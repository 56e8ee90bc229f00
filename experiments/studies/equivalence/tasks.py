"""The levels at which two variants of a run, which share its parameters, are compared, each an
evaluation of the run."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels import measure
from ttcd_kernels.table import Row

from experiments.studies.kernels import programs
from ttcd_jax import Transformer, TransformerConfig
from ttcd_jax.config import Positive
from ttcd_jax.data.packing import DocumentRows
from ttcd_jax.data.sources import row_length, text_records
from ttcd_jax.errors import DataError, NonFiniteError, UserError
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import stream
from ttcd_jax.inference.state import start_state
from ttcd_jax.measure.pictures import Picture, plot_bars
from ttcd_jax.measure.scorer import Scorer, batches
from ttcd_jax.measure.task import Arrays, Series, Subject, Task, register
from ttcd_jax.memory.prefix import Form
from ttcd_jax.methods.in_place import PrefixSettings
from ttcd_jax.tasks.perplexity import buckets
from ttcd_jax.tokens import check_tokens
from ttcd_jax.train.state import with_params

_AGREEMENT = "equal_share", "within_1_ulp", "within_2_ulp", "max_ulp", "max_relative_error"
KL, VARIATION, FLIPS = "KL (nats)", "total variation", "flips of the likeliest token"
_LOSSES = "loss of the reference", "loss of the candidate", "the candidate's loss less it"
_QUANTILES = {"50%": 0.5, "90%": 0.9, "99%": 0.99, "99.9%": 0.999, "max": 1.0}
_LOGITS = 2**26  # held at once, for each variant

_PIECE_SIZES = {"forward": None, "streamed": 2048, "decoded": 1}  # unless a part states another
_GROUPS = {
    "attention": ("xla", "triton", "mosaic"),
    "form": get_args(Form),
    "compute": ("float32", "bfloat16", "float64"),
    "path": tuple(_PIECE_SIZES),
}


class Variant(NamedTuple):
    """A variant of a run; None: as in the run's configuration. `piece_size`: the tokens of a row
    that are read at once; None: all."""

    attention: Any = None
    form: Form | None = None
    compute: Any = None
    piece_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The variant of parts as in "xla,float32,streamed:512", at most one of each kind. Raises
        `UserError` with the part and the choices."""
        chosen: dict[str, Any] = {}
        for item in text.split(","):
            name, colon, size = item.partition(":")
            group = next((group for group, names in _GROUPS.items() if name in names), None)
            if group is None:
                choices = "; ".join(f"{x}: {', '.join(names)}" for x, names in _GROUPS.items())
                raise UserError(f"{item!r} is not a part of a variant ({choices})")
            if group in chosen:
                raise UserError(f"{chosen[group]!r} and {name!r} are both {group}: name one")
            if colon and not (name == "streamed" and size.isdecimal() and int(size)):
                raise UserError(f"{item!r}: only streamed takes a number of tokens, streamed:512")
            chosen[group] = name
            if group == "path":
                chosen["piece_size"] = int(size) if colon else _PIECE_SIZES[name]
        chosen.pop("path", None)
        return cls(**chosen)

    def __str__(self) -> str:
        path = {None: "forward", 1: "decoded"}.get(self.piece_size, f"streamed:{self.piece_size}")
        return ", ".join(filter(None, (*self[:3], path)))

    def applied(self, config: TransformerConfig) -> TransformerConfig:
        """The model's configuration in this variant. Raises `UserError` for a form that its memory
        does not have, and for float64 when it is off in JAX."""
        memory, precision = config.settings, config.precision
        if self.form is not None:
            if not isinstance(memory, PrefixSettings):
                text = f"method {config.method!r} has no memory with forms"
                raise UserError(f"{text}: leave {self.form!r} out")
            config = config.replace(memory=memory.replace(form=self.form))
        if self.compute == "float64":
            if not jax.config.jax_enable_x64:
                raise UserError("float64 is off in JAX: set JAX_ENABLE_X64=1, or take float32")
            precision = precision.replace(state="float64")
        precision = precision.replace(compute=self.compute or precision.compute)
        attention = self.attention or config.attention_implementation
        return config.replace(attention_implementation=attention, precision=precision)


class Computed:
    """A run in one variant; `model` is the run's."""

    def __init__(self, variant: Variant, model: Transformer) -> None:
        self.variant, self.config = variant, variant.applied(model.config)
        self.model = with_params(self.config, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.dtype = self.config.precision.compute_dtype

    @functools.cached_property
    def unstacked(self) -> InferenceModel:
        """The model with its parameters stored layer by layer."""
        return inference_model(self.model)

    def hidden(self, tokens: Int[np.ndarray, "B T"]) -> Float[Array, "B T D"]:
        """The input of the head, for whole rows of one document each. Raises `NonFiniteError` with
        the first position."""
        if (size := self.variant.piece_size) is None:
            hidden = _forward(*nnx.split(self.model), tokens)
        else:
            state = start_state(self.unstacked, len(tokens), max_length=tokens.shape[1])
            pieces = stream(self.unstacked, state, tokens, piece_size=size)
            hidden = jnp.concatenate([h[:, : counts[0]] for counts, h, _ in pieces], axis=1)
        if len(broken := np.argwhere(~np.asarray(jnp.isfinite(hidden).all(-1)))):
            row, position = broken[0]
            problem = f"row {row}, position {position} is not finite; try a wider precision"
            raise NonFiniteError(f"{self.variant} in {self.dtype}: the hidden state of {problem}")
        return hidden


_jitted = functools.partial(jax.jit, static_argnums=0)
_forward = _jitted(lambda graph, params, tokens: nnx.merge(graph, params).forward(tokens)[0])
_outputs = _jitted(lambda graph, params, h, e: nnx.merge(graph, params)(h, embeddings=e))
type Pair = tuple[Computed, Computed]  # reference, candidate


class Cell(NamedTuple):
    """A record: a number by its row and column in the table, or by its group and bar in the
    picture."""

    row: str
    column: str
    value: float


class Equivalence(Task[Arrays, Cell]):
    """The distance of the variant `candidate` of a run from its variant `reference`.

    A variant names at most one of each: attention (xla, triton, mosaic), the form of the memory's
    read (auto, blocked, associative, attention), precision (float32, bfloat16, float64), and the
    path: forward (whole rows through the training forward pass), streamed[:PIECE] (a prefill in
    pieces), decoded (token by token). The rest is taken from the run's configuration.

    Measured on at most `max_rows` rows of `seq_len` tokens (None: as in training) that one document
    of `text` fills (a text file or a folder of .txt; None: the run's held-out text), drawn at
    random.
    """

    record = Cell
    rank = 60
    shaping = ()  # any variants on the same text
    measures: ClassVar[tuple[str, ...]]  # the columns of the table
    bars: ClassVar[tuple[str, ...]]  # of the picture

    reference: str = "forward"
    candidate: str = "forward"
    text: str | None = None
    seq_len: Positive | None = None
    max_rows: Positive = 64
    batch_size: Positive = 1

    def __str__(self) -> str:
        return f"{Variant.parse(self.candidate)} against {Variant.parse(self.reference)}"

    def validate(self) -> None:
        str(self)

    def rows(self, subject: Subject) -> Arrays:
        """Tokens and targets [rows, T]. Raises `DataError` when no document fills a row."""
        records = text_records(subject.run_dir, subject.data, subject.tokenizer, self.text)
        seq_len = self.seq_len or row_length(subject.data)
        filled = [part for part in records if part.sizes.max(initial=0) > seq_len]
        if not filled:
            longest = max(part.sizes.max(initial=0) for part in records)
            raise DataError(
                f"no document fills a row: the longest has {longest} tokens and a row with "
                f"its last target takes {seq_len + 1}; pass a smaller --seq_len, or --text"
            )
        parts = [DocumentRows(part, seq_len=seq_len, min_tokens=seq_len + 1) for part in filled]
        indices = [(part, i) for part in parts for i in range(len(part))]
        drawn = (indices[i] for i in np.random.default_rng(0).permutation(len(indices)))
        whole = (row for part, i in drawn if (row := part[i])["loss_mask"].all())
        chosen = list(itertools.islice(whole, self.max_rows))
        rows = {name: np.stack([row[name] for row in chosen]) for name in ("tokens", "targets")}
        check_tokens(rows["targets"], subject.model.config.vocab_size)
        return rows

    def facts(self, rows: Arrays) -> dict[str, Any]:
        return {"environment": measure.environment()}

    def series(self, subject: Subject, rows: Arrays) -> Series[Cell]:
        label = f"{subject.name}, {self}"
        return {label: [*self.measure(self.scorer(subject, label, subject.model), rows, subject)]}

    def pair(self, model: Transformer) -> Pair:
        """Raises `UserError` for variants that are the same in this run."""
        texts = self.reference, self.candidate
        first, second = (Computed(Variant.parse(text), model) for text in texts)
        if (first.config, first.variant.piece_size) == (second.config, second.variant.piece_size):
            raise UserError(f"reference and candidate are the same variant, {second.variant}")
        return first, second

    @classmethod
    def columns(cls, series: Series[Cell]) -> dict[str, dict[Any, Any]]:
        """Of one series."""
        records = [x for own in series.values() for x in own]
        return {y: {x.row: x.value for x in records if x.column == y} for y in cls.measures}

    @classmethod
    def table(cls, series: Series[Cell]) -> list[Row]:
        """Those of several series under one another, with their labels."""
        rows = []
        for label, records in series.items():
            start = {"variants": label} if len(series) > 1 else {}
            rows += [{**start, **row} for row in super().table({label: records})]
        return rows

    @classmethod
    def pictures(cls, folder: Path, series: Series[Cell], chance: float | None) -> list[Picture]:
        found: dict[str, dict[str, float]] = {}
        for (label, records), bar in itertools.product(series.items(), cls.bars):
            name = f"{label}, {bar}" if len(series) > 1 else bar
            found[name] = {x.row: x.value for x in records if x.column == bar}
        path, texts = folder / f"{cls.name}.svg", {"title": cls.title, "x_label": cls.x_label}
        plot_bars(path, **texts, y_label=cls.value, series=found, chance=chance)
        return [Picture(Path(path.name), f"{cls.title}, by {cls.x_label}: {'; '.join(series)}.")]


def agreement(row: str, candidate: jax.Array, reference: jax.Array) -> Iterator[Cell]:
    """Shares of elements that are equal, within one and within two units in the last place, and the
    largest distance in such units, all in the narrower of the two dtypes; the largest difference
    over the largest magnitude."""
    pair = np.asarray(candidate), np.asarray(reference)
    ulps = programs.ulps(*sorted(pair, key=lambda x: x.dtype.itemsize))
    shares = (float((ulps <= most).mean()) for most in range(3))
    values = *shares, int(ulps.max()), programs.relative_error(*pair)
    yield from map(Cell, [row] * 5, _AGREEMENT, values)


@register
class Kernel(Equivalence):
    """Outputs of each block on the reference's input to it, in units in the last place, on the
    first batch of rows."""

    name = "equivalence_kernel"
    title = "Units in the last place"
    key = x_label = "outputs of"
    value = "share of elements"
    measures, bars = _AGREEMENT, _AGREEMENT[:3]

    def measure(self, scorer: Scorer, rows: Arrays, subject: Subject) -> list[Cell]:
        return [*layers(self.pair(scorer.model), rows["tokens"][: self.batch_size])]


def layers(pair: Pair, tokens: Int[np.ndarray, "B T"]) -> Iterator[Cell]:
    """The agreement of every layer and of the whole model on rows; if either variant reads pieces,
    of the hidden states before the head alone."""
    (reference, candidate), models = pair, [x.unstacked for x in pair]
    h = embeddings = models[0].embedding[...].astype(reference.dtype)[tokens]
    is_whole = reference.variant.piece_size is candidate.variant.piece_size is None
    for layer in range(reference.config.num_layers if is_whole else 0):
        ours, theirs = ((x.blocks[layer], x.layers[layer]) for x in models)
        inputs = h.astype(candidate.dtype), embeddings.astype(candidate.dtype)
        h, other = _outputs(*ours, h, embeddings), _outputs(*theirs, *inputs)
        yield from agreement(f"layer {layer}", other, h)
    yield from agreement("whole model", candidate.hidden(tokens), reference.hidden(tokens))


class Distances(NamedTuple):
    """Arrays [rows, T], of the predictions p (reference) and q (candidate) of the next token: KL(p
    || q) in nats, total variation |p - q| / 2, whether the likeliest token differs, and the loss of
    the target under each."""

    kl: Any
    tv: Any
    is_flip: Any
    reference_nll: Any
    candidate_nll: Any


@jax.jit
def distances(
    hidden: Sequence[Float[Array, "B T D"]],
    heads: Sequence[Float[Array, "V D"]],
    targets: Int[Array, "B T"],
) -> Distances:
    """The distances of two predictions of the same tokens, the reference's first.

    Log-softmax in float32 or better, in blocks of positions: never all logits at once.
    KL is summed as p (q/p - 1 - log(q/p)): no term is negative, and the rounding of a whole row's
    log-sum-exp, about 1e-6 nats, cancels.
    """

    def logs(hidden: jax.Array, head: jax.Array) -> jax.Array:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        head = head.astype(hidden.dtype)
        return jax.nn.log_softmax(jnp.matmul(head, hidden, preferred_element_type=wide))

    def of_position(operands: tuple[jax.Array, ...]) -> Distances:
        *pair, target = operands
        log_p, log_q = map(logs, pair, heads)
        p, q, ratio = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
        near = p * (jnp.expm1(ratio) - ratio)
        terms = jnp.where(jnp.abs(ratio) < 1, near, q - p - p * ratio)
        is_flip = log_p.argmax() != log_q.argmax()
        tv = jnp.abs(p - q).sum() / 2
        return Distances(terms.sum(), tv, is_flip, -log_p[target], -log_q[target])

    flat = tuple(x.reshape(targets.size, *x.shape[2:]) for x in (*hidden, targets))
    block = max(1, min(targets.size, _LOGITS // len(heads[0])))
    result = jax.lax.map(of_position, flat, batch_size=block)
    return jax.tree.map(lambda x: x.reshape(targets.shape), result)


@register
class Distribution(Equivalence):
    """KL(reference || candidate), total variation, flips (changes of the likeliest token) and
    losses of the next token on held-out text."""

    name = "equivalence_distribution"
    title = "Next tokens"
    key = "distance"
    x_label = "position (tokens)"
    value = "mean"
    measures, bars = ("mean", *_QUANTILES), (VARIATION, FLIPS)

    def measure(self, scorer: Scorer, rows: Arrays, subject: Subject) -> list[Cell]:
        return [*summarize(predictions(self.pair(scorer.model), rows, self.batch_size))]


def predictions(pair: Pair, rows: Arrays, batch_size: int) -> Distances:
    """The distances [rows, T] of the predictions of the rows' targets."""
    heads, parts, count = [x.model.head_weight() for x in pair], [], len(rows["tokens"])
    for index in batches(count, batch_size):
        hidden = [x.hidden(rows["tokens"][index]) for x in pair]
        found = distances(hidden, heads, rows["targets"][index])
        parts.append([np.asarray(x) for x in found])
    return Distances(*(np.concatenate(x)[:count] for x in zip(*parts, strict=True)))


def summarize(found: Distances) -> Iterator[Cell]:
    """Means and quantiles over all positions, and means by position."""
    arrays = *found, found.candidate_nll - found.reference_nll
    for name, array in zip((KL, VARIATION, FLIPS, *_LOSSES), arrays, strict=True):
        values = array.astype(np.float64)
        yield Cell(name, "mean", float(values.mean()))
        for column, share in _QUANTILES.items():
            yield Cell(name, column, float(np.quantile(values, share)))
        for positions, start, stop in buckets(array.shape[1]):
            yield Cell(positions, name, float(values[:, start:stop].mean()))
