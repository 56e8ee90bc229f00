"""Prompts of any length, after any state, read in pieces of bounded size.

    first piece     every row to the end of its open chunk, if some row is inside one
    others          whole chunks of all rows, all pieces of one size, the last one padded
    attention       the window before a piece; full attention: a power of two of keys

The pieces of a prompt need two programs, the first and one for all others: compiling one takes
longer than reading thousands of tokens.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ttcd_jax.errors import UserError
from ttcd_jax.inference.decode import MemoryMode, advance, check_memory, head_logits
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.state import InferenceState, cache_slots, fresh_memories
from ttcd_jax.models.config import TransformerConfig, memory_chunk
from ttcd_jax.nn.row import check_array
from ttcd_jax.tokens import check_tokens

# Tokens of a row in one piece, by default: the arrays of 512 stay in a CPU's cache.
PIECE_SIZE, CPU_PIECE_SIZE = 4096, 512
LEAST_SIZE = 16  # shorter pieces are padded to it, except a single token
_UNIT = 128  # pieces of models without chunks are multiples of it, or shorter
# For every piece: the number of tokens read of each row [B], their final hidden states, padded, and
# the state after them.
Pieces = Iterator[tuple[np.ndarray, Float[Array, "B T D"], InferenceState]]

read_piece = jax.jit(advance, static_argnames=("halo", "has_gap"), donate_argnums=1)
_with_fresh_memories = jax.jit(fresh_memories, donate_argnums=1)
_logits = jax.jit(head_logits)


def prefill(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    piece_size: int | None = None,
    memory: MemoryMode = "kept",
) -> tuple[Float[Array, "B V"], InferenceState]:
    """(logits after the last token of every row, state after it) for tokens [B, T] int, the first
    `lengths` of each row (default: all T), at least one. `state` is donated: do not use it again.

    `piece_size` bounds the tokens of a row that are read at once, hence device memory, and changes
    no result; None: `PIECE_SIZE`, on a CPU its own. Rows may differ in length and position. Raises
    `UserError` and `DataError` before anything is read: shapes, tokens outside the vocabulary, more
    tokens than a state of full attention holds.
    """
    pieces = stream(model, state, tokens, lengths, piece_size=piece_size, memory=memory, fewest=1)
    last = jnp.zeros((len(tokens), model.config.dim), model.config.precision.compute_dtype)
    for counts, hidden, after in pieces:
        last, state = newest_hidden(hidden, counts, last), after
    return _logits(model, last), state


def stream(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    piece_size: int | None = None,
    memory: MemoryMode = "kept",
    fewest: int = 0,
) -> Pieces:
    """`prefill` as an iterator over pieces; each donates the state before it."""
    if piece_size is not None and piece_size < 1:
        raise UserError(f"piece_size {piece_size} must be at least 1")
    tokens, lengths = _check(model.config, state, tokens, lengths, fewest)
    check_memory(model.config, memory)

    def pieces(state: InferenceState) -> Pieces:
        chunk_size, is_plain = memory_chunk(model.config), None
        if memory == "published":
            assert chunk_size is not None
            state = _with_fresh_memories(model, state)
            is_plain = jnp.asarray(lengths < chunk_size)
        position, slots = np.asarray(state.position), cache_slots(state)
        phase = (position - np.asarray(state.chunk_start)) % (chunk_size or 1)
        done, window = np.zeros_like(lengths), model.config.window
        most = even_size(model.config, int(lengths.max(initial=0)), piece_size)
        while (done < lengths).any():
            size, counts = _next_piece(lengths - done, phase + done, chunk_size, most)
            index = np.minimum(done[:, None] + np.arange(size), tokens.shape[1] - 1)
            piece = np.take_along_axis(tokens, index, axis=1)
            before, halo = (position + done)[counts > 0], 0
            if size > 1 and slots is not None and before.max():
                halo = _round_up(int(before.max()), slots) if window is None else window - 1
            options = {"halo": halo, "has_gap": bool(before.min() < halo), "is_plain": is_plain}
            hidden, state = read_piece(model, state, piece, counts, **options)
            yield counts, hidden, state
            done = done + counts

    return pieces(state)


@jax.jit
def newest_hidden(
    hidden: Float[Array, "B T D"], counts: Int[Array, " B"], before: Float[Array, "B D"]
) -> Float[Array, "B D"]:
    """The hidden state of every row's last token; `before` for a row without one."""
    last = jnp.maximum(counts - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    return jnp.where(counts[:, None] > 0, newest, before)


def even_size(config: TransformerConfig, longest: int, piece_size: int | None) -> int:
    """The size of pieces, at most `piece_size`, of rows of at most `longest` tokens: whole chunks
    if two fit, with little padding in the last piece, and few values over all lengths."""
    if piece_size is None:
        piece_size = PIECE_SIZE
        if jax.default_backend() == "cpu":  # two pieces to a window would need a third program
            piece_size = min(max(CPU_PIECE_SIZE, config.window or 0), PIECE_SIZE)
    unit = memory_chunk(config) or _UNIT
    least, most = min(piece_size, unit), piece_size // unit
    if longest <= least or most < 2:
        return _round_up(longest, least)
    units = -(-longest // unit)
    even = -(-units // -(-units // most))
    step = 1 << max(even.bit_length() - 3, 0)  # four sizes between a power of two and the next
    return unit * min(-(-even // step) * step, most)


def _next_piece(
    left: np.ndarray, phase: np.ndarray, chunk_size: int | None, size: int
) -> tuple[int, np.ndarray]:
    """(T, tokens of each row) of the next piece of rows with `left` tokens to read, which begin
    `phase` tokens after the start of a chunk; `size` is that of `even_size`."""
    counts = np.minimum(left, size)
    if chunk_size is None:
        return size, counts
    room = chunk_size - phase % chunk_size
    if ((room == chunk_size) | (left == 0)).all():
        return size, counts
    return min(size, chunk_size), np.minimum(counts, room)


def _round_up(count: int, most: int) -> int:
    return min(1 if count == 1 else max(1 << (count - 1).bit_length(), LEAST_SIZE), most)


def check_capacity(config: TransformerConfig, state: InferenceState, lengths: np.ndarray) -> None:
    """Raises `UserError` when rows of full attention would outgrow their state."""
    slots = cache_slots(state)
    if config.window is not None or slots is None:
        return
    most = int((np.asarray(state.position) + lengths).max(initial=0))
    if most > slots:
        raise UserError(
            f"a row would have {most} tokens and the state of full attention holds {slots}: start "
            f"it with max_length={most} or more"
        )


def _check(
    config: TransformerConfig,
    state: InferenceState,
    tokens: np.ndarray,
    lengths: np.ndarray | None,
    fewest: int,
) -> tuple[np.ndarray, np.ndarray]:
    tokens, batch_size = np.asarray(tokens), len(state.position)
    check_array("the state", "tokens", tokens, "int", batch_size, "T")
    most = tokens.shape[1]
    lengths = np.full(batch_size, most) if lengths is None else np.asarray(lengths)
    is_count = lengths.shape == (batch_size,) and np.issubdtype(lengths.dtype, np.integer)
    if not is_count or ((lengths < fewest) | (lengths > most)).any():
        raise UserError(
            f"lengths {lengths.tolist()} do not fit tokens of shape {tokens.shape}: one length "
            f"from {fewest} to {most} per row"
        )
    for row, length in zip(tokens, lengths, strict=True):
        check_tokens(row[:length], config.vocab_size)
    check_capacity(config, state, lengths)
    tokens = np.where(np.arange(most) < lengths[:, None], tokens, 0)  # padding may be any number
    return tokens.astype(np.int32), lengths.astype(np.int32)
