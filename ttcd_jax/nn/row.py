"""Positions, documents and embeddings of the tokens of whole rows, or of pieces of rows."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int
from ttcd_kernels.dual_window.tiles import documents

from ttcd_jax.errors import UserError

Hidden = Float[Array, "B T D"]  # hidden states, or another vector per token
# What in-place memories hold instead of their own writes: those of the row before, in a batch of
# rows of one document each; or their errors under keys of other tokens of the chunk.
Control = Literal["foreign", "shuffled"]
Streams = tuple[Hidden, Hidden | None]  # the residual stream; a teacher's and a student's


def check_array(owner: str, name: str, x: Any, kind: str, *shape: int | str) -> None:
    """Raises `UserError` unless x is an array of this kind ("int" or "float") and shape, in which a
    letter stands for any size."""
    is_array = isinstance(x, jax.Array | np.ndarray | nnx.Variable)
    wanted = {"int": jnp.integer, "float": jnp.floating}[kind]
    if not (
        is_array
        and jnp.issubdtype(x.dtype, wanted)
        and x.ndim == len(shape)
        and all(isinstance(n, str) or n == found for n, found in zip(shape, x.shape, strict=True))
    ):
        got = f"{x.dtype} {list(x.shape)}" if is_array else f"a {type(x).__name__}, no array"
        verb = "are" if name.endswith("s") else "is"
        sizes = ", ".join(map(str, shape))
        raise UserError(f"{name} {verb} {got}: {owner} needs {kind} [{sizes}]")


class Part(NamedTuple):
    """What a memory goes on from in a part of a row, whole chunks of it except at the row's end:
    its state before the part (None: the start), and the document of the token before it."""

    state: Any = None
    previous_segment: Int[Array, " B"] | None = None


class Row(NamedTuple):
    """Whole rows, several documents packed into each."""

    # Rotary attention takes differences inside a document only, a memory of LaCT does not.
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None = None  # one value per document; None: one document
    embeddings: Hidden | None = None  # of the tokens, as the model looked them up
    # True: `forward` of a memory with a teacher returns `memory.distillation.Distillation`, not
    # `MemoryStats`. Known when it is traced; None is no leaf.
    measures: Literal[True] | None = None
    control: Control | None = None  # likewise
    streams: Streams | None = None  # before the sub-layer that is given this row
    # A part of a row: `forward` of a memory in place returns its `methods.in_place.Operands`.
    part: Part | None = None

    @classmethod
    def of(
        cls,
        h: Float[Array, "B T *rest"] | Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        embeddings: Hidden | None = None,
    ) -> "Row":
        """The row of `h`; positions default to 0, 1, ... from the start of each document. Raises
        `UserError` for positions and documents of another shape, or not int."""
        for name, x in (("positions", positions), ("segment_ids", segment_ids)):
            if x is not None:
                check_array("the row", name, x, "int", *h.shape[:2])
        row = cls(jnp.zeros(h.shape[:2], jnp.int32), segment_ids, embeddings)
        return row._replace(positions=row.offsets if positions is None else positions)

    @property
    def offsets(self) -> Int[Array, "B T"]:
        """The number of tokens of its document before each token."""
        shape = self.positions.shape
        index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return index if self.segment_ids is None else index - documents(self.segment_ids).start


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Cut:
    """The chunks and the attention window that a piece was made for, None as in `Piece.of`; its
    positions, where they are known."""

    chunk_size: int | None = None
    window: int | None = None
    length: int | None = None

    def check(self, name: str, own: int | None) -> None:
        """Raises `UserError` for a layer whose `name` is another."""
        if getattr(self, name) != own:
            raise UserError(
                f"the piece was made for {name} {getattr(self, name)} and the layer has {own}: "
                f"give Piece.of {name}={own}"
            )


class Piece(NamedTuple):
    """The next T positions of every row, the first `lengths` of them tokens, the rest padding; a
    row of a piece is one document. A piece fits the chunks of the model's memories in one of two
    cases: no row has more tokens than its open chunk has room for (T <= L), or every row that has
    any is at the start of a chunk and T is a multiple of L."""

    start: Int[Array, " B"]  # position in its row of the piece's first token
    lengths: Int[Array, " B"]
    phase: Int[Array, " B"] | None  # tokens in the row's open chunk; None: no memory has chunks
    # Static: the most earlier positions that a query of any row attends to. One token (T = 1)
    # attends to the whole cache.
    halo: int
    has_gap: bool  # static: some row has fewer than `halo` positions before the piece
    # Rows that bypass in-place memories; True: all do, and the memories are not even computed.
    is_plain: Bool[Array, " B"] | Literal[True] | None = None
    embeddings: Hidden | None = None
    cut: Cut = Cut()
    streams: Streams | None = None  # as in a `Row`

    @classmethod
    def of(
        cls,
        h: Hidden,
        start: int | np.integer | Int[Array, " B"],
        *,
        chunk_size: int | None = None,
        window: int | None = None,
        lengths: Int[Array, " B"] | None = None,
        embeddings: Hidden | None = None,
    ) -> "Piece":
        """The piece h of rows in which `start` tokens came before, of which the first `lengths`
        (default: all) are tokens; of a layer with these chunks (None: no memory has any) and this
        attention window. IP-TTT with `target="embedding"` needs the `embeddings` of its tokens too.
        Single tokens may have a `start` per row [B], even a traced one. Raises `UserError` for a
        longer piece across chunks, and for impossible starts and lengths."""
        batch, length = h.shape[:2]
        start = int(start) if isinstance(start, np.integer) else start
        if not isinstance(start, int):
            check_array("the piece", "start", start, "int", *np.shape(start) and (batch,))
        if lengths is not None:
            check_array("the piece", "lengths", lengths, "int", batch)
        for name, counts, most in (("start", start, np.inf), ("lengths", lengths, length)):
            if counts is None or isinstance(counts, Tracer):
                continue
            if np.size(counts) and not 0 <= np.min(counts) <= np.max(counts) <= most:
                raise UserError(f"{name} {np.asarray(counts).tolist()} is not in 0 .. {most}")
        halo, has_gap = 0, False
        if length > 1:
            if not isinstance(start, int):
                raise UserError(
                    f"a piece of {length} tokens needs one start for all rows, an int: pass pieces "
                    "of one token to rows of different lengths"
                )
            phase = start % (chunk_size or 1)
            if chunk_size and phase + length > chunk_size and (phase or length % chunk_size):
                room = chunk_size - phase
                raise UserError(
                    f"a piece of {length} tokens does not fit the {room} that the open chunk of "
                    f"{chunk_size} has room for: pass at most {room}, or whole chunks at the start "
                    "of one"
                )
            halo = start if window is None else window - 1
            has_gap = start < halo
        starts = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))
        counts = jnp.full(batch, length, jnp.int32) if lengths is None else lengths
        phases = None if chunk_size is None else starts % chunk_size
        cut = Cut(chunk_size, window, length)
        return cls(starts, counts, phases, halo, has_gap, embeddings=embeddings, cut=cut)

    def under(self, window: int | None) -> "Piece":
        """The piece for a layer of this window. Raises `UserError` for one that is wider than what
        the piece was made for."""
        if window is None or (self.cut.window is not None and window >= self.cut.window):
            self.cut.check("window", window)
            return self
        return self._replace(halo=min(self.halo, window - 1))

    def positions(self, length: int) -> Int[Array, "B T"]:
        return self.start[:, None] + jnp.arange(length, dtype=jnp.int32)

    def is_token(self, length: int) -> Bool[Array, "B T"]:
        return jnp.arange(length) < self.lengths[:, None]


def where_rows[Tree](mask: jax.Array, x: Tree, *other: Tree) -> Tree:
    """Every array of the tree x where `mask` is true, else of a like tree `other`, without one 0;
    the mask has the first axes of all arrays."""

    def choose(x: jax.Array, other: jax.Array | int = 0) -> jax.Array:
        return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, other)

    return jax.tree.map(choose, x, *other)


def zero_padding[Tree](tree: Tree, piece: Piece) -> Tree:
    """Arrays [B, T, ...] with the padding of a piece set to zero."""
    length = jax.tree.leaves(tree)[0].shape[1]
    return where_rows(piece.is_token(length), tree)


def scatter(buffer: jax.Array, new: jax.Array, slots: Int[Array, "B T"]) -> jax.Array:
    """buffer [B, W, ...] with new [B, T, ...] in `slots`; slots of W and above are dropped."""
    return jax.vmap(lambda row, new, slots: row.at[slots].set(new, mode="drop"))(buffer, new, slots)


def scatter_from(
    buffer: jax.Array, new: jax.Array, start: Int[Array, " B"], lengths: Int[Array, " B"]
) -> jax.Array:
    """buffer [B, W, ...] with the first `lengths` of new [B, T, ...] from slot `start` on."""
    offset = jnp.arange(new.shape[1])
    slots = start[:, None] + offset
    is_kept = (slots >= 0) & (offset < lengths[:, None])
    return scatter(buffer, new, jnp.where(is_kept, slots, buffer.shape[1]))


def no_tail[Tree](like: Tree, size: int) -> Tree | None:
    """Of arrays [B, T, ...] the zeros [B, size, ...] before a row, at which a causal convolution
    looks back; None without one."""
    zeros = jax.tree.map(lambda x: jnp.zeros((len(x), size, *x.shape[2:]), x.dtype), like)
    return zeros if size else None


def after_tail[Tree](tail: Tree | None, x: Tree) -> Tree:
    """Arrays [B, T, ...] preceded by the tail."""
    if tail is None:
        return x
    return jax.tree.map(lambda tail, x: jnp.concatenate([tail, x], axis=1), tail, x)


def next_tail[Tree](tail: Tree | None, x: Tree, piece: Piece) -> Tree | None:
    """The tail after the piece."""

    def newest(tail: jax.Array, around: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, tail.shape[1]))(
            around, piece.lengths
        )

    return None if tail is None else jax.tree.map(newest, tail, after_tail(tail, x))
