"""Base of the MLPs that write into their own down projection: settings, rows, pieces."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.config import NonNegativeFloat, Positive, PositiveFloat
from ttcd_jax.errors import UserError
from ttcd_jax.memory.chunks import (
    MemoryMask,
    chunk_segments,
    from_chunks,
    masked,
    memory_mask,
    to_chunks,
)
from ttcd_jax.memory.distillation import Distillation, distances
from ttcd_jax.memory.pieces import OpenChunk, closed, inside_open_chunk, over_piece, start_pieces
from ttcd_jax.memory.prefix import Form, PrefixMemory, PrefixOptions
from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.memory.rows import check_parts, over_rows
from ttcd_jax.memory.running import CorrectingMemory, Views
from ttcd_jax.methods.registry import Settings
from ttcd_jax.nn.block import MemoryStats, Names, SublayerConfig, check_hidden
from ttcd_jax.nn.linear import product, weight_product
from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.nn.row import Hidden, Piece, Row, after_tail, next_tail, no_tail, zero_padding
from ttcd_jax.precision import Precision

type Tree = tuple[Any, ...]  # a NamedTuple of arrays by token, or None
ConvInit = Literal["zeros", "identity", "previous", "normal"]
ProjInit = Literal["identity", "gaussian_diagonal", "zeros", "normal"]


class InPlaceSettings(Settings):
    """A memory in the down projection: a chunk of `chunk_size` tokens reads the writes of the
    chunks before it, at rate `eta`. `resets_at_document` False: the memory leaks from document to
    document, as published."""

    chunk_size: Positive = 1024
    eta: NonNegativeFloat = 0.3
    resets_at_document: bool = True

    @property
    def words(self) -> str:
        return "".join(x for x, is_on in self.rules.items() if is_on) if self.eta else ", eta = 0"

    stores_keys: ClassVar[bool] = True  # whether it writes errors under keys
    is_frozen: ClassVar[Any] = False  # whether a memory is read and never written
    rules: ClassVar[Any] = {}  # words of a label -> whether they are true of a memory that is read

    def switched_off(self, length: int) -> "InPlaceSettings":
        return self if self.is_frozen else self.replace(eta=0.0)

    def frozen(self, config: Any) -> Any:
        return config

    def correction_flops(self, mlp: MLPConfig, length: int) -> int | float:
        """Of the delta rule: the memory's answers to all keys, overlaps of the keys of a chunk, and
        the triangular system."""
        size = min(self.chunk_size, length)
        system = size * (mlp.hidden_dim + mlp.dim) + (size**2 - 1) / 3
        return mlp.unit_flops(length) + 2 * length * system

    is_linear_in_proj: ClassVar[Any] = False  # whether P times a number is eta times that number


class PrefixSettings(InPlaceSettings):
    """A memory that is a prefix sum: chunk i reads W_base + eta * (the writes of chunks before i).

    `num_taps` tokens of a convolution, this one the last, or the middle one (`is_conv_causal`
    False). `has_proj`: errors are multiplied by P, which `proj_init` begins as 0.02 I, 0.02
    diag(N(0, 1)), zero, or dense N(0, init_std^2). `form` of the sum, and `block_chunks` whose
    states exist at once (`ttcd_jax.memory.prefix`); `folds_state`: the published read, one product.

    Not published: `half_lives`, of as many groups of the memory's columns, in tokens; () forgets
    nothing. `decay`: they are constants, learned from there, or learned and multiplied by a gate on
    every token, softplus(x w) / ln 2 with w from zero. `corrects_errors`: the delta rule
    (`memory.running.CorrectingMemory`), with keys of norm 1.
    """

    num_taps: Positive = 5
    is_conv_causal: bool = True
    has_proj: bool = True
    proj_init: ProjInit = "identity"
    folds_state: bool = False
    form: Form = "auto"
    block_chunks: Positive = 4
    half_lives: tuple[PositiveFloat, ...] = ()
    decay: Literal["constant", "learned", "gated"] = "constant"
    corrects_errors: bool = False

    def validate(self) -> None:
        super().validate()
        if self.decay != "constant" and not self.half_lives:
            raise UserError(
                f"decay={self.decay!r} without half_lives has nothing to start from: set "
                "half_lives=(1024.0,), for example"
            )
        if self.half_lives and self.folds_state:
            raise UserError("folds_state reproduces code that forgets nothing: set half_lives=()")
        if self.folds_state and self.resets_at_document:
            raise UserError(
                "folds_state reproduces code without documents: set resets_at_document=False"
            )
        if self.form == "attention" and self.folds_state:
            raise UserError("form 'attention' does not know folds_state")
        if self.corrects_errors and (self.form != "auto" or self.folds_state):
            raise UserError(
                "corrects_errors is a loop over chunks, no prefix sum: it knows no other form than "
                "'auto' and no folds_state"
            )

    def options(self, precision: Precision) -> PrefixOptions:
        fields = (self.eta, False, self.folds_state, self.form, self.block_chunks)
        return PrefixOptions(*fields, state_dtype=precision.state_dtype)

    def error_flops(self, mlp: MLPConfig, length: int) -> int | float:
        proj = self.has_proj * 2 * length * mlp.dim**2
        return proj + self.corrects_errors * self.correction_flops(mlp, length)

    @property
    def rules(self) -> dict[str, Any]:
        return {" + delta rule": self.corrects_errors, " + decay": self.half_lives}

    @property
    def is_linear_in_proj(self) -> bool:
        return self.has_proj

    @property
    def look_ahead(self) -> int:
        """Tokens after its own that a convolution reads."""
        return 0 if self.is_conv_causal else self.num_taps - 1 - self.num_taps // 2


class InPlaceConfig(SublayerConfig):
    """An `mlp` with a `memory` in its down projection."""

    is_in_place: ClassVar[bool] = True
    reference_names: ClassVar[Names] = MLPConfig.reference_names | {
        "ttt_proj.weight": ("proj", "same"),
        # Not in the reference, whose memories do not decay.
        "ttt_decay": ("decay", "same"),
        "ttt_decay_gate.weight": ("decay_gate", "linear"),
    }
    mlp: MLPConfig
    memory: InPlaceSettings

    @property
    def chunk_size(self) -> int | None:
        return self.memory.chunk_size

    @property
    def write_param(self) -> str | None:
        return "proj" if self.memory.is_linear_in_proj else None


class InPlaceState(NamedTuple):
    """A memory in the middle of a row: full chunks and open chunk, and the last of its
    tokens, which the convolutions look back at (None without one)."""

    chunks: OpenChunk
    tail: Tree | None

    def kinds(self) -> dict[str, object]:
        return {"memory": self.chunks.memory, "open chunk": (self.chunks.open, self.tail)}


class Operands(NamedTuple):
    """What a memory is read and written by in a part of a row, by chunk."""

    reads: Float[Array, "B C L X"]
    writes: Any  # `memory.prefix.Writes` of methods that store keys
    gate: Float[Array, "B C L"] | None  # beta; None without one
    # |e - e'|^2 of the errors e, with e' those of equal windows; None without a teacher
    window_squares: Float[Array, "B C L"] | None
    mask: MemoryMask
    segments: Int[Array, "B C L"] | None
    state: Any  # of the memory after the part


type Found = MemoryStats | Distillation | Operands


class InPlaceMLP[Tokens: Tree, Convolved: Tree](SwiGLU):
    """(x, t) [B, T, D] -> y [B, T, D], any T: x is read through the memory in the down projection.
    A method defines t (`source`) and its writes by four functions that whole rows and pieces share:
    `tokens`, `convolved` (the same inside chunks), `operands` (of reads and writes), `memory`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        super().__init__(config.mlp, rngs=rngs)
        self.settings, self.has_teacher = config.memory, config.has_teacher

    def __call__(
        self, x: Hidden, t: Hidden, segment_ids: Int[Array, "B T"] | None = None
    ) -> Hidden:
        """y. With `resets_at_document` the documents of `segment_ids` share no memory. Raises
        `UserError` for operands of other shapes."""
        for name, operand in (("x", x), ("t", t)):
            check_hidden(name, operand, self.config.dim)
        if x.shape != t.shape:
            raise UserError(f"x {list(x.shape)} and t {list(t.shape)} must have the same shape")
        return self.remember(x, t, Row.of(x, None, segment_ids))[0]

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Hidden, Found]:
        return self.remember(x, self.source(x, row, student), row)

    def remember(self, x: Hidden, t: Any, row: Row) -> tuple[Hidden, Found]:
        """(y, statistics of the memory at the end of the row), for any t; of a row that `measures`
        the distances of every token instead, of a `part` of a row its operands. Its `control`
        changes what is written."""
        settings, length = self.settings, x.shape[1]
        check_parts(length, settings.chunk_size)
        tokens, ids = self.tokens(x, t), row.segment_ids if settings.resets_at_document else None
        segments = chunk_segments(ids, settings.chunk_size)
        chunks = jax.tree.map(lambda x: to_chunks(x, settings.chunk_size), tokens)
        convolved = self.convolved(chunks, segments)
        reads, writes = self.operands(convolved)
        writes = controlled(writes, row.control)
        memory = self.memory(reads.shape[1] * settings.chunk_size)
        if (part := row.part) is not None:
            document = None if ids is None else part.previous_segment
            prepared = memory.prepared(
                reads, writes, segments, length=length, previous_segment=document
            )
            y, end = memory.row(prepared, part.state)
            squares = self._window_squares(convolved, writes, segments)
            beta = getattr(chunks, "beta", None)
            found = Operands(reads, writes, beta, squares, prepared.mask, segments, end)
            return from_chunks(y, length), found
        y, size = over_rows(memory, reads, writes, segments, length=length, reports_size=True)
        assert size is not None
        if y.shape != (wanted := (*reads.shape[:3], x.shape[-1])):
            given = f"{type(memory).__name__}.read gives y {list(y.shape)} by row and chunk"
            raise UserError(f"{given}, and the layer needs {list(wanted)}")
        if not row.measures:
            ends = jnp.ones(len(x), bool)
            if row.segment_ids is not None:  # rows that end in padding say little, where others are
                ends = row.segment_ids[:, -1] != 0
                ends |= ~ends.any()
            stats = self._stats(size, getattr(tokens, "beta", None), ends)
            share = self._window_share(size, (convolved, writes, segments), length, ends)
            return from_chunks(y, length), stats._replace(window_share=share)

        def read(z: jax.Array) -> jax.Array:
            return over_rows(memory, z, writes, segments, length=length)[0]

        measured = self.compared(convolved, reads, y, read)
        windows = measured[-1]
        if (free := self.without_gap(convolved, segments)) is not None:
            windows = y - over_rows(memory, reads, free, segments, length=length)[0]
        found = distances(*measured, windows=windows, segments=segments, power=self.move_power)
        return from_chunks(y, length), jax.tree.map(lambda x: from_chunks(x, length), found)

    def compared(
        self, convolved: Convolved, reads: Array, y: Array, read: Callable[[Array], Array]
    ) -> tuple[Array, ...]:
        """The operands of `memory.distillation.distances` before `windows`, of which `read` gives
        z W_i."""
        z_teacher, z_student = self.views(convolved)
        remembered, both = read(z_student), read(z_teacher - z_student)
        teacher, student, plain = (
            weight_product(z, self.w_base()) for z in (z_teacher, z_student, reads)
        )
        return teacher, student, remembered, both, y - plain

    def _window_share(
        self, size: Float[Array, " B"], row: Tree, length: int, ends: Bool[Array, " B"]
    ) -> Float[Array, ""] | None:
        """`MemoryStats.window_share` of (convolved, writes, segments), over the rows `ends`. One
        chunk's errors are made again, at most a twelfth of the layer's forward, divided by the
        chunks of a row."""
        if not self.has_teacher:
            return None
        convolved, writes, segments = jax.lax.stop_gradient(jax.tree.map(lambda x: x[:, -1:], row))
        if (free := self.without_gap(convolved, segments)) is None:
            return size.any().astype(jnp.float32)
        chunk = self.settings.chunk_size
        mask = memory_mask(segments, (length - 1) % chunk + 1, chunk).writes
        errors, left = (masked(x.errors.astype(jnp.float32), mask) for x in (writes, free))
        chosen = ends[:, None, None, None]
        squares, windows = (jnp.sum(x**2, where=chosen) for x in (errors, errors - left))
        return windows / jnp.where(squares > 0, squares, 1)

    def _window_squares(
        self, convolved: Convolved, writes: Any, segments: Int[Array, "B C L"] | None
    ) -> Float[Array, "B C L"] | None:
        if not self.has_teacher:
            return None
        free, errors = self.without_gap(convolved, segments), writes.errors
        left = errors if free is None else errors - free.errors
        return jnp.sum(left.astype(jnp.promote_types(left.dtype, jnp.float32)) ** 2, axis=-1)

    def _stats(
        self,
        size: Float[Array, " B"],
        beta: Float[Array, "B T"] | None,
        ends: Bool[Array, " B"],
    ) -> MemoryStats:
        """`size`: |S|_F, of the sum without eta, over the rows `ends`."""
        base = jax.lax.stop_gradient(self.down[...]).astype(jnp.float32)
        gate = jnp.ones(()) if beta is None else jax.lax.stop_gradient(beta).mean()
        ratio = abs(self.settings.eta) * jnp.mean(size, where=ends) / jnp.linalg.norm(base)
        return MemoryStats(ratio, gate.astype(jnp.float32))

    def start(self, batch_size: int, max_length: int | None = None) -> InPlaceState:
        """The state before rows begin. Raises `UserError` for a layer whose output depends on later
        tokens."""
        if self.convolved_reads and self.settings.look_ahead:
            raise UserError(
                f"{type(self.settings).__name__}.is_conv_causal=False with {self.convolved_reads} "
                "reads features of tokens that are not there yet: such a model cannot generate; "
                "train it with is_conv_causal=True"
            )
        size, dtype = self.settings.chunk_size, self.config.precision.compute_dtype
        x = jax.ShapeDtypeStruct((batch_size, size, self.config.dim), dtype)

        def one_chunk(x: jax.Array) -> tuple[Tokens, Tree]:
            tokens = self.tokens(x, x)
            chunks = jax.tree.map(lambda x: x[:, None], tokens)
            writes = self.operands(self.convolved(chunks, None))[1]
            return tokens, jax.tree.map(lambda x: x[:, 0], writes)

        tokens, writes = jax.eval_shape(one_chunk, x)
        chunks = start_pieces(self.memory(size), batch_size, writes)
        return InPlaceState(chunks, no_tail(tokens, self.look_back))

    def extend(
        self, x: Hidden, piece: Piece, state: InPlaceState, student: Hidden | None = None
    ) -> tuple[Hidden, InPlaceState]:
        """(y, the state after the piece). The convolutions see the tokens of their chunk before the
        piece, and a chunk is written when its last token arrives."""
        if piece.is_plain is True:
            return self.plain(x), state
        length, size = x.shape[1], self.settings.chunk_size
        tokens = zero_padding(self.tokens(x, self.source(x, piece, student)), piece)
        lead = back = 0
        if length > size:
            chunks = jax.tree.map(lambda x: to_chunks(x, size), tokens)
        else:
            lead, back = self.look_ahead, self.look_back
            chunks = jax.tree.map(lambda x: x[:, None], after_tail(state.tail, tokens))
        # Only the positions whose writes are new, or look ahead into the piece.
        convolved = jax.tree.map(lambda x: x[:, :, back - lead :], self.convolved(chunks, None))
        reads, writes = (
            jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), operands)
            for operands in self.operands(convolved)
        )
        y, open_chunk = over_piece(
            self.memory(size), state.chunks, reads[:, lead:], writes, piece, size
        )
        if piece.is_plain is not None:
            y = jnp.where(piece.is_plain[:, None, None], self.plain(x), y)
        tail = inside_open_chunk(next_tail(state.tail, tokens, piece), piece, size)
        return y, InPlaceState(open_chunk, tail)

    def frozen(self, state: InPlaceState) -> InPlaceState:
        return state._replace(chunks=OpenChunk(state.chunks.memory, None))

    def written(self, state: InPlaceState, count: Int[Array, " B"]) -> Any:
        """The memory after rows that end here, `count` tokens after the start of a chunk."""
        size = self.settings.chunk_size
        return closed(self.memory(size), state.chunks, count % size)

    def read_scale(self, has_gap: bool) -> Float[Array, " F"]:
        """The factor of each of a token's own features by which W_base + eta S is read, in a model
        with or without a gap between the windows. Raises `UserError` for any other read."""
        raise UserError(f"{type(self).__name__} does not say by what it reads its memory")

    def own_tap(self, name: str) -> Float[Array, " F"]:
        """`read_scale` of features after the convolution `name`, if there is one."""
        if not hasattr(self, name):
            return jnp.ones(self.config.hidden_dim)
        taps = getattr(self, name)[...]
        here = jnp.argmax(jnp.abs(identity_taps(self.settings, 1))[:, 0])
        if jnp.any(taps.at[here].set(0)):
            raise UserError(
                f"{self.convolved_reads} reads what {name} makes of several tokens, and a plain "
                "MLP sees one: train with MemoryConfig.output='teacher_raw' or without it"
            )
        return taps[here]

    look_back = 0  # tokens before its own that a convolution reads
    look_ahead = 0  # tokens after its own that it reads
    move_power = 1.0  # of eps, as in `memory.distillation.distances`
    convolved_reads = ""  # the setting by which y depends on features after a convolution

    def source(self, x: Hidden, row: Row | Piece, student: Hidden | None) -> Any:
        """t, from the layer's normed input, its row, and the student's normed input."""
        if student is None:
            raise UserError(
                f"{type(self).__name__} follows attention under two windows: give its block a "
                "DualWindowConfig"
            )
        return student

    def tokens(self, x: Hidden, t: Any) -> Tokens:
        """Features of each token alone, [B, T, ...]; t may be x, for their shapes."""
        raise AssertionError(f"{type(self).__name__} defines its own tokens")

    def convolved(self, tokens: Tokens, segments: Int[Array, "B C L"] | None) -> Convolved:
        """Features [B, C, L, ...] after the convolutions inside chunks, by default none."""
        return cast(Convolved, tokens)

    def operands(self, convolved: Convolved) -> tuple[Float[Array, "B C L F"], Tree]:
        """(operand of the reads, operands of the writes): `memory.protocol.Chunks`."""
        raise AssertionError(f"{type(self).__name__} defines its own operands")

    def views(self, convolved: Convolved) -> Views:
        """(features of the teacher, of the student) that the error of the writes compares, in a
        layer whose configuration `has_teacher`."""
        raise AssertionError(f"{type(self).__name__} has no teacher")

    def without_gap(self, convolved: Convolved, segments: Int[Array, "B C L"] | None) -> Any:
        """The writes of a student that sees what the teacher sees, keys and gates as they are; None
        where it would write nothing."""

    def memory(self, length: int) -> ChunkedMemory:
        """The memory of rows of `length` tokens, by default that of `PrefixSettings`."""
        w_base, options = self.w_base(), self.settings.options(self.config.precision)
        if self.settings.corrects_errors:
            return CorrectingMemory(w_base, options)
        return PrefixMemory(w_base, options.at_length(length, *w_base.shape))

    def log_decay(self, x: Hidden) -> Float[Array, "B T Q"] | None:
        """The logarithm of the share of every group of columns that is left after a token."""
        settings, dtype = self.settings, self.config.precision.state_dtype
        if not settings.half_lives:
            return None
        rate = jnp.log(2.0) / jnp.asarray(settings.half_lives, dtype)
        if settings.decay != "constant":
            rate = rate * jnp.exp(self.decay[...].astype(dtype))
        if settings.decay == "gated":
            gate = product("BTD,DQ->BTQ", x, self.decay_gate[...].astype(x.dtype), dtype)
            rate = rate * jax.nn.softplus(gate) / jnp.log(2.0)
        return jnp.broadcast_to(-rate, (*x.shape[:2], len(settings.half_lives)))

    def w_base(self) -> Float[Array, "F D"]:
        return self.down[...].astype(self.config.precision.compute_dtype)

    def _init_sum(self, rngs: nnx.Rngs) -> None:
        """With `PrefixSettings`: P [D, D], which multiplies errors from the right; the logarithm of
        the rate over that of the half-lives, and the weights of its gate."""
        settings, D, dtype = self.settings, self.config.dim, self.config.precision.param_dtype
        normal, std = functools.partial(jax.random.normal, dtype=dtype), self.config.init_std
        drawn = {
            "identity": lambda: 0.02 * jnp.eye(D, dtype=dtype),
            "gaussian_diagonal": lambda: jnp.diag(0.02 * normal(rngs.params(), (D,))),
            "zeros": lambda: jnp.zeros((D, D), dtype),
            "normal": lambda: std * normal(rngs.params(), (D, D)),
        }
        if settings.has_proj:
            self.proj = param(drawn[settings.proj_init](), ("embed", "embed_out"))
        Q = len(settings.half_lives)
        if Q and D % Q:
            raise UserError(f"{Q} half_lives do not divide the {D} columns of the memory")
        if settings.decay != "constant":
            self.decay = param(jnp.zeros(Q, dtype), ("scales",))
        if settings.decay == "gated":
            self.decay_gate = param(jnp.zeros((D, Q), dtype), ("embed", "scales"))

    def _init_conv(
        self, init: ConvInit, rngs: nnx.Rngs, axis: Literal["embed", "mlp"]
    ) -> nnx.Param:
        """Taps [R, channels] for the D or F channels; the identity passes the current token
        through, "previous" the one before it."""
        channels = {"embed": self.config.dim, "mlp": self.config.hidden_dim}[axis]
        taps = identity_taps(self.settings, channels, dtype := self.config.precision.param_dtype)
        if init == "previous" and self.settings.num_taps == 1:
            raise UserError("a convolution of num_taps=1 has no tap for the token before: use 2")
        if init == "normal":
            taps = self.config.init_std * jax.random.normal(rngs.params(), taps.shape, dtype)
        elif init != "identity":
            taps = jnp.roll(taps, -1, axis=0) if init == "previous" else jnp.zeros_like(taps)
        return param(taps, ("taps", axis), is_operand=False)


def controlled(writes: Any, control: str | None) -> Any:
    """The writes [B, C, L, ...] of a `Row.control`. Shuffled keys, of writes that have `keys`, take
    one cycle through the tokens of their chunk, so that none stays in its place."""
    if control == "foreign":
        return jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), writes)
    if control == "shuffled":
        if not hasattr(writes, "keys"):
            raise UserError(
                "control 'shuffled': this memory stores nothing under keys; leave it out"
            )
        order = np.random.default_rng(0).permutation(writes.keys.shape[2])
        source = np.roll(order, 1)[np.argsort(order)]
        return writes._replace(keys=writes.keys[:, :, source])
    return writes


def identity_taps(
    settings: PrefixSettings, channels: int, dtype: DTypeLike = jnp.float32
) -> Float[Array, "R X"]:
    here = -1 if settings.is_conv_causal else settings.num_taps // 2
    return jnp.zeros((settings.num_taps, channels), dtype).at[here].set(1)
