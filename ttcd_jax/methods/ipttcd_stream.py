"""The residual stream under a wide window, distilled into a memory of the one under a short window.

Two streams with the same weights read the row, the teacher's h_T under `window` and the student's
h_S under `student_window`, in every layer up to the one with the memory, where

    d = h_T - h_S after the layer,   k = z / |z|,   z the features of the student's MLP
    S <- S + k^T beta (d - k S),     h_S <- h_S + eta k S

by the delta rule, token by token: a token reads what all before it wrote. The student's stream goes
on alone: the teacher's never reads a memory, so no write depends on a read. With several memories
it goes on to the last, and each corrects what is left after those before it. Equal windows write
zero; a memory that is not read, or not written, leaves the windowed model.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float
from ttcd_kernels.normalize import l2_normalize

from ttcd_jax.axes import param
from ttcd_jax.config import Bound, NonNegativeFloat, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.memory.chunks import masked
from ttcd_jax.memory.delta_rule import unit_lower_solve
from ttcd_jax.memory.prefix import PrefixOptions, Sum, Writes
from ttcd_jax.memory.protocol import Chunks
from ttcd_jax.memory.running import CorrectingMemory
from ttcd_jax.methods import registry
from ttcd_jax.methods.in_place import InPlaceConfig, InPlaceMLP, InPlaceSettings, InPlaceState
from ttcd_jax.nn.attention import DualWindowAttention, DualWindowConfig, start_cache
from ttcd_jax.nn.block import BlockConfig, Names, Views
from ttcd_jax.nn.linear import product, weight_product
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.row import Hidden, Piece, Row
from ttcd_jax.nn.windows import KVCache


class StreamMemoryConfig(InPlaceSettings):
    """The settings of a memory of the stream. `eta` multiplies what is read.

    `initial_rate`: beta is sigmoid(x . b + c) with b from zero and the constant c, of which it is
    this; x is the normed stream before the MLP, the teacher's or the student's (`rate_source`).
    `target`: d is the difference of the streams, or of the layer's own MLP outputs alone, as in the
    paper. `stops_teacher`: no gradient flows through the teacher's stream. `is_frozen`: the memory
    is read and never written, by a student alone (`ttcd_jax.inference.state.frozen`).
    """

    goes_on_as_student: ClassVar[bool] = True

    eta: NonNegativeFloat = 1.0
    initial_rate: Annotated[float, Bound("between 0 and 1", lambda rate: 0 < rate < 1)] = 0.3
    rate_source: Literal["teacher", "student"] = "teacher"
    target: Literal["stream", "layer"] = "stream"
    stops_teacher: bool = False
    is_frozen: bool = False

    @property
    def rules(self) -> dict[str, Any]:
        return {", the layer's error": self.target == "layer", ", frozen": self.is_frozen}

    def frozen(self, config: registry.ModelConfig) -> registry.ModelConfig:
        return config.replace(window=config.student_window, memory=self.replace(is_frozen=True))


class Caches(NamedTuple):
    """The keys and values of both streams."""

    teacher: KVCache
    student: KVCache


class StreamsConfig(DualWindowConfig):
    """Attention of both streams, of which `num_streams` come in: one before the first layer."""

    num_streams: Positive

    def flops(self, length: int) -> int | float:
        student = self.attention.replace(window=self.student_window)
        return self.attention.flops(length) + student.flops(length)


class StreamsAttention(DualWindowAttention, config=StreamsConfig):
    """(h_T, h_S), normed, each [B, T, D] -> what attention adds to each, under its own window."""

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Views, None]:
        # Not both windows at once, where they share an input: the student alone is this to the bit.
        wide, short = ((window,) for window in self.windows)
        (own,) = self.over_row(x if student is None else student, row, short)
        (teacher,) = self.over_row(x, row, wide)
        return Views(teacher, own), None

    def start(self, batch_size: int, max_length: int | None) -> Caches:
        configs = (self.config.replace(window=window) for window in self.windows)
        return Caches(*(start_cache(x, batch_size, max_length) for x in configs))

    def extend(
        self, x: Hidden, piece: Piece, state: Caches, student: Hidden | None = None
    ) -> tuple[Views, Caches]:
        wide, short = ((window,) for window in self.windows)
        own = x if student is None else student
        (own,), after = self.over_piece(own, piece, state.student, short)
        (teacher,), cache = self.over_piece(x, piece, state.teacher, wide)
        return Views(teacher, own), Caches(cache, after)

    def frozen(self, state: Caches) -> KVCache:
        return state.student


class StreamMemoryMLPConfig(InPlaceConfig):
    """An MLP whose features are the keys of a memory of the stream. `goes_on`: a later layer needs
    the teacher's stream."""

    reference_names: ClassVar[Names] = MLPConfig.reference_names | {"b_proj": ("rate", "same")}

    memory: StreamMemoryConfig
    goes_on: bool

    @property
    def has_teacher(self) -> bool:
        return not self.memory.is_frozen

    def flops(self, length: int) -> int | float:
        """The MLP of each stream, the memory's read and write, what the delta rule needs, and what
        tokens read of their own chunk."""
        correction = self.memory.correction_flops(self.mlp, length)
        size = min(self.memory.chunk_size, length)
        correction += 2 * length * size * (self.mlp.hidden_dim + self.mlp.dim)
        return (3 + 3 * self.has_teacher + 2) * self.mlp.unit_flops(length) + correction


@struct.dataclass
class StreamMemory(CorrectingMemory):
    """The delta rule, read by keys beside what it is added to, y + eta k S, with S that all earlier
    tokens wrote: those of its chunk too, whose writes solve the same system."""

    reads_own_chunk = True

    def read(self, state: Sum, reads: Float[Array, "B L X"]) -> Float[Array, "B L D"]:
        keys, y = jnp.split(reads, [state.shape[1]], axis=-1)
        found = product("BLF,BFD->BLD", keys, state.astype(keys.dtype), self.options.state_dtype)
        return (y + self.options.eta * found).astype(reads.dtype)

    def read_chunk(self, state: Sum, chunk: Chunks[Writes]) -> Float[Array, "B L D"]:
        return self.advance(state, chunk)[1]

    def advance(self, state: Sum, chunk: Chunks[Writes]) -> tuple[Sum, Float[Array, "B L D"]]:
        """By the writes u that solve the system of every document of the chunk."""
        (keys, errors, _, beta), wide = chunk.writes, self.options.state_dtype
        reads, y = jnp.split(chunk.reads, [state.shape[1]], axis=-1)
        assert beta is not None
        beta = beta.astype(wide)[..., None]

        def found(k: Array) -> Array:
            answers = product("BLF,BFD->BLD", k, state.astype(k.dtype), wide)
            return masked(answers, chunk.mask.reads)

        def overlaps(k: Array) -> Array:
            products = product("BLF,BMF->BLM", k, keys, wide)
            if (ids := chunk.segments) is None:
                return products
            return jnp.where(ids[:, :, None] == ids[:, None], products, 0)

        u = unit_lower_solve(beta * overlaps(keys), errors.astype(wide) - beta * found(keys))
        u = u.astype(keys.dtype)
        own = jnp.tril(overlaps(reads), -1).astype(keys.dtype)
        answers = found(reads) + product("BLM,BMD->BLD", own, u, wide)
        y = (y + self.options.eta * answers).astype(y.dtype)
        state, u = self.reset(state, chunk), masked(u, chunk.mask.writes)
        return state + product("BLF,BLD->BFD", keys, u, wide), y


class Lesson(NamedTuple):
    """Of every token: k, what the student's MLP adds to its stream, d, and the rate beta."""

    k: Float[Array, "*rest F"]
    y: Float[Array, "*rest D"]
    d: Float[Array, "*rest D"]
    beta: Float[Array, "*rest"]


class StreamMemoryMLP(InPlaceMLP[Lesson, Lesson], config=StreamMemoryMLPConfig):
    """(h_T, h_S), normed, each [B, T, D] -> what the MLP and its memory add to the student's
    stream, and the MLP to a teacher's that goes on. The parameters of SwiGLU, and b."""

    settings: StreamMemoryConfig
    move_power = 0.5  # where both windows see the same, rounding is written

    def __init__(self, config: StreamMemoryMLPConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.goes_on = config.goes_on
        self.rate = param(jnp.zeros(self.config.dim, self.config.precision.param_dtype), ("embed",))

    def __call__(self, *operands: Any, **options: Any) -> Any:
        raise UserError("a memory of the stream reads both streams of a block: call the Block")

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Any, Any]:
        if student is None:
            return super().forward(x, row)
        y, report = super().forward(student, row, x)
        return self._beside(x, y), report

    def extend(
        self, x: Hidden, piece: Piece, state: InPlaceState, student: Hidden | None = None
    ) -> tuple[Any, InPlaceState]:
        if student is None:
            return super().extend(x, piece, state)
        y, state = super().extend(student, piece, state, x)
        return self._beside(x, y), state

    def _beside(self, x: Hidden, y: Hidden) -> Views:
        return Views(self.plain(x) if self.goes_on else None, y)

    def start(self, batch_size: int, max_length: int | None = None) -> InPlaceState:
        state = super().start(batch_size, max_length)
        return self.frozen(state) if self.settings.is_frozen else state

    def source(self, x: Hidden, row: Any, student: Hidden | None) -> tuple[Hidden, Hidden]:
        """x is the student's, `student` the teacher's: the target, and the rate's source."""
        if student is None:
            return self.plain(x), x
        stops = jax.lax.stop_gradient if self.settings.stops_teacher else lambda x: x
        (teacher, own), seen = row.streams, stops(student)
        target = stops(self.plain(seen))
        if self.settings.target == "stream":
            target = target + (stops(teacher) - own)
        return target, seen if self.settings.rate_source == "teacher" else x

    def tokens(self, x: Hidden, t: Any) -> Lesson:
        (target, seen), z = t if isinstance(t, tuple) else (t, t), self.features(x)
        wide = jnp.promote_types(self.config.precision.state_dtype, jnp.float32)
        logit = jnp.einsum("BTD,D->BT", seen.astype(wide), self.rate[...].astype(wide))
        rate = self.settings.initial_rate
        beta = jax.nn.sigmoid(logit + math.log(rate / (1 - rate)))
        y = weight_product(z, self.w_base())
        return Lesson(l2_normalize(z), y, target - y, beta)

    def operands(self, convolved: Lesson) -> tuple[Float[Array, "B C L X"], Writes]:
        k, y, d, beta = convolved
        errors = (beta[..., None] * d).astype(k.dtype)
        return jnp.concatenate([k, y], axis=-1), Writes(k, errors, None, beta)

    def read_scale(self, has_gap: bool) -> Float[Array, " F"]:
        raise UserError(
            "a memory of the stream is read by keys of norm 1, z / |z|, and a plain MLP reads z: "
            "keep the memory (--memory=frozen reads it at the cost of the student)"
        )

    def memory(self, length: int) -> StreamMemory:
        precision = self.config.precision
        options = PrefixOptions(self.settings.eta, state_dtype=precision.state_dtype)
        return StreamMemory(self.w_base(), options)

    def compared(
        self, convolved: Lesson, reads: Array, y: Array, read: Callable[[Array], Array]
    ) -> tuple[Array, ...]:
        """The student's stream moves towards the teacher's, which reads no memory. Both are
        measured from the student's before its MLP."""
        student = convolved.y
        teacher = student + convolved.d
        return teacher, student, y, teacher - y, y - student


def _blocks(config: Any, settings: StreamMemoryConfig) -> tuple[BlockConfig, ...]:
    if settings.is_frozen and config.window != config.student_window:
        raise UserError(
            f"is_frozen is for the student alone: set window {config.window} to its window, "
            f"{config.student_window}"
        )
    attention, last = config.attention(), max(config.fast_layers)
    windows = {"attention": attention, "student_window": config.student_window}

    def block(layer: int) -> BlockConfig:
        mixer, mlp = attention.replace(window=config.student_window), config.mlp()
        if layer <= last and not settings.is_frozen:
            mixer = StreamsConfig(**windows, num_streams=2 if layer else 1)
            mlp = mlp.replace(num_streams=2)
        if layer in config.fast_layers:
            options = {"memory": settings, "goes_on": layer < last}
            mlp = StreamMemoryMLPConfig(mlp=config.mlp(), **options)
        return BlockConfig(mixer=mixer, mlp=mlp, stops_teacher=settings.stops_teacher)

    return tuple(map(block, range(config.num_layers)))


registry.register(
    registry.Method("ipttcd_stream", "IP-TTCD of the stream", _blocks, settings=StreamMemoryConfig)
)
