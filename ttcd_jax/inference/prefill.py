"""Prompts of any length, after any state, read in pieces of bounded size.

    first piece     every row to the end of its open chunk, if some row is inside one
    others          whole chunks of all rows, as many as a piece holds
    attention       the window before a piece; of full attention a power of two of keys

Pieces have few shapes, so that few programs are compiled.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ttcd_jax.data.tokenizer import check_tokens
from ttcd_jax.errors import UserError
from ttcd_jax.inference.advance import advance, head_logits, newest
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.state import InferenceState, cache_slots, fresh_memories
from ttcd_jax.models.config import TransformerConfig, has_in_place_memory, memory_chunk

# "kept": the memory is written by prompts and by decoding. "published": as in the authors' code,
# it is empty before every prompt, and off in decoding and in prompts shorter than a chunk.
MemoryMode = Literal["kept", "published"]
PIECE_SIZE = 4096
LEAST_SIZE = 16  # shorter pieces are padded to it, except a single token


def prefill(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    piece_size: int = PIECE_SIZE,
    memory: MemoryMode = "kept",
) -> tuple[Float[Array, "B V"], InferenceState]:
    """(logits after the last token of every row, state after it) of tokens [B, T] int, of which a
    row has `lengths` (default: all T), one or more. `state` is donated: do not use it again.

    `piece_size` bounds the tokens of a row that are read at once, hence the bytes, and changes no
    result. Rows may differ in length and position. Raises `UserError` and `DataError` before
    anything is read: shapes, tokens outside the vocabulary, more tokens than a state of full
    attention holds.
    """
    tokens, lengths = _check(model.config, state, tokens, lengths, piece_size, memory)
    if lengths.min() < 1:
        raise UserError(
            f"row {int(lengths.argmin())} has no token: logits need at least one, a bos for example"
        )
    state, pieces = _plan(model, state, lengths, piece_size, memory)
    hidden = jnp.zeros((len(tokens), model.config.dim), model.config.precision.compute_dtype)
    for piece, counts, seen in pieces.of(tokens):
        hidden, state = read_last(model, state, hidden, piece, counts, pieces.is_plain, **seen)
    return _logits(model, hidden), state


def stream(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    piece_size: int = PIECE_SIZE,
    memory: MemoryMode = "kept",
) -> Iterator[tuple[np.ndarray, Float[Array, "B T D"], InferenceState]]:
    """`prefill` piece by piece: (tokens read of each row [B], their final hidden states [B, T, D],
    padded, state after them). The next piece donates the state."""
    tokens, lengths = _check(model.config, state, tokens, lengths, piece_size, memory)
    state, pieces = _plan(model, state, lengths, piece_size, memory)
    for piece, counts, seen in pieces.of(tokens):
        hidden, state = _read(model, state, piece, counts, is_plain=pieces.is_plain, **seen)
        yield counts, hidden, state


class _Pieces(NamedTuple):
    """The pieces of rows, planned on the host."""

    position: np.ndarray  # [B], before the first piece
    phase: np.ndarray  # [B], tokens in the open chunks there
    lengths: np.ndarray  # [B], tokens to read
    chunk_size: int | None
    piece_size: int
    window: int | None  # of attention; None: full
    num_slots: int | None  # positions that rings hold; None: no attention
    is_plain: jax.Array | None

    def of(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, int]]]:
        """(tokens [B, T], their number without padding [B], halo and has_gap) of every piece."""
        done = np.zeros_like(self.lengths)
        while (done < self.lengths).any():
            size, counts = self._next(done)
            index = done[:, None] + np.arange(size)
            piece = np.take_along_axis(tokens, np.minimum(index, tokens.shape[1] - 1), axis=1)
            yield piece, counts.astype(np.int32), self._seen(done, counts)
            done = done + counts

    def _next(self, done: np.ndarray) -> tuple[int, np.ndarray]:
        """(T, tokens of each row) of the piece after `done`."""
        left = self.lengths - done
        if self.chunk_size is None:
            counts = np.minimum(left, self.piece_size)
            return _round_up(int(counts.max()), self.piece_size), counts
        room = self.chunk_size - (self.phase + done) % self.chunk_size
        is_at_start = (room == self.chunk_size) | (left == 0)
        chunks = min(self.piece_size, left.max()) // self.chunk_size
        if is_at_start.all() and chunks > 1:
            size = self.chunk_size * (1 << int(chunks).bit_length() - 1)
            return size, np.minimum(left, size)
        most = min(self.piece_size, self.chunk_size)
        counts = np.minimum(np.minimum(left, room), most)
        return _round_up(int(counts.max()), most), counts

    def _seen(self, done: np.ndarray, counts: np.ndarray) -> dict[str, int]:
        start = (self.position + done)[counts > 0]
        if counts.max() == 1 or not start.max():
            return {"halo": 0, "has_gap": False}
        whole = _round_up(int(start.max()), self.num_slots)
        halo = whole if self.window is None else self.window - 1
        return {"halo": halo, "has_gap": bool(start.min() < halo)}


def _round_up(count: int, most: int | None) -> int:
    """The next power of two, at least `LEAST_SIZE` (but 1 for 1), at most `most`."""
    power = 1 if count == 1 else max(1 << (count - 1).bit_length(), LEAST_SIZE)
    return power if most is None else min(power, most)


def _plan(
    model: InferenceModel,
    state: InferenceState,
    lengths: np.ndarray,
    piece_size: int,
    memory: MemoryMode,
) -> tuple[InferenceState, _Pieces]:
    chunk_size, is_plain = memory_chunk(model.config), None
    if memory == "published":
        assert chunk_size is not None
        state = _with_fresh_memories(model, state)
        is_plain = jnp.asarray(lengths < chunk_size)
    position, chunk_start = np.asarray(state.position), np.asarray(state.chunk_start)
    phase, slots = (position - chunk_start) % (chunk_size or 1), cache_slots(state)
    window = model.config.window
    return state, _Pieces(position, phase, lengths, chunk_size, piece_size, window, slots, is_plain)


def check_capacity(config: TransformerConfig, state: InferenceState, lengths: np.ndarray) -> None:
    """Raises `UserError` when rows of full attention would outgrow their state."""
    slots = cache_slots(state)
    if config.window is not None or slots is None:
        return
    most = int((np.asarray(state.position) + lengths).max())
    if most > slots:
        raise UserError(
            f"a row would have {most} tokens and the state of full attention holds {slots}: start "
            f"it with max_length={most} or more"
        )


def check_memory(config: TransformerConfig, memory: MemoryMode) -> None:
    """Raises `UserError` for a mode that does not exist or that the model cannot have."""
    if memory not in get_args(MemoryMode):
        raise UserError(f"memory {memory!r} is not one of {', '.join(get_args(MemoryMode))}")
    if memory == "published" and not has_in_place_memory(config):
        raise UserError(
            "memory='published' switches in-place memories off while decoding, and a model of "
            f"method {config.method!r} has none: use 'kept'"
        )


def _check(
    config: TransformerConfig,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None,
    piece_size: int,
    memory: MemoryMode,
) -> tuple[np.ndarray, np.ndarray]:
    """`tokens` and `lengths` as int32 arrays."""
    if piece_size < 1:
        raise UserError(f"piece_size {piece_size} must be at least 1")
    tokens = np.asarray(tokens)
    batch_size = len(state.position)
    if tokens.ndim != 2 or len(tokens) != batch_size:
        raise UserError(
            f"tokens have shape {tokens.shape} and the state {batch_size} rows: they must be "
            f"({batch_size}, T)"
        )
    lengths = np.full(batch_size, tokens.shape[1]) if lengths is None else np.asarray(lengths)
    if lengths.shape != (batch_size,) or lengths.min() < 0 or lengths.max() > tokens.shape[1]:
        raise UserError(
            f"lengths {lengths.tolist()} do not fit tokens of shape {tokens.shape}: one length "
            f"from 0 to {tokens.shape[1]} per row"
        )
    for row, length in zip(tokens, lengths, strict=True):
        check_tokens(row[:length], config.vocab_size)
    check_capacity(config, state, lengths)
    check_memory(config, memory)
    return tokens.astype(np.int32, copy=False), lengths.astype(np.int32)


@functools.partial(jax.jit, static_argnames=("halo", "has_gap"), donate_argnums=(1, 2))
def read_last(
    model: InferenceModel,
    state: InferenceState,
    hidden: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    is_plain: jax.Array | None,
    *,
    halo: int,
    has_gap: bool,
) -> tuple[Float[Array, "B D"], InferenceState]:
    """(hidden states at every row's last token, `hidden` for a row without one; state)."""
    h, state = advance(model, state, tokens, lengths, halo=halo, has_gap=has_gap, is_plain=is_plain)
    return newest(h, lengths, hidden), state


_read = jax.jit(advance, static_argnames=("halo", "has_gap"), donate_argnums=1)
_with_fresh_memories = jax.jit(fresh_memories, donate_argnums=1)
_logits = jax.jit(head_logits)
