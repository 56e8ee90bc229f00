"""The residual stream: sub-layers, and the pre-norm block made of them."""

import abc
import itertools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.config import Config, NonNegativeFloat, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.row import Hidden, Piece, Row, Streams, check_array
from ttcd_jax.precision import Precision

# One residual stream [B, T, D], or a teacher's and a student's side by side [B, T, 2 D].
Joined = Float[Array, "B T _"]
# Reference name -> (our name, how the array is laid out there).
Names = dict[str, tuple[str, str]]


class Dims(Config):
    """The sizes and dtypes that all layers of a model share: `dim`, the width of the residual
    stream; `norm_eps`, added to mean squares; `init_std` of drawn weights; `precision`."""

    dim: Positive
    norm_eps: NonNegativeFloat = 1e-6
    init_std: NonNegativeFloat = 0.02
    precision: Precision = Precision()


class SublayerConfig(Config, abc.ABC):
    """The configuration of a layer on the residual stream, with its cost and reference names."""

    layer: ClassVar[type["Sublayer"]]  # set where the layer's class is defined
    # Names of the parameters in the reference implementation's checkpoints.
    reference_names: ClassVar[Names] = {}
    # Whether the layer is a plain one plus a memory that rows can bypass.
    is_in_place: ClassVar[bool] = False
    # Whether the memory distills a teacher's features into a student's.
    has_teacher: ClassVar[Any] = False
    # Residual streams that come in; a teacher's and a student's are side by side.
    num_streams: ClassVar[Any] = 1
    # Tokens per chunk of the layer's memory; None where nothing is written chunk by chunk.
    chunk_size: ClassVar[Any] = None
    # The parameter in which all writes of the layer's memory are linear, if there is one.
    write_param: ClassVar[Any] = None

    @property
    def dims(self) -> Dims:
        """The sizes that the layer shares with its neighbors: its own, or those of its part."""
        return next(x for x in (self, *vars(self).values()) if isinstance(x, Dims))

    def build(self, *, rngs: nnx.Rngs) -> "Sublayer":
        return self.layer(self, rngs=rngs)

    @abc.abstractmethod
    def flops(self, length: int) -> int | float:
        """Floating-point operations of a forward pass over a row of `length` tokens: 2 m k n per
        product of [m, k] and [k, n]; everything else is left out, and so are products with a
        column or two per head (rates, gates)."""


class MemoryStats(NamedTuple):
    """Scalars of one layer with an in-place memory, without gradient."""

    # |eta * sum of delta_w|_F / |W_base|_F at the end of the row, batch mean
    memory_ratio: Float[Array, "..."]
    # mean of beta over tokens; 1 without a token rate
    gate_mean: Float[Array, "..."]
    # |e - e'|^2 / |e|^2 of the errors e that a row's last chunk writes, with e' those of a student
    # that sees what the teacher sees; None without a teacher, 0 where nothing is written
    window_share: Float[Array, "..."] | None = None


class Configured(nnx.Module):
    """A module that is built from a `config_class`: `Module(config, rngs=nnx.Rngs(0))`."""

    config_class: ClassVar[type[Config]] = Config

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        """Raises `UserError` for another configuration, and for rngs that are not `nnx.Rngs`."""
        config, rngs = args[0] if args else keywords.get("config"), keywords.get("rngs")
        if not isinstance(config, cls.config_class):
            got, wanted = type(config).__name__, cls.config_class.__name__
            raise UserError(f"{cls.__name__} is built from a {wanted}, not from a {got}")
        if not isinstance(rngs, nnx.Rngs):
            raise UserError(f"{cls.__name__} needs rngs=nnx.Rngs(seed), got {rngs!r}")
        return super().__new__(cls)


def check_hidden(name: str, x: jax.Array, dim: int) -> None:
    """Raises `UserError` unless x is [B, T, dim] of a floating dtype, with a token."""
    check_array("the layer", name, x, "float", "B", "T", dim)
    if not x.size:
        raise UserError(f"{name} is empty, {list(x.shape)}: a layer alone needs a token")


class Views(NamedTuple):
    """One layer's output under two windows: the teacher's joins the residual stream, the student's
    its own, which is an extra input of the next layer. After a block with two streams both go on;
    without an output for the teacher's, the student's goes on alone."""

    teacher: Hidden | None
    student: Hidden


type Output = Hidden | Views
type Report = tuple[Any, ...] | None  # arrays: `MemoryStats`, or what a row `measures`
type LayerState = tuple[Any, ...] | None  # a NamedTuple of arrays, the batch axis first


class Sublayer(Configured):
    """Normed hidden states [B, T, D] -> the addition to the residual stream. `student`: the
    student's normed hidden states, after a layer that returned `Views`. A subclass names its
    configuration: `class Attention(Mixer, config=AttentionConfig)`."""

    def __init_subclass__(cls, config: type[SublayerConfig] | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if config is not None:
            config.layer, cls.config_class = cls, config

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Output, Report]:
        """(output, the report of the layer's memory)."""
        raise AssertionError(f"{type(self).__name__} defines its own forward")

    def start(self, batch_size: int, max_length: int | None) -> LayerState:
        """The state before rows begin; `max_length` bounds those of full attention."""
        return None

    def extend(
        self, x: Hidden, piece: Piece, state: LayerState, student: Hidden | None = None
    ) -> tuple[Output, LayerState]:
        """`forward` for a piece of rows: (output, the state after the piece). Over consecutive
        pieces the outputs are those of `forward`, without gradient."""
        raise AssertionError(f"{type(self).__name__} defines its own extend")

    def frozen(self, state: Any) -> LayerState:
        """The state in the model that writes no memory (`Settings.frozen`)."""
        return state


class Mixer(Sublayer):
    """A sub-layer that mixes the tokens of a row."""

    config: Any  # with `dims`

    def __call__(
        self,
        h: Hidden,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Output:
        """The output; under two windows (teacher, student)."""
        check_hidden("h", h, self.config.dims.dim)
        return self.forward(h, Row.of(h, positions, segment_ids))[0]


class BlockConfig(Config):
    """The sub-layers of a block, `mixer` (of tokens) and `mlp`, run in the order of `order`.
    `stops_teacher`: no gradient flows through the stream of a teacher."""

    # Name in our tree -> prefix and norm in the reference's.
    order: ClassVar[dict[str, tuple[str, str]]] = {
        "mixer": ("attn.", "attn_norm.weight"),
        "mlp": ("mlp.", "mlp_norm.weight"),
    }
    mixer: SublayerConfig
    mlp: SublayerConfig
    stops_teacher: bool = False

    def validate(self) -> None:
        dims = {name: layer.dims.dim for name, layer in self.sublayers.items()}
        if len({*dims.values()}) > 1:
            found = " and ".join(f"{name} dim {dim}" for name, dim in dims.items())
            raise UserError(f"a block has one stream, and its parts have {found}: give them one")

    @property
    def sublayers(self) -> dict[str, SublayerConfig]:
        return {name: getattr(self, name) for name in self.order}

    def flops(self, length: int) -> int | float:
        return sum(layer.flops(length) for layer in self.sublayers.values())

    @property
    def chunk_size(self) -> int | None:
        return next((x.chunk_size for x in self.sublayers.values() if x.chunk_size), None)

    @property
    def write_param(self) -> str | None:
        found = ((name, layer.write_param) for name, layer in self.sublayers.items())
        return next((f"{name}/{param}" for name, param in found if param), None)

    @property
    def is_in_place(self) -> bool:
        return any(layer.is_in_place for layer in self.sublayers.values())

    @property
    def has_teacher(self) -> bool:
        return any(layer.has_teacher for layer in self.sublayers.values())

    @property
    def reference_names(self) -> Names:
        names: Names = {}
        for ours, (prefix, norm) in self.order.items():
            names[norm] = (f"{ours}_norm", "same")
            for theirs, (name, layout) in getattr(self, ours).reference_names.items():
                names[prefix + theirs] = (f"{ours}/{name}", layout)
        return names


class Block(Configured):
    """h -> h + layer(norm(h)), sub-layer after sub-layer. After a sub-layer that returns `Views`, h
    + teacher continues, and the next sub-layer also gets norm(h + student), same norm."""

    config_class = BlockConfig
    mixer: Mixer
    mlp: Sublayer
    mixer_norm: nnx.Param
    mlp_norm: nnx.Param

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        for name, layer in config.sublayers.items():
            ones = jnp.ones((layer.dims.dim,), layer.dims.precision.param_dtype)
            setattr(self, f"{name}_norm", param(ones, ("embed",)))
            setattr(self, name, layer.build(rngs=rngs))

    def __call__(
        self,
        h: Joined,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        embeddings: Float[Array, "..."] | None = None,
    ) -> Joined:
        """The block's output. `embeddings`: the targets of an IP-TTT memory that stores them."""
        width = self.config.mixer.num_streams * self.config.mixer.dims.dim
        check_array("the layer", "h", h, "float", "B", "T", width)
        if embeddings is not None:
            shape = (*h.shape[:2], self.config.mixer.dims.dim)
            check_array("the layer", "embeddings", embeddings, "float", *shape)
        return self.forward(h, Row.of(h, positions, segment_ids, embeddings))[0]

    def forward(self, h: Joined, row: Row) -> tuple[Joined, Report]:
        """(output, the report of the block's memory over the row; None without one)."""
        stats, streams = None, self._streams(h)
        if not h.size:
            return h, None
        for name in self.config.order:
            streams, layer_stats = self.step(name, streams, row)
            stats = stats if layer_stats is None else layer_stats
        return _joined(streams, self.config.stops_teacher), stats

    def step(self, name: str, streams: Streams, row: Row) -> tuple[Streams, Report]:
        """(the residual streams after sub-layer `name`, the report of its memory)."""
        x, t = self._normed(name, *streams)
        y, report = getattr(self, name).forward(x, row._replace(streams=streams), t)
        return _added(*streams, y), report

    def inputs(self, name: str, h: Joined, row: Row) -> tuple[Hidden, Hidden | None]:
        streams = self._streams(h)
        for before in itertools.takewhile(lambda other: other != name, self.config.order):
            streams, _ = self.step(before, streams, row)
        return self._normed(name, *streams)

    def start(self, batch_size: int, max_length: int | None) -> dict[str, LayerState]:
        order = self.config.order
        return {name: getattr(self, name).start(batch_size, max_length) for name in order}

    def extend(
        self, h: Joined, piece: Piece, state: dict[str, LayerState]
    ) -> tuple[Joined, dict[str, LayerState]]:
        """`forward` for a piece of rows: (output, the states after it). Raises `UserError` for
        another number of rows than the states have, and for a piece made of another h."""
        check_hidden("h", h, self.config.mixer.num_streams * self.config.mixer.dims.dim)
        rows = {len(x) for x in jax.tree.leaves(state)}
        if rows - {len(h)}:
            raise UserError(f"h has {len(h)} rows, and the state is one of {rows.pop()} rows")
        made_of = len(piece.lengths), piece.cut.length or h.shape[1]
        if made_of != h.shape[:2]:
            raise UserError(
                f"h has {h.shape[0]} rows of {h.shape[1]} tokens, and the piece was made of "
                f"{made_of[0]} of {made_of[1]}: make one of this h (Piece.of)"
            )
        after, streams = {}, self._streams(h)
        for name in self.config.order:
            x, t = self._normed(name, *streams)
            now = piece._replace(streams=streams)
            y, after[name] = getattr(self, name).extend(x, now, state[name], t)
            streams = _added(*streams, y)
        return _joined(streams), after

    def _streams(self, h: jax.Array) -> Streams:
        dim = self.config.mixer.dims.dim
        return (h, None) if h.shape[-1] == dim else (h[..., :dim], h[..., dim:])

    def _normed(
        self, name: str, h: jax.Array, student: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        weight, eps = getattr(self, f"{name}_norm")[...], getattr(self.config, name).dims.norm_eps
        return rms_norm(h, weight, eps), None if student is None else rms_norm(student, weight, eps)


def _added(h: jax.Array, student: jax.Array | None, y: Output) -> Streams:
    """The streams after a sub-layer; the student's is new where the first `Views` come."""
    if not isinstance(y, Views):
        return h + y, None
    student = (h if student is None else student) + y.student
    return (student, None) if y.teacher is None else (h + y.teacher, student)


def _joined(streams: Streams, stops_teacher: bool = False) -> jax.Array:
    h, student = streams
    if student is None:
        return h
    return jnp.concatenate([jax.lax.stop_gradient(h) if stops_teacher else h, student], axis=-1)
