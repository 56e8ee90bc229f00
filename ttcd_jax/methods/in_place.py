"""What every MLP that writes into its own down projection shares: switches, call, statistics."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.memory.chunks import ChunkedMemory, chunk_segments, from_chunks, to_chunks
from ttcd_jax.memory.prefix import Form, MemoryRule
from ttcd_jax.nn.linear import normal_param
from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.nn.stream import (
    Piece,
    Streamed,
    continued,
    inside_open_chunk,
    next_tail,
    real,
    with_tail,
)
from ttcd_jax.precision import Precision

ConvInit = Literal["zeros", "identity", "normal"]
ProjInit = Literal["identity", "gaussian_diagonal", "zeros", "normal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InPlaceConfig(Config):
    """A memory in the down projection: a chunk reads what the chunks before it wrote, at rate
    eta."""

    chunk_size: int = 1024
    eta: float = 0.3
    resets_at_document: bool = True  # published: the memory leaks from document to document

    def validate(self) -> None:
        if self.chunk_size < 1:
            raise UserError(
                f"{type(self).__name__}.chunk_size {self.chunk_size} must be at least 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastWeightConfig(InPlaceConfig):
    """A memory that is a prefix sum: chunk i reads W_base + eta * (what chunks before i wrote)."""

    num_taps: int = 5
    is_conv_causal: bool = True
    has_proj: bool = True
    # 0.02 I, 0.02 diag(N(0, 1)), zero, or dense N(0, init_std^2).
    proj_init: ProjInit = "identity"
    folds_state: bool = False  # published read: round W_base + eta S, then one product
    form: Form = "auto"
    block_chunks: int = 4

    def validate(self) -> None:
        super().validate()
        for name in ("num_taps", "block_chunks"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{type(self).__name__}.{name} {getattr(self, name)} must be at least 1"
                )
        if self.folds_state and self.resets_at_document:
            raise UserError(
                "folds_state reproduces code without documents: set resets_at_document=False"
            )
        if self.form == "attention" and self.folds_state:
            raise UserError("form 'attention' does not know folds_state")

    def rule(self, precision: Precision, *, orthogonalizes: bool = False) -> MemoryRule:
        """The static facts of a read, for `ttt.scan.apply_memory`."""
        return MemoryRule(
            eta=self.eta,
            orthogonalizes=orthogonalizes,
            folds_state=self.folds_state,
            form=self.form,
            block_chunks=self.block_chunks,
            state_dtype=precision.state_dtype,
        )


class MemoryStats(NamedTuple):
    """Scalars of one fast layer, without gradient."""

    # |eta * sum of delta_w|_F / |W_base|_F at the end of the row, batch mean
    memory_ratio: jax.Array
    # mean of beta over tokens; 1 without a token rate
    gate_mean: jax.Array


def memory_stats(
    size: Float[Array, " B"],
    w_base: Float[Array, "F D"],
    eta: float,
    beta: Float[Array, "B T"] | None = None,
) -> MemoryStats:
    """What stands in the memory at the end of the row; `size` is |S|_F, of the sum without eta."""
    base = jax.lax.stop_gradient(w_base).astype(jnp.float32)
    gate = jnp.ones(()) if beta is None else jax.lax.stop_gradient(beta).mean()
    return MemoryStats(abs(eta) * size.mean() / jnp.linalg.norm(base), gate.astype(jnp.float32))


class Remembered(NamedTuple):
    """What a memory gives for a row: y in chunks, the Frobenius norm of the sum of what was written
    (without eta, and without gradient), and the token rate if there is one."""

    y: Float[Array, "B C L D"]
    size: Float[Array, " B"]
    beta: Float[Array, "B T"] | None = None


class MemoryState(NamedTuple):
    """A memory in the middle of a row: what full chunks wrote, the operands of the open chunk, and
    the tokens of it that a convolution will look back at (None without convolution)."""

    streamed: Streamed
    tail: Any | None


class MemoryMLP(SwiGLU):
    """(x, t) [B, T, D] -> y [B, T, D], any T: x is read through the memory in the down projection.

    What t is and what is written the method says, in four steps that a whole row and a piece of one
    share: `_tokens` (of each token alone), `_convolved` (inside chunks), `_operands` (of read and
    write), and then either `_remember`, for a row, or `_chunked`, chunk by chunk.
    """

    def __init__(self, mlp: MLPConfig, memory: InPlaceConfig, *, rngs: nnx.Rngs):
        super().__init__(mlp, rngs=rngs)
        self.memory = memory

    def __call__(
        self,
        x: Float[Array, "B T D"],
        t: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.forward(x, t, segment_ids)[0]

    def forward(
        self,
        x: Float[Array, "B T D"],
        t: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MemoryStats]:
        """y and what the memory holds. Documents (`segment_ids`) neither share nor leak it."""
        memory, length = self.memory, x.shape[1]
        if not memory.resets_at_document:
            segment_ids = None
        segments = chunk_segments(segment_ids, memory.chunk_size)
        y, size, beta = self._remember(x, t, segments, segment_ids)
        stats = memory_stats(size, self.down[...], memory.eta, beta)
        return from_chunks(y, length), stats

    def _remember(
        self,
        x: Float[Array, "B T D"],
        t: Float[Array, "B T D"],
        segments: Int[Array, "B C L"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Remembered:
        raise AssertionError(f"{type(self).__name__} defines its own _remember")

    def start(self, batch_size: int) -> MemoryState:
        """What `extend` finds in front of a row.

        Raises `UserError` for a layer that reads tokens which are not there yet.
        """
        self._check_causal()
        size, dtype = self.memory.chunk_size, self.config.precision.compute_dtype
        x = jax.ShapeDtypeStruct((batch_size, size, self.config.dim), dtype)

        def written(x):
            tokens = self._tokens(x, x)
            chunks = jax.tree.map(lambda x: x[:, None], tokens)
            return tokens, self._operands(self._convolved(chunks, None))[1]

        tokens, writes = jax.eval_shape(written, x)

        def zeros(num_tokens: int, axis: int, x: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((batch_size, num_tokens, *x.shape[axis + 1 :]), x.dtype)

        held = jax.tree.map(functools.partial(zeros, size, 2), writes)
        tail = None
        if self._look_back:
            tail = jax.tree.map(functools.partial(zeros, self._look_back, 1), tokens)
        return MemoryState(Streamed(self._chunked(batch_size)[1], held), tail)

    def extend(
        self, x: Float[Array, "B T D"], t: Float[Array, "B T D"], piece: Piece, state: MemoryState
    ) -> tuple[Float[Array, "B T D"], MemoryState]:
        """`forward` for a piece of a row of one document: (y, the state behind it).

        Read and write are those of a row: the convolutions see the tokens of their chunk in front
        of the piece, and a chunk is written when its last token is there.
        """
        if piece.is_plain is True:
            return SwiGLU.__call__(self, x), state
        length, size = x.shape[1], self.memory.chunk_size
        tokens = jax.tree.map(lambda x: real(x, piece), self._tokens(x, t))
        lead = back = 0
        if length > size:
            chunks = jax.tree.map(lambda x: to_chunks(x, size), tokens)
        else:
            lead, back = self._look_ahead, self._look_back
            around = tokens if state.tail is None else jax.tree.map(with_tail, state.tail, tokens)
            chunks = jax.tree.map(lambda x: x[:, None], around)
        # Only the places whose errors are new, or change by what the piece shows.
        convolved = jax.tree.map(lambda x: x[:, :, back - lead :], self._convolved(chunks, None))
        reads, writes = (
            jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), operands)
            for operands in self._operands(convolved)
        )
        memory, _ = self._chunked(x.shape[0])
        y, streamed = continued(memory, state.streamed, reads[:, lead:], writes, piece)
        if piece.is_plain is not None:
            y = jnp.where(piece.is_plain[:, None, None], SwiGLU.__call__(self, x), y)
        tail = state.tail
        if tail is not None:
            tail = jax.tree.map(lambda tail, x: next_tail(tail, x, piece), tail, tokens)
            tail = jax.tree.map(lambda x: inside_open_chunk(x, piece, size), tail)
        return y, MemoryState(streamed, tail)

    _look_back = 0  # tokens in front of its own that a convolution reads
    _look_ahead = 0  # tokens behind its own that it reads

    def _check_causal(self) -> None:
        """Raises `UserError` when y depends on later tokens."""

    def _tokens(self, x: Float[Array, "B T D"], t: Float[Array, "B T D"]) -> Any:
        raise AssertionError(f"{type(self).__name__} defines its own _tokens")

    def _convolved(self, tokens: Any, segments: Int[Array, "B C L"] | None) -> Any:
        return tokens

    def _operands(self, convolved: Any) -> tuple[Float[Array, "B C L F"], Any]:
        """(what is read, what is written)."""
        raise AssertionError(f"{type(self).__name__} defines its own _operands")

    def _chunked(self, batch_size: int) -> tuple[ChunkedMemory, Any]:
        """(the memory chunk by chunk, its state in front of a row)."""
        raise AssertionError(f"{type(self).__name__} defines its own _chunked")

    def _init_proj(self, memory: FastWeightConfig, rngs: nnx.Rngs) -> nnx.Param:
        """P [D, D], which multiplies errors from the right."""
        D, std, dtype = self.config.dim, self.config.init_std, self.config.precision.param_dtype
        axes = ("embed", "embed_out")
        match memory.proj_init:
            case "identity":
                return param(0.02 * jnp.eye(D, dtype=dtype), axes)
            case "gaussian_diagonal":
                return param(jnp.diag(0.02 * jax.random.normal(rngs.params(), (D,), dtype)), axes)
            case "zeros":
                return param(jnp.zeros((D, D), dtype), axes)
            case "normal":
                return normal_param(rngs, (D, D), axes, std, dtype)

    def _init_conv(
        self,
        memory: FastWeightConfig,
        init: ConvInit,
        rngs: nnx.Rngs,
        axis: Literal["embed", "mlp"],
    ) -> nnx.Param:
        """Taps [R, channels] for the D or F channels; the identity passes the current token
        through."""
        channels = {"embed": self.config.dim, "mlp": self.config.hidden_dim}[axis]
        shape, dtype = (memory.num_taps, channels), self.config.precision.param_dtype
        if init == "normal":
            return normal_param(rngs, shape, ("taps", axis), self.config.init_std, dtype)
        if init == "identity":
            return param(identity_taps(memory, channels, dtype), ("taps", axis))
        return param(jnp.zeros(shape, dtype), ("taps", axis))


def identity_taps(
    memory: FastWeightConfig, channels: int, dtype: DTypeLike = jnp.float32
) -> Float[Array, "R X"]:
    """Taps that pass the current token through."""
    here = -1 if memory.is_conv_causal else memory.num_taps // 2
    return jnp.zeros((memory.num_taps, channels), dtype).at[here].set(1)


def look_ahead(memory: FastWeightConfig) -> int:
    """Tokens behind its own that a convolution reads."""
    return 0 if memory.is_conv_causal else memory.num_taps - 1 - memory.num_taps // 2


def reads_ahead(config: str, what: str) -> UserError:
    """The error of a model that cannot go token by token."""
    return UserError(
        f"{config}.is_conv_causal=False with {what} reads features of tokens that are not there "
        "yet: such a model cannot generate; train it with is_conv_causal=True"
    )
