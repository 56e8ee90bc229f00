"""The interface of a memory: a state that the tokens of a row read and write, left to right.

A memory is one object, a pytree whose arrays are parameters. Three drivers run it: over a row
(`Memory.row`), over rows shared by several devices (`rows.over_rows`), over a row in pieces
(`pieces.over_piece`). Most memories go chunk by chunk (`ChunkedMemory`).
"""

import abc
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.memory.chunks import MemoryMask, memory_mask
from ttcd_jax.nn.row import where_rows
from ttcd_jax.sharding.rules import Names

ROWS: Names = ("batch", "length")
type AxisNames = Names | tuple[Any, ...]  # of an array, or of every array of a tuple


class Axes(NamedTuple):
    """Logical axes, one tuple of names for all arrays of a tree or a tuple of them; dimensions that
    are not named are whole on every device."""

    memory: AxisNames = ()
    reads: AxisNames = ROWS
    writes: AxisNames = ROWS
    y: AxisNames = ROWS
    sums: tuple[str, ...] = ()  # mesh axes over which the devices' results are summed


class Memory[Writes, State, Prepared](abc.ABC):
    """A memory along rows, read by an array [B, T, ...] (by chunk: [B, C, L, ...]). `Writes`: the
    operands of its writes, a tuple of arrays with the axes of a read. `State`: the memory between
    two tokens, arrays with the batch axis first. `Prepared`: the input of `row`."""

    def axes(self) -> Axes:
        return Axes()

    @abc.abstractmethod
    def prepared(
        self,
        reads: Float[Array, "B ..."],
        writes: Writes,
        segments: Int[Array, "B ..."] | None,
        *,
        length: int,
        previous_segment: Int[Array, " B"] | None,
    ) -> Prepared:
        """The input of `row`: operands of reads and writes with their documents.
        `previous_segment`: the document that the state before the row belongs to."""

    @abc.abstractmethod
    def row(
        self, prepared: Prepared, state: State | None = None, *, needs_end: bool = True
    ) -> tuple[Float[Array, "B ..."], State]:
        """(y, state after the row) from the state before it (default: the start). Without
        `needs_end` the returned state is arbitrary."""

    @abc.abstractmethod
    def start_of(self, prepared: Prepared) -> State:
        """The state before a document, for the rows of `prepared`."""

    def squared_size(self, state: State) -> Float[Array, " B"]:
        """The squared norm of the accumulated writes, for statistics; by default that of the state,
        for memories that start at zero."""
        arrays = [x.astype(jnp.float32) for x in jax.tree.leaves(state)]
        return jnp.asarray(sum(jnp.sum(x * x, axis=range(1, x.ndim)) for x in arrays))


class Summary(NamedTuple):
    """The effect of consecutive tokens on any state before them: it becomes kept state + added."""

    kept: Array  # the share or the map that is left of a state
    added: Array  # the state after the tokens from one of zero


class AssociativeMemory[Writes, State, Prepared](Memory[Writes, State, Prepared]):
    """A memory in which consecutive tokens have a `Summary`, whose `added` is a state. Summaries
    compose associatively, so devices that share a row need only one prefix."""

    @abc.abstractmethod
    def summary(self, prepared: Prepared) -> Summary:
        """The summary of the tokens of `prepared`."""

    @abc.abstractmethod
    def combine(self, first: Summary, then: Summary) -> Summary:
        """The summary of `first` followed by `then`."""

    @abc.abstractmethod
    def neutral(self, summary: Summary) -> Summary:
        """The summary of no tokens, in the shapes of `summary`."""


@struct.dataclass
class Chunks[Writes]:
    """Operands of reads and writes by chunk, [B, C, L, ...], their mask, and the documents."""

    reads: Float[Array, "B C L ..."]
    writes: Writes
    mask: MemoryMask
    segments: Int[Array, "B C L"] | None = None


class ChunkedMemory[Writes, State](Memory[Writes, State, Chunks[Writes]]):
    """A memory that is read and written chunk by chunk: `start`, `read` and `write` define it.

    `reads_own_chunk`: by its `advance` a token also reads what the earlier tokens of its chunk
    wrote, so that the size of chunks changes nothing but the order of sums."""

    reads_own_chunk: ClassVar[bool] = False

    @abc.abstractmethod
    def start(self, batch_size: int) -> State:
        """The state before a document."""

    @abc.abstractmethod
    def read(self, state: State, reads: Float[Array, "B L ..."]) -> Float[Array, "B L ..."]:
        """y [B, L, ...] of the tokens of a chunk; `state` is the one before it."""

    @abc.abstractmethod
    def write(self, state: State, writes: Writes, mask: Bool[Array, "#B L"] | None = None) -> State:
        """The state after a chunk in which the tokens of the mask (None: all) write."""

    def prepared(
        self,
        reads: Float[Array, "B C L ..."],
        writes: Writes,
        segments: Int[Array, "B C L"] | None,
        *,
        length: int,
        previous_segment: Int[Array, " B"] | None = None,
    ) -> Chunks[Writes]:
        """Operands [B, C, L, ...] of rows of `length` tokens with their mask."""
        mask = memory_mask(segments, length, reads.shape[2], previous_segment)
        return Chunks(reads, writes, mask, segments)

    def start_of(self, prepared: Chunks[Writes]) -> State:
        return self.start(len(prepared.reads))

    def reset(self, state: State, chunk: Chunks[Writes]) -> State:
        """The state that a chunk writes into, which begins with its last document."""
        if chunk.mask.resets is None:
            return state
        return where_rows(chunk.mask.resets, self.start(len(chunk.reads)), state)

    def read_chunk(self, state: State, chunk: Chunks[Writes]) -> Float[Array, "B L ..."]:
        """y of a chunk [B, L, ...]. Tokens of another document than the state's read the start."""
        y = self.read(state, chunk.reads)
        if chunk.mask.reads is None:
            return y
        start = self.read(self.start(len(chunk.reads)), chunk.reads)
        return where_rows(chunk.mask.reads, y, start)

    def advance(self, state: State, chunk: Chunks[Writes]) -> tuple[State, Float[Array, "B L ..."]]:
        """(the state after a chunk [B, L, ...], y of its tokens)."""
        y = self.read_chunk(state, chunk)
        return self.write(self.reset(state, chunk), chunk.writes, chunk.mask.writes), y

    def row(
        self, prepared: Chunks[Writes], state: State | None = None, *, needs_end: bool = True
    ) -> tuple[Float[Array, "B C L *rest"], State]:
        """A scan over chunks, each recomputed in the backward."""
        chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), prepared)
        written = chunks if needs_end else jax.tree.map(lambda x: x[:-1], chunks)
        advance = jax.checkpoint(self.advance, prevent_cse=False)
        state = self.start_of(prepared) if state is None else state
        end, y = jax.lax.scan(advance, state, written)
        if not needs_end:
            last = self.read_chunk(end, jax.tree.map(lambda x: x[-1], chunks))
            y = jnp.concatenate([y, last[None]])
        return jnp.moveaxis(y, 0, 1), end
