"""A memory that is a prefix sum: chunk i is read through W_i = W_base + eta * sum_{j<i} delta_w_j.

Three forms of one function, equal in values and gradients:

    blocked      a scan over blocks of chunks with an associative scan inside each, and a custom
                 VJP that keeps no state
    associative  `jax.lax.associative_scan` over all chunks; every W_i exists at once
    attention    y_i = z_i W_base + eta * sum_{j<i} (z_i k_j^T) e_j, O(T^2): for short rows

"auto", the default, takes attention where it needs fewer products (`at_length`: below 2,234 tokens
at 1536 by 4096), else blocked.

The read is two products, z W_base + eta * (z S): folding S into W_base first and rounding to
bfloat16, as the published code does (`folds_state`), puts an error of 17 % on z S when |S| /
|W_base| is 1 %. All sums of delta_w are in `state_dtype`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ttcd_jax.memory.chunks import MemoryMask, masked
from ttcd_jax.memory.delta import chunk_delta
from ttcd_jax.memory.protocol import ROWS, AssociativeMemory, Axes, ChunkedMemory, Chunks
from ttcd_jax.nn.product import product

Element = tuple[jax.Array, jax.Array]  # of `segmented_sum`
Form = Literal["auto", "blocked", "associative", "attention"]


class PrefixOptions(NamedTuple):
    """Static options of a memory that is a prefix sum. Those of a `PrefixMemory` come from
    `at_length`, with the form chosen."""

    eta: float
    orthogonalizes: bool = False
    folds_state: bool = False
    form: Form = "auto"
    block_chunks: int = 4  # chunks whose states exist at once in the blocked form
    state_dtype: DTypeLike = jnp.float32

    def at_length(self, length: int, hidden_dim: int, dim: int) -> "PrefixOptions":
        """The options with the form chosen for rows of T = `length`: "auto" takes the one with
        fewer multiplications, forward and backward.

        Per token, states take 7 F D (written and read, written again in the backward, four
        gradients), scores 3 T (F + D), and F D for the state after the row.
        """
        if self.form != "auto":
            return self
        is_short = length * (hidden_dim + dim) < 2 * hidden_dim * dim
        has_scores = is_short and not (self.folds_state or self.orthogonalizes)
        return self._replace(form="attention" if has_scores else "blocked")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixMemory(ChunkedMemory, AssociativeMemory):
    """W_base and the sum of delta_w, as a memory: its state is the sum [B, F, D] without eta, it is
    read by features z [B, C, L, F] and written by (keys, errors)."""

    w_base: Float[Array, "F D"]
    options: PrefixOptions = dataclasses.field(metadata={"static": True})

    def axes(self) -> Axes:
        """F is sharded, except where scores (the attention form) or norms sum over it."""
        if self.options.form == "attention" or self.options.orthogonalizes:
            return Axes()
        features = (*ROWS, None, "mlp")
        return Axes(("mlp",), features, (features, ROWS), ROWS, ("tensor",))

    def start(self, batch_size: int) -> Float[Array, "B F D"]:
        return jnp.zeros((batch_size, *self.w_base.shape), self.options.state_dtype)

    def read(self, state: Float[Array, "B F D"], reads: Float[Array, "B L F"]) -> jax.Array:
        """z W_base + eta z S."""
        return _read(self.options, self.w_base, state[:, None], reads[:, None], None)[:, 0]

    def write(
        self, state: Float[Array, "B F D"], writes: Any, mask: jax.Array | None = None
    ) -> Float[Array, "B F D"]:
        """S + delta_w of the chunk."""
        keys, errors = writes
        errors = masked(errors, mask)
        return state + _delta(self.options, errors[:, None], keys[:, None])[:, 0]

    def row(
        self, prepared: Chunks, state: jax.Array | None = None, *, needs_end: bool = True
    ) -> tuple[jax.Array, jax.Array]:
        keys, errors = prepared.writes
        return read_prefix(
            self.options, prepared.reads, keys, errors, self.w_base, prepared.mask, state
        )

    def summary(self, prepared: Chunks) -> tuple[Bool[Array, " B"], Float[Array, "B F D"]]:
        """(whether the chunks reset the state before them, the sum of delta_w after their last
        reset): an element of `segmented_sum`."""
        (keys, errors), mask = prepared.writes, prepared.mask
        errors = masked(errors, mask.writes)
        if mask.resets is None:
            was_reset = jnp.zeros(len(keys), bool)
        else:
            resets = mask.resets
            was_reset = resets.any(1)
            later = jax.lax.cumsum(resets.astype(jnp.int32), axis=1, reverse=True) - resets
            errors = masked(errors, jnp.broadcast_to((later == 0)[..., None], errors.shape[:3]))
        if self.options.orthogonalizes:
            return was_reset, _delta(self.options, errors, keys).sum(1)
        return was_reset, _product(self.options, "BCLF,BCLD->BFD", keys, errors)

    def combine(self, first: Any, then: Any) -> Any:
        return segmented_sum(first, then)

    def neutral(self, summary: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, summary)

    def state_after(self, summary: Any) -> Float[Array, "B F D"]:
        return summary[1]


def read_prefix(
    options: PrefixOptions,
    z: Float[Array, "B C L F"],
    keys: Float[Array, "B C L F"],
    errors: Float[Array, "B C L D"],
    w_base: Float[Array, "F D"],
    mask: MemoryMask,
    initial_state: Float[Array, "B F D"] | None = None,
) -> tuple[Float[Array, "B C L D"], Float[Array, "B F D"]]:
    """(y, state after the row): every chunk read through the memory of the chunks before it.

    Differentiable in everything but the mask, through both results. The state is the plain sum of
    delta_w of the row's last document (without eta), `initial_state` the same sum from earlier
    rows.

    Raises:
        ValueError: the attention form with orthogonalized updates, or documents with
        `folds_state`.
    """
    if options.folds_state and mask.reads is not None:
        raise ValueError("folds_state reproduces code without documents: segment_ids must be None")
    errors = masked(errors, mask.writes)
    if initial_state is None:
        initial_state = jnp.zeros((z.shape[0], z.shape[-1], w_base.shape[-1]), options.state_dtype)
    form = options.at_length(z.shape[1] * z.shape[2], *w_base.shape).form
    if form == "attention":
        return _attention_form(options, z, keys, errors, w_base, mask, initial_state)
    operands = _Operands(z, keys, errors, mask.reads, mask.resets)
    if form == "associative":
        return _read_block(options, w_base, initial_state, operands)
    return _blocked(options, operands, w_base, initial_state)


class _Operands(NamedTuple):
    """Per-chunk arrays [B, C, ...]; in a block, [B, G, ...]."""

    z: jax.Array
    keys: jax.Array
    errors: jax.Array
    reads: jax.Array | None
    resets: jax.Array | None


def _over_blocks(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    operands: Any,
    results: Any,
    size: int,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body` over blocks [B, G, ...] of arrays [B, C, ...], without a transposed
    copy of them. Its results are written in place, over arrays `results` of their shapes. Padding
    chunks are zero: they neither write nor reset."""
    num_chunks = jax.tree.leaves(operands)[0].shape[1]
    pad = -num_chunks % size

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))

    def one_block(carry: Any, start: jax.Array) -> tuple[Any, None]:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=1)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        state, whole = carry
        state, parts = body(state, jax.tree.map(lambda x: cut(x, start), whole_operands))
        return (state, jax.tree.map(lambda x, part: put(x, part, start), whole, parts)), None

    whole_operands = jax.tree.map(padded, operands)
    results = jax.tree.map(padded, results)
    starts = jnp.arange(0, num_chunks, size)
    (carry, whole), _ = jax.lax.scan(one_block, (carry, results), starts, reverse=reverse)
    return carry, jax.tree.map(lambda x: x[:, :num_chunks], whole)


def segmented_sum(left: Element, right: Element) -> Element:
    """(was reset, sum) of two neighboring runs of chunks: a reset in the right one drops the sum of
    the left one. Associative."""
    left_reset, left_sum = left
    right_reset, right_sum = right
    kept = jnp.where(right_reset[..., None, None], 0, left_sum)
    return left_reset | right_reset, kept + right_sum


def _segmented_sums(elements: Element, *, reverse: bool = False) -> Element:
    """The associative scan of `segmented_sum`. Recomputed in a backward: it has intermediates of
    size zero, and Shardy (jax 0.11.2) crashes when one is kept across a sharded region."""
    scan = functools.partial(jax.lax.associative_scan, segmented_sum, reverse=reverse, axis=1)
    return jax.checkpoint(scan, prevent_cse=False)(elements)


def _states(
    delta: jax.Array, resets: jax.Array | None, carry: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """States before each chunk [B, G, F, D], and the one after the last, from delta_w [B, G,
    F, D]."""
    carry = carry[:, None]
    if resets is None:
        after = jax.lax.associative_scan(jnp.add, delta, axis=1) + carry
    else:
        was_reset, total = _segmented_sums((resets, delta))
        after = total + jnp.where(was_reset[..., None, None], 0, carry)
    return jnp.concatenate([carry, after[:, :-1]], axis=1), after[:, -1]


def _delta(options: PrefixOptions, errors: jax.Array, keys: jax.Array) -> jax.Array:
    is_orthogonal, dtype = options.orthogonalizes, options.state_dtype
    return chunk_delta(errors, keys, orthogonalizes=is_orthogonal, dtype=dtype)


def _product(options: PrefixOptions, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product accumulated in the state dtype; operands keep theirs."""
    return product(equation, a, b, options.state_dtype)


def _read_block(
    options: PrefixOptions, w_base: jax.Array, carry: jax.Array, block: _Operands
) -> tuple[jax.Array, jax.Array]:
    """y [B, G, L, D] of G chunks and the state after them."""
    before, after = _states(_delta(options, block.errors, block.keys), block.resets, carry)
    return _read(options, w_base, before, block.z, block.reads), after


def _read(
    options: PrefixOptions,
    w_base: jax.Array,
    state: jax.Array,
    z: jax.Array,
    reads: jax.Array | None,
) -> jax.Array:
    """y [B, G, L, D] of chunks that read `state` [B, G, F, D]."""
    narrow = z.dtype
    if options.folds_state:
        folded = (w_base.astype(options.state_dtype) + options.eta * state).astype(narrow)
        return _product(options, "BGLF,BGFD->BGLD", z, folded).astype(narrow)
    fast = _product(options, "BGLF,BGFD->BGLD", masked(z, reads), state.astype(narrow))
    y = _product(options, "BGLF,FD->BGLD", z, w_base) + options.eta * fast
    return y.astype(narrow)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    options: PrefixOptions, operands: _Operands, w_base: jax.Array, initial_state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _blocked_forward(options, operands, w_base, initial_state)[0]


def _blocked_forward(
    options: PrefixOptions, operands: _Operands, w_base: jax.Array, initial_state: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[_Operands, jax.Array, jax.Array]]:
    def body(carry: jax.Array, block: _Operands) -> tuple[jax.Array, jax.Array]:
        y, carry = _read_block(options, w_base, carry, block)
        return carry, y

    size = min(options.block_chunks, operands.z.shape[1])
    state, y = _over_blocks(body, initial_state, operands, operands.errors, size)
    return (y, state), (operands, w_base, initial_state)


def _blocked_backward(
    options: PrefixOptions, saved: Any, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[_Operands, jax.Array, jax.Array]:
    """Two scans: forward once more over the states for dz, backward over their cotangents for the
    rest.

    cot(S_i) = eta z_i^T dy_i + [no reset] cot(S_{i+1}) and cot(delta_w_i) = cot(S_{i+1}). Where
    every token reads, the running sum of z_i^T dy_i is the gradient of W_base as well, without a
    product of its own.
    """
    operands, w_base, initial_state = saved
    dy, d_state = cotangents
    size = min(options.block_chunks, operands.z.shape[1])

    def features(carry: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
        block, dy = block
        dz, carry = _feature_cotangent(options, w_base, carry, block, dy)
        return carry, dz

    def writes(carry: Any, block: Any) -> tuple[Any, Any]:
        block, dy = block
        carry, d_errors, d_keys = _write_cotangent(options, carry, block, dy)
        return carry, (d_errors, d_keys)

    _, dz = _over_blocks(features, initial_state, (operands, dy), operands.z, size)
    start = (d_state.astype(options.state_dtype), jnp.zeros(w_base.shape, options.state_dtype))
    written = (operands.errors, operands.keys)
    (d_initial, d_base), (d_errors, d_keys) = _over_blocks(
        writes, start, (operands, dy), written, size, reverse=True
    )
    return _Operands(dz, d_keys, d_errors, None, None), d_base.astype(w_base.dtype), d_initial


def _feature_cotangent(
    options: PrefixOptions, w_base: jax.Array, carry: jax.Array, block: _Operands, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """dz [B, G, L, F] = dy W_base^T + eta dy S^T, and the state after the block."""
    before, after = _states(_delta(options, block.errors, block.keys), block.resets, carry)
    if options.folds_state:
        folded = (w_base.astype(options.state_dtype) + options.eta * before).astype(dy.dtype)
        return _product(options, "BGLD,BGFD->BGLF", dy, folded).astype(dy.dtype), after
    fast = _product(options, "BGLD,BGFD->BGLF", dy, before.astype(dy.dtype))
    dz = _product(options, "BGLD,FD->BGLF", dy, w_base) + options.eta * masked(fast, block.reads)
    return dz.astype(dy.dtype), after


def _write_cotangent(
    options: PrefixOptions, carry: tuple[jax.Array, jax.Array], block: _Operands, dy: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """((cot(S), sum of dW_base) before the block, d_errors, d_keys), from the pair after it."""
    d_end, d_base = carry
    d_after = d_end[:, None]
    outer = _product(options, "BGLF,BGLD->BGFD", masked(block.z, block.reads), dy)
    if block.reads is None:
        d_base = d_base + outer.sum((0, 1))
    else:
        d_base = d_base + _product(options, "BGLF,BGLD->FD", block.z, dy)
    outer = options.eta * outer
    # In reverse order chunk i adds to cot(S_i); a reset at i cuts it off from cot(S_{i+1}).
    if block.resets is None:
        d_before = jax.lax.associative_scan(jnp.add, outer, reverse=True, axis=1) + d_after
    else:
        was_reset, total = _segmented_sums((block.resets, outer), reverse=True)
        d_before = total + jnp.where(was_reset[..., None, None], 0, d_after)
    d_delta = jnp.concatenate([d_before[:, 1:], d_after], axis=1)
    _, pull = jax.vjp(functools.partial(_delta, options), block.errors, block.keys)
    d_errors, d_keys = pull(d_delta)
    return (d_before[:, 0], d_base), d_errors, d_keys


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _attention_form(
    options: PrefixOptions,
    z: jax.Array,
    keys: jax.Array,
    errors: jax.Array,
    w_base: jax.Array,
    mask: MemoryMask,
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    if options.orthogonalizes:
        raise ValueError(
            "orthogonalised updates have no attention form: use blocked or associative"
        )
    B, C, L, _ = z.shape
    chunk = jnp.arange(C)
    visible = jnp.broadcast_to(chunk[:, None] > chunk[None, :], (B, C, C))
    reads = jnp.ones((B, C, L), bool) if mask.reads is None else mask.reads
    resets = jnp.zeros((B, C), bool) if mask.resets is None else mask.resets
    # Chunk i still holds what chunk j wrote if no chunk in between, j + 1 .. i - 1, reset the
    # state.
    count = jnp.cumsum(resets, axis=1)
    before = count - resets
    visible = visible & (before[:, :, None] == count[:, None, :])
    score = _product(options, "BCLF,BJMF->BCLJM", z, keys)
    score = jnp.where((visible[:, :, None, :] & reads[..., None])[..., None], score, 0)
    fast = _product(options, "BCLJM,BJMD->BCLD", score.astype(z.dtype), errors)
    carried = masked(_product(options, "BCLF,BFD->BCLD", z, initial_state.astype(z.dtype)), reads)
    fast = fast + jnp.where((before == 0)[..., None, None], carried, 0)
    y = _product(options, "BCLF,FD->BCLD", z, w_base) + options.eta * fast
    # The row's state holds what was written since the last reset.
    is_kept = jnp.broadcast_to((count == count[:, -1:])[..., None], (B, C, L))
    state = _product(options, "BCLF,BCLD->BFD", keys, masked(errors, is_kept))
    state = state + jnp.where((count[:, -1] == 0)[:, None, None], initial_state, 0)
    return y.astype(z.dtype), state
