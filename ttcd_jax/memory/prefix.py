"""A memory that is a prefix sum: chunk i is read through W_i = W_base + eta * S_i,

    S_{i+1} = a_i S_i + delta_w_i,   a_i = 1 as published: S_i = sum_{j<i} delta_w_j

With decays the columns of S are Q groups of D / Q, each with its own factor a_i, the product of
exp(log_decay) of the tokens that write into chunk i. A document boundary is a_i = 0. Three forms of
one function, equal in values and gradients:

    blocked      a scan over blocks of chunks with an associative scan inside each, and a custom
                 VJP that keeps no state
    associative  `jax.lax.associative_scan` over all chunks; every W_i exists at once
    attention    y_i = z_i W_base + eta * sum_{j<i} a_{j+1} .. a_{i-1} (z_i k_j^T) e_j, O(T^2): for
                 short rows

"auto", the default, takes attention where it needs fewer products (`at_length`), else blocked. The
read is two products, z W_base + eta * (z S), since rounding their sum to bfloat16, as the published
code does (`folds_state`), loses digits of S. All sums of delta_w are in `state_dtype`.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ttcd_jax.memory.chunks import MemoryMask, masked
from ttcd_jax.memory.protocol import ROWS, AssociativeMemory, Axes, ChunkedMemory, Chunks, Summary
from ttcd_jax.nn.linear import newton_schulz, product

Sum = Float[Array, "B F D"]  # of delta_w, without eta
Outputs = tuple[jax.Array, Sum]  # y of chunks, and the state after them
Form = Literal["auto", "blocked", "associative", "attention"]


class PrefixOptions(NamedTuple):
    """Static options of a memory that is a prefix sum."""

    eta: float
    orthogonalizes: bool = False
    folds_state: bool = False
    form: Form = "auto"
    block_chunks: int = 4  # chunks whose states exist at once in the blocked form
    state_dtype: DTypeLike = jnp.float32

    def at_length(self, length: int, hidden_dim: int, dim: int) -> "PrefixOptions":
        """The options with the form chosen for rows of T = `length`: "auto" takes the one with
        fewer multiplications, forward and backward. Per token, states take 7 F D, scores 3 T (F +
        D), and F D for the state after the row."""
        if self.form != "auto":
            return self
        is_short = length * (hidden_dim + dim) < 2 * hidden_dim * dim
        has_scores = is_short and not (self.folds_state or self.orthogonalizes)
        return self._replace(form="attention" if has_scores else "blocked")


class Writes(NamedTuple):
    """Operands of the write of a chunk [B, C, L, ...], of a row's or of the open one's [B, L, ...].
    Without `log_decay` nothing decays, without `rate` every write replaces as a whole."""

    keys: Float[Array, "*rest F"]
    errors: Float[Array, "*rest D"]
    # The logarithm, at most 0, of the share of every group of columns that is left after a token.
    log_decay: Float[Array, "*rest Q"] | None = None
    rate: Float[Array, "*rest"] | None = None  # of `running.CorrectingMemory` alone


@struct.dataclass
class SumMemory(ChunkedMemory[Writes, Sum]):
    """W_base and a sum, read by features z [B, C, L, F] and written by `Writes`."""

    w_base: Float[Array, "F D"]
    options: PrefixOptions = struct.field(pytree_node=False)

    def start(self, batch_size: int) -> Sum:
        return jnp.zeros((batch_size, *self.w_base.shape), self.options.state_dtype)

    def read(self, state: Sum, reads: Float[Array, "B L F"]) -> Float[Array, "B L D"]:
        """z W_base + eta z S."""
        return _read(self, state[:, None], reads[:, None], None)[:, 0]


@struct.dataclass
class PrefixMemory(SumMemory, AssociativeMemory[Writes, Sum, Chunks[Writes]]):
    """The sum of delta_w as a memory."""

    def axes(self) -> Axes:
        """F is sharded, except where scores (the attention form) or norms sum over it."""
        if self.options.form == "attention" or self.options.orthogonalizes:
            return Axes()
        features = (*ROWS, None, "mlp")
        writes = Writes._make((features, ROWS, ROWS, ROWS))
        return Axes(("mlp",), features, writes, ROWS, ("tensor",))

    def write(self, state: Sum, writes: Writes, mask: Bool[Array, "#B L"] | None = None) -> Sum:
        """a S + delta_w of the chunk."""
        errors = masked(writes.errors, mask)[:, None]
        delta = chunk_delta(self.options, errors, writes.keys[:, None])[:, 0]
        return decayed(state, writes.log_decay, mask) + delta

    def row(
        self, prepared: Chunks[Writes], state: Sum | None = None, *, needs_end: bool = True
    ) -> tuple[Float[Array, "B C L D"], Sum]:
        """`Memory.row`, differentiable in everything but the mask, through both results."""
        options, (keys, errors, log_decay, _), mask = self.options, prepared.writes, prepared.mask
        # The published read knows neither documents nor decays.
        assert not options.folds_state or (mask.reads is None and log_decay is None)
        state = self.start_of(prepared) if state is None else state
        writes = Writes(keys, masked(errors, mask.writes), _of_chunks(log_decay, mask))
        chunks = Chunks(prepared.reads, writes, mask._replace(writes=None))
        forms = {"attention": _attention_form, "associative": _read_block}
        return forms.get(options.form, _blocked)(self, state, chunks)

    def summary(self, prepared: Chunks[Writes]) -> Summary:
        (keys, errors, log_decay, _), mask = prepared.writes, prepared.mask
        errors = masked(errors, mask.writes)
        left = _left(_of_chunks(log_decay, mask), mask.resets)
        whole = jnp.ones((len(keys), 1), self.options.state_dtype) if left is None else left[:, 0]
        if self.options.orthogonalizes:
            delta = chunk_delta(self.options, errors, keys)
            return Summary(whole, (delta if left is None else times(left[:, 1:], delta)).sum(1))
        if left is not None:
            errors = times(left[:, 1:].astype(errors.dtype), errors)
        return Summary(whole, _product(self.options, "BCLF,BCLD->BFD", keys, errors))

    def combine(self, first: Summary, then: Summary) -> Summary:
        return decayed_sum(first, then)

    def neutral(self, summary: Summary) -> Summary:
        return Summary(jnp.ones_like(summary.kept), jnp.zeros_like(summary.added))


# Chunks [B, C, ...], or those of a block [B, G, ...]: errors are masked, decays summed by chunk.
_Summed = Chunks[Writes]
_Inputs = tuple[PrefixMemory, Sum, _Summed]  # of the blocked form


def _over_blocks[Carry, Operands, Results](
    body: Callable[[Carry, Operands], tuple[Carry, Results]],
    carry: Carry,
    operands: Operands,
    results: Results,
    size: int,
    *,
    reverse: bool = False,
) -> tuple[Carry, Results]:
    """`jax.lax.scan` of `body` over blocks [B, G, ...] of arrays [B, C, ...], without a transposed
    copy of them. Its results are written in place, over arrays `results` of their shapes. Padding
    chunks are zero: they neither write nor reset."""
    num_chunks = jax.tree.leaves(operands)[0].shape[1]
    size = min(size, num_chunks)
    pad = -num_chunks % size

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))

    def one_block(
        carry: tuple[Carry, Results], start: jax.Array
    ) -> tuple[tuple[Carry, Results], None]:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=1)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        state, whole = carry
        state, parts = body(state, jax.tree.map(lambda x: cut(x, start), operands))
        return (state, jax.tree.map(lambda x, part: put(x, part, start), whole, parts)), None

    operands, results = jax.tree.map(padded, (operands, results))
    starts = jnp.arange(0, num_chunks, size)
    (carry, whole), _ = jax.lax.scan(one_block, (carry, results), starts, reverse=reverse)
    return carry, jax.tree.map(lambda x: x[:, :num_chunks], whole)


def times(factors: Float[Array, "*#rest Q"], x: Float[Array, "*#rest X D"]) -> jax.Array:
    """x with the columns of every group times the factor of the group."""
    return x * jnp.repeat(factors, x.shape[-1] // factors.shape[-1], axis=-1)[..., None, :]


def decayed(
    state: Float[Array, "B F D"], log_decay: Float[Array, "B L Q"] | None, mask: jax.Array | None
) -> Float[Array, "B F D"]:
    """The rest of the state after a chunk, without its writes."""
    if log_decay is None:
        return state
    return times(jnp.exp(masked(log_decay, mask).sum(1)), state)


def decayed_sum(left: Summary, right: Summary) -> Summary:
    """The factors a [..., Q] and the sum [..., F, D] of two neighboring runs of chunks: the right
    one leaves a of the state after the left one. Associative."""
    return Summary(left.kept * right.kept, times(right.kept, left.added) + right.added)


def _of_chunks(log_decay: jax.Array | None, mask: MemoryMask) -> jax.Array | None:
    """The sums [B, C, Q] over the tokens that write."""
    return None if log_decay is None else masked(log_decay, mask.writes).sum(2)


def _kept(options: PrefixOptions, block: _Summed) -> jax.Array | None:
    """a [B, C, Q] of every chunk, None where all are 1."""
    log_decay, resets = block.writes.log_decay, block.mask.resets
    if resets is None:
        return None if log_decay is None else jnp.exp(log_decay)
    if log_decay is None:
        return 1 - resets[..., None].astype(options.state_dtype)
    return jnp.where(resets[..., None], 0, jnp.exp(log_decay))


def _left(log_decay: jax.Array | None, resets: jax.Array | None) -> jax.Array | None:
    """The share [B, C + 1, Q] of a state before each chunk, and of the last one, that is left after
    the row, by sums, whose gradients keep no array of size zero (see `_decayed_sums`)."""
    left = None if log_decay is None else jnp.exp(_sums_from(log_decay))
    if resets is None:
        return left
    is_reset = _sums_from(resets[..., None].astype(jnp.int32)) > 0
    return jnp.where(is_reset, 0.0, 1.0 if left is None else left)


def _sums_from(x: Float[Array, "B C Q"]) -> Float[Array, "B C1 Q"]:
    """The sums from each chunk to the end, and 0."""
    return jnp.pad(jax.lax.cumsum(x, axis=1, reverse=True), ((0, 0), (0, 1), (0, 0)))


def _decayed_sums(runs: Summary, *, reverse: bool = False) -> Summary:
    """The associative scan of `decayed_sum`. Recomputed in a backward: it has intermediates of size
    zero, and Shardy (jax 0.11.2) crashes when one is kept across a sharded region."""
    scan = functools.partial(jax.lax.associative_scan, decayed_sum, reverse=reverse, axis=1)
    return jax.checkpoint(scan, prevent_cse=False)(runs)


def _states(options: PrefixOptions, block: _Summed, carry: jax.Array) -> tuple[jax.Array, Sum]:
    """States before each chunk [B, G, F, D], and the one after the last."""
    delta = chunk_delta(options, block.writes.errors, block.writes.keys)
    kept = _kept(options, block)
    carry = carry[:, None]
    if kept is None:
        after = jax.lax.associative_scan(jnp.add, delta, axis=1) + carry
    else:
        whole, total = _decayed_sums(Summary(kept, delta))
        after = total + times(whole, carry)
    return jnp.concatenate([carry, after[:, :-1]], axis=1), after[:, -1]


def chunk_delta(
    options: PrefixOptions, errors: Float[Array, "B C L D"], keys: Float[Array, "B C L F"]
) -> Float[Array, "B C F D"]:
    """delta_w of every chunk, the sum over its tokens of k^T e: the paper's delta W transposed."""
    delta = _product(options, "BCLF,BCLD->BCFD", keys, errors)
    return newton_schulz(delta) if options.orthogonalizes else delta


def _product(options: PrefixOptions, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product accumulated in the state dtype; operands keep theirs."""
    return product(equation, a, b, options.state_dtype)


def _read_block(memory: SumMemory, carry: jax.Array, block: _Summed) -> Outputs:
    """y [B, G, L, D] of G chunks and the state after them."""
    before, after = _states(memory.options, block, carry)
    return _read(memory, before, block.reads, block.mask.reads), after


def _read(memory: SumMemory, state: jax.Array, z: jax.Array, reads: jax.Array | None) -> jax.Array:
    """y [B, G, L, D] of chunks that read `state` [B, G, F, D]."""
    w_base, options, narrow = memory.w_base, memory.options, z.dtype
    if options.folds_state:
        folded = (w_base.astype(options.state_dtype) + options.eta * state).astype(narrow)
        return _product(options, "BGLF,BGFD->BGLD", z, folded).astype(narrow)
    fast = _product(options, "BGLF,BGFD->BGLD", masked(z, reads), state.astype(narrow))
    y = _product(options, "BGLF,FD->BGLD", z, w_base) + options.eta * fast
    return y.astype(narrow)


@jax.custom_vjp
def _blocked(memory: PrefixMemory, initial_state: jax.Array, chunks: _Summed) -> Outputs:
    return _blocked_forward(memory, initial_state, chunks)[0]


def _blocked_forward(
    memory: PrefixMemory, initial_state: jax.Array, chunks: _Summed
) -> tuple[Outputs, _Inputs]:
    def body(carry: jax.Array, block: _Summed) -> tuple[Sum, jax.Array]:
        y, carry = _read_block(memory, carry, block)
        return carry, y

    size = memory.options.block_chunks
    state, y = _over_blocks(body, initial_state, chunks, chunks.writes.errors, size)
    return (y, state), (memory, initial_state, chunks)


def _blocked_backward(saved: _Inputs, cotangents: Outputs) -> _Inputs:
    """Two scans: forward once more over the states for dz, backward over their cotangents for the
    rest.

    cot(S_i) = eta z_i^T dy_i + a_i cot(S_{i+1}) and cot(delta_w_i) = cot(S_{i+1}). Where every
    token reads and nothing decays, the running sum of z_i^T dy_i is the gradient of W_base as well.
    cot(log a_i), by group of columns, is the slope of the loss along all reads after i less that
    along all writes from i on, and so takes no state and its cotangent at once.
    """
    (memory, initial_state, chunks), (dy, d_state) = saved, cotangents
    w_base, options, (keys, errors, log_decay, _) = memory.w_base, memory.options, chunks.writes
    features = functools.partial(_feature_cotangent, memory)
    writes = functools.partial(_write_cotangent, options)
    operands, size = (chunks, dy), options.block_chunks
    results = (chunks.reads, log_decay)
    state, (dz, read) = _over_blocks(features, initial_state, operands, results, size)
    start = (d_state.astype(options.state_dtype), jnp.zeros(w_base.shape, options.state_dtype))
    (d_initial, d_base), (d_errors, d_keys, written) = _over_blocks(
        writes, start, operands, (errors, keys, log_decay), size, reverse=True
    )
    d_decay = None
    if read is not None and written is not None:
        end = _by_group((d_state * state).sum(1), read)[:, None]
        read = jnp.concatenate([read, end], axis=1)
        d_decay = _decay_cotangent(read, written, chunks.mask.resets)
    d_chunks = Chunks(dz, Writes(d_keys, d_errors, d_decay), MemoryMask(None, None, None))
    return PrefixMemory(d_base.astype(w_base.dtype), options), d_initial, d_chunks


def _decay_cotangent(
    read: Float[Array, "B C1 Q"], written: Float[Array, "B C Q"], resets: jax.Array | None
) -> Float[Array, "B C Q"]:
    """cot(log a), from the slopes along the reads of every chunk and along the state after the row,
    and those along the writes of every chunk; summed up to the next reset only, so that rounding
    reaches no other document."""
    if resets is None:
        total = functools.partial(jax.lax.cumsum, axis=1, reverse=True)
        return total(read)[:, 1:] - total(written)

    def until_reset(x: jax.Array, goes_on: jax.Array) -> jax.Array:
        return _decayed_sums(Summary(goes_on, x[:, :, None]), reverse=True).added[:, :, 0]

    goes_on = 1 - resets[..., None].astype(read.dtype)
    goes_on = jnp.pad(goes_on, ((0, 0), (0, 1), (0, 0)), constant_values=1)
    found = until_reset(read, goes_on)[:, 1:] - until_reset(written, goes_on[:, 1:])
    return jnp.where(resets[..., None], 0, found)


def _by_group(x: Float[Array, "*rest D"], like: Float[Array, "*any Q"]) -> Float[Array, "*rest Q"]:
    """Sums over the columns of every group."""
    return x.reshape(*x.shape[:-1], like.shape[-1], -1).sum(-1).astype(like.dtype)


def _feature_cotangent(
    memory: PrefixMemory, carry: jax.Array, inputs: tuple[_Summed, jax.Array]
) -> tuple[Sum, tuple[jax.Array, jax.Array | None]]:
    """(state after the block, (dz [B, G, L, F] = dy W_base^T + eta dy S^T, the slope along each
    chunk's read, eta dy (z S), by group of columns)), from the block and its dy."""
    (block, dy), w_base, options = inputs, memory.w_base, memory.options
    before, after = _states(options, block, carry)
    if options.folds_state:
        folded = (w_base.astype(options.state_dtype) + options.eta * before).astype(dy.dtype)
        dz = _product(options, "BGLD,BGFD->BGLF", dy, folded)
        return after, (dz.astype(dy.dtype), None)
    narrow, slope, log_decay = before.astype(dy.dtype), None, block.writes.log_decay
    if log_decay is not None:
        read = _product(options, "BGLF,BGFD->BGLD", masked(block.reads, block.mask.reads), narrow)
        slope = _by_group((options.eta * read * dy).sum(2), log_decay)
    fast = masked(_product(options, "BGLD,BGFD->BGLF", dy, narrow), block.mask.reads)
    dz = _product(options, "BGLD,FD->BGLF", dy, w_base) + options.eta * fast
    return after, (dz.astype(dy.dtype), slope)


def _write_cotangent(
    options: PrefixOptions, carry: tuple[Sum, jax.Array], inputs: tuple[_Summed, jax.Array]
) -> tuple[tuple[Sum, jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]:
    """((cot(S), sum of dW_base) before the block, (d_errors, d_keys, the slope along each chunk's
    write by group of columns)), from the pair after it, the block and its dy."""
    (block, dy), (d_end, d_base) = inputs, carry
    (keys, errors, log_decay, _), d_after = block.writes, d_end[:, None]
    outer = _product(options, "BGLF,BGLD->BGFD", masked(block.reads, block.mask.reads), dy)
    if block.mask.reads is None:
        d_base = d_base + outer.sum((0, 1))
    else:
        d_base = d_base + _product(options, "BGLF,BGLD->FD", block.reads, dy)
    outer = options.eta * outer
    # In reverse order chunk i adds to cot(S_i), which keeps a_i of cot(S_{i+1}).
    kept = _kept(options, block)
    if kept is None:
        d_before = jax.lax.associative_scan(jnp.add, outer, reverse=True, axis=1) + d_after
    else:
        whole, total = _decayed_sums(Summary(kept, outer), reverse=True)
        d_before = total + times(whole, d_after)
    d_delta = jnp.concatenate([d_before[:, 1:], d_after], axis=1)
    delta, pull = jax.vjp(functools.partial(chunk_delta, options), errors, keys)
    d_errors, d_keys = pull(d_delta)
    slope = None if log_decay is None else _by_group((delta * d_delta).sum(2), log_decay)
    return (d_before[:, 0], d_base), (d_errors, d_keys, slope)


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _attention_form(memory: PrefixMemory, initial_state: jax.Array, chunks: _Summed) -> Outputs:
    options, z, (_, reads, resets) = memory.options, chunks.reads, chunks.mask
    assert not options.orthogonalizes, "scores sum over tokens, an orthogonalized update is whole"
    (keys, errors, log_decay, _), (B, C, L, _) = chunks.writes, z.shape
    chunk = jnp.arange(C)
    visible = jnp.broadcast_to(chunk[:, None] > chunk[None, :], (B, C, C))
    reads = jnp.ones((B, C, L), bool) if reads is None else reads
    resets = jnp.zeros((B, C), bool) if resets is None else resets
    # Chunk i still holds the write of chunk j, times the decays in between, if no chunk of j + 1 ..
    # i - 1 reset the state.
    count = jnp.cumsum(resets, axis=1)
    before = count - resets
    visible = visible & (before[:, :, None] == count[:, None, :])
    score = _product(options, "BCLF,BJMF->BCLJM", z, keys)
    score = jnp.where((visible[:, :, None, :] & reads[..., None])[..., None], score, 0)
    carried = masked(_product(options, "BCLF,BFD->BCLD", z, initial_state.astype(z.dtype)), reads)
    carried = jnp.where((before == 0)[..., None, None], carried, 0)
    # The row's state holds the writes since the last reset.
    is_kept = jnp.broadcast_to((count == count[:, -1:])[..., None], (B, C, L))
    kept = masked(errors, is_kept)
    carry = jnp.where((count[:, -1] == 0)[:, None, None], initial_state, 0)
    if log_decay is None:
        fast = _product(options, "BCLJM,BJMD->BCLD", score.astype(z.dtype), errors)
    else:
        after = jnp.cumsum(log_decay, axis=1)
        until = jnp.pad(after[:, :-1], ((0, 0), (1, 0), (0, 0)))
        # No clamp at 0: JAX's derivative of minimum compares x with the result, and fused code
        # rounds the two differently.
        is_past = (chunk[:, None] > chunk)[..., None]
        between = jnp.where(is_past, until[:, :, None] - after[:, None], 0)
        weight = jnp.exp(between)[:, :, None, :, None]
        scores = [(score * weight[..., q]).astype(z.dtype) for q in range(weight.shape[-1])]
        groups = zip(scores, jnp.split(errors, len(scores), axis=-1), strict=True)
        read = functools.partial(_product, options, "BCLJM,BJMD->BCLD")
        fast = jnp.concatenate([read(*group) for group in groups], axis=-1)
        carried = times(jnp.exp(until), carried)
        kept = times(jnp.exp(after[:, -1:] - after).astype(kept.dtype), kept)
        carry = times(jnp.exp(after[:, -1]), carry)
    y = _product(options, "BCLF,FD->BCLD", z, memory.w_base) + options.eta * (fast + carried)
    return y.astype(z.dtype), _product(options, "BCLF,BCLD->BFD", keys, kept) + carry
