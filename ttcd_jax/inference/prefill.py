"""Reading prompts: any length, any state in front of them, in pieces of bounded memory.

    first piece     every row to the end of its open chunk, if some row stands inside one
    others          whole chunks of all rows, as many as a piece holds
    attention       the window in front of a piece; of full attention a power of two of keys

A piece has one of few shapes, so that few programs are compiled.
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

# "kept": what is read and generated goes on being written. "published": as the authors' code does
# (its memory is off whenever fewer tokens than a chunk are passed: at every step of decoding, and
# for short prompts; a later prompt finds it empty).
Memory = Literal["kept", "published"]
PIECE_SIZE = 4096
LEAST_SIZE = 16  # shorter pieces are padded to it, but a single token


def prefill(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    piece_size: int = PIECE_SIZE,
    memory: Memory = "kept",
) -> tuple[Float[Array, "B V"], InferenceState]:
    """(logits behind every row's last token, the state there), after reading tokens [B, T] int, of
    which a row has `lengths` (default: all T). `state` is donated: do not use it again.

    `piece_size` bounds the tokens of a row that are read at once, hence the memory, and changes no
    result. Rows may differ in length and in where they stand. Every row needs a token. Raises
    `UserError` and `DataError` before anything is read: shapes, tokens outside the vocabulary, more
    tokens than a state of full attention holds.
    """
    tokens, lengths = _checked(model.config, state, tokens, lengths, piece_size, memory)
    if lengths.min() < 1:
        raise UserError(
            f"row {int(lengths.argmin())} has no token: logits need at least one, a bos for example"
        )
    state, reading = _begin(model, state, lengths, piece_size, memory)
    hidden = jnp.zeros((len(tokens), model.config.dim), model.config.precision.compute_dtype)
    for piece, counts, seen in reading.pieces(tokens):
        hidden, state = read_last(model, state, hidden, piece, counts, reading.is_plain, **seen)
    return _logits(model, hidden), state


def stream(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    piece_size: int = PIECE_SIZE,
    memory: Memory = "kept",
) -> Iterator[tuple[np.ndarray, Float[Array, "B T D"], InferenceState]]:
    """`prefill`, piece after piece: (how many tokens of each row it read [B], their final hidden
    states [B, T, D], padded, the state behind them). Each state is donated when the next piece is
    asked for."""
    tokens, lengths = _checked(model.config, state, tokens, lengths, piece_size, memory)
    state, reading = _begin(model, state, lengths, piece_size, memory)
    for piece, counts, seen in reading.pieces(tokens):
        hidden, state = _read(model, state, piece, counts, reading.is_plain, **seen)
        yield counts, hidden, state


class _Reading(NamedTuple):
    """What the host knows of rows that are being read."""

    position: np.ndarray  # [B], in front of the first piece
    phase: np.ndarray  # [B], tokens in the open chunks there
    lengths: np.ndarray  # [B], tokens to read
    chunk_size: int | None
    piece_size: int
    window: int | None  # of attention; None: full
    num_slots: int | None  # positions that rings hold; None: no attention
    is_plain: jax.Array | None

    def pieces(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, int]]]:
        """(tokens [B, T], how many of them are real [B], halo and has_gap) of every piece."""
        done = np.zeros_like(self.lengths)
        while (done < self.lengths).any():
            size, counts = self._next(done)
            places = done[:, None] + np.arange(size)
            piece = np.take_along_axis(tokens, np.minimum(places, tokens.shape[1] - 1), axis=1)
            yield piece, counts.astype(np.int32), self._seen(done, counts)
            done = done + counts

    def _next(self, done: np.ndarray) -> tuple[int, np.ndarray]:
        """(T, tokens of each row) of the piece behind `done`."""
        left = self.lengths - done
        if self.chunk_size is None:
            counts = np.minimum(left, self.piece_size)
            return _rounded_up(int(counts.max()), self.piece_size), counts
        room = self.chunk_size - (self.phase + done) % self.chunk_size
        is_at_start = (room == self.chunk_size) | (left == 0)
        chunks = min(self.piece_size, left.max()) // self.chunk_size
        if is_at_start.all() and chunks > 1:
            size = self.chunk_size * (1 << int(chunks).bit_length() - 1)
            return size, np.minimum(left, size)
        most = min(self.piece_size, self.chunk_size)
        counts = np.minimum(np.minimum(left, room), most)
        return _rounded_up(int(counts.max()), most), counts

    def _seen(self, done: np.ndarray, counts: np.ndarray) -> dict[str, int]:
        start = (self.position + done)[counts > 0]
        if counts.max() == 1 or not start.max():
            return {"halo": 0, "has_gap": False}
        whole = _rounded_up(int(start.max()), self.num_slots)
        halo = whole if self.window is None else self.window - 1
        return {"halo": halo, "has_gap": bool(start.min() < halo)}


def _rounded_up(count: int, most: int | None) -> int:
    """The power of two from `count` up, at least `LEAST_SIZE` (but 1 for 1), at most `most`."""
    power = 1 if count == 1 else max(1 << (count - 1).bit_length(), LEAST_SIZE)
    return power if most is None else min(power, most)


def _begin(
    model: InferenceModel,
    state: InferenceState,
    lengths: np.ndarray,
    piece_size: int,
    memory: Memory,
) -> tuple[InferenceState, _Reading]:
    chunk_size, is_plain = memory_chunk(model.config), None
    if memory == "published":
        assert chunk_size is not None
        state = _restarted(model, state)
        is_plain = jnp.asarray(lengths < chunk_size)
    position, chunk_start = np.asarray(state.position), np.asarray(state.chunk_start)
    reading = _Reading(
        position,
        (position - chunk_start) % (chunk_size or 1),
        lengths,
        chunk_size,
        piece_size,
        model.config.window,
        cache_slots(state),
        is_plain,
    )
    return state, reading


def check_capacity(config: TransformerConfig, state: InferenceState, lengths: np.ndarray) -> None:
    """Raises `UserError` when rows of full attention would grow beyond what the state holds."""
    slots = cache_slots(state)
    if config.window is not None or slots is None:
        return
    most = int((np.asarray(state.position) + lengths).max())
    if most > slots:
        raise UserError(
            f"a row would have {most} tokens and the state of full attention holds {slots}: start "
            f"it with max_length={most} or more"
        )


def check_memory(config: TransformerConfig, memory: Memory) -> None:
    """Raises `UserError` for a memory that the model has not."""
    if memory not in get_args(Memory):
        raise UserError(f"memory {memory!r} is not one of {', '.join(get_args(Memory))}")
    if memory == "published" and not has_in_place_memory(config):
        raise UserError(
            "memory='published' switches in-place memories off while decoding, and a model of "
            f"method {config.method!r} has none: use 'kept'"
        )


def _checked(config, state, tokens, lengths, piece_size, memory) -> tuple[np.ndarray, np.ndarray]:
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


_restarted = jax.jit(fresh_memories, donate_argnums=1)


@functools.partial(jax.jit, static_argnames=("halo", "has_gap"), donate_argnums=1)
def _read(model, state, tokens, lengths, is_plain, *, halo, has_gap):
    return advance(model, state, tokens, lengths, halo=halo, has_gap=has_gap, is_plain=is_plain)


@functools.partial(jax.jit, static_argnames=("halo", "has_gap"), donate_argnums=(1, 2))
def read_last(model, state, hidden, tokens, lengths, is_plain, *, halo, has_gap):
    h, state = advance(model, state, tokens, lengths, halo=halo, has_gap=has_gap, is_plain=is_plain)
    return newest(h, lengths, hidden), state


_logits = jax.jit(head_logits)
