"""LaCT's memory: a SwiGLU whose three matrices learn along the row, chunk by chunk.

Every chunk first reads the writes of the chunks before it, and then writes; the last one only
reads. Per fast head, with rows q, k, v [L, H], learning rates lr per token and matrices in [in,
out] layout (the published ones transposed):

    read    f(q) = (silu(q w0) * (q w2)) w1
    write   a = k w0,  u = k w2,  g = v w1^T,  all from the weights the chunk was read through
            dw0 = k^T (lr0 g u silu'(a)),  dw1 = (lr1 silu(a) u)^T v,  dw2 = k^T (lr2 g silu(a))
            dw <- dw + mu dw_previous,  then Newton-Schulz for this update only (both optional)
            w <- (w + dw) |start| / (|w + dw| + 1e-5),  column by column

dw is minus the gradient of -sum_t lr_t f(k_t) . v_t, summed over the chunk. Gradients flow through
the whole chain of updates, the column norms and the start. One update per chunk, recomputed in the
backward, which keeps one set of matrices per chunk and the activations of one chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.nn.linear import length, newton_schulz, product

UNIT_EPS = 1e-5


class FastWeights(NamedTuple):
    """The matrices of f; a leading batch axis while they learn."""

    w0: Float[Array, "*B N H F"]
    w1: Float[Array, "*B N F H"]
    w2: Float[Array, "*B N H F"]


class FastWrites(NamedTuple):
    """Operands of the write, per token of a chunk."""

    k: Float[Array, "*B L N H"]
    v: Float[Array, "*B L N H"]
    rates: Float[Array, "*B L N 3"]  # of w0, w1, w2
    momentum: Float[Array, "*B L N"] | None  # mu is its mean over a chunk; None: no momentum


class FastState(NamedTuple):
    """The memory between two chunks."""

    weights: FastWeights  # the ones that reads use
    raw: FastWeights | None  # the same, never normalized (`keeps_raw`)
    previous: FastWeights | None  # the last update with its momentum, before Newton-Schulz


def unit(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """x / (|x| + 1e-5) over `axis`."""
    return x / (length(x, axis) + UNIT_EPS)


@struct.dataclass
class FastSwiGLU(ChunkedMemory[FastWrites, FastState]):
    """The memory that starts at `weights` (no batch axis): read by q [B, L, N, H], written by
    `FastWrites`. A document begins with `weights`, and with a momentum of zero. `orthogonalizes`:
    Newton-Schulz on every update; `keeps_raw`: updates add to weights that only reads normalize."""

    weights: FastWeights
    orthogonalizes: bool = struct.field(pytree_node=False, default=False)
    keeps_raw: bool = struct.field(pytree_node=False, default=False)
    has_momentum: bool = struct.field(pytree_node=False, default=True)
    state_dtype: DTypeLike = struct.field(pytree_node=False, default=jnp.float32)

    def start(self, batch_size: int) -> FastState:
        dtype = self.state_dtype
        weights = jax.tree.map(
            lambda w: jnp.broadcast_to(w.astype(dtype), (batch_size, *w.shape)), self.weights
        )
        zeros = jax.tree.map(jnp.zeros_like, weights) if self.has_momentum else None
        raw = jax.tree.map(jnp.copy, weights) if self.keeps_raw else None  # donated apart
        return FastState(weights, raw, zeros)

    def read(self, state: FastState, reads: Float[Array, "B L N H"]) -> Float[Array, "B L N H"]:
        w0, w1, w2 = (w.astype(reads.dtype) for w in state.weights)
        q, dtype = reads.swapaxes(1, 2), self.state_dtype
        gate = product("BNLH,BNHF->BNLF", q, w0, dtype)
        up = product("BNLH,BNHF->BNLF", q, w2, dtype)
        hidden = (jax.nn.silu(gate) * up).astype(q.dtype)
        y = product("BNLF,BNFH->BNLH", hidden, w1, dtype)
        return y.astype(q.dtype).swapaxes(1, 2)

    def write(
        self, state: FastState, writes: FastWrites, mask: Bool[Array, "#B L"] | None = None
    ) -> FastState:
        update = self._update(state.weights, writes, mask)
        previous = None
        if writes.momentum is not None:
            # Only a chunk of a single document has a previous update: mu averages all its tokens.
            mu = writes.momentum.mean(1)[:, :, None, None]
            update = jax.tree.map(lambda dw, before: dw + mu * before, update, state.previous)
            previous = update
        if self.orthogonalizes:
            update = jax.tree.map(newton_schulz, update)
        raw = jax.tree.map(jnp.add, state.weights if state.raw is None else state.raw, update)
        sizes = jax.tree.map(lambda w: length(w.astype(self.state_dtype), -2), self.weights)
        weights = jax.tree.map(lambda w, size: unit(w, -2) * size, raw, sizes)
        return FastState(weights, raw if self.keeps_raw else None, previous)

    def _update(
        self, weights: FastWeights, writes: FastWrites, mask: Bool[Array, "#B L"] | None
    ) -> FastWeights:
        """dw of one chunk, before momentum."""
        dtype = self.state_dtype
        k, v, rates = (x.swapaxes(1, 2) for x in (writes.k, writes.v, writes.rates.astype(dtype)))
        w0, w1, w2 = (w.astype(k.dtype) for w in weights)
        gate = product("BNLH,BNHF->BNLF", k, w0, dtype)
        up = product("BNLH,BNHF->BNLF", k, w2, dtype)
        back = product("BNLH,BNFH->BNLF", v, w1, dtype)
        if mask is not None:
            rates = jnp.where(mask[:, None, :, None], rates, 0)
        lr0, lr1, lr2 = (rates[..., i, None] for i in range(3))
        share = jax.nn.sigmoid(gate)
        active = gate * share
        slope = share + active * (1 - share)  # silu'(gate)
        d_gate = (lr0 * back * up * slope).astype(k.dtype)
        hidden = (lr1 * active * up).astype(k.dtype)
        d_up = (lr2 * back * active).astype(k.dtype)
        return FastWeights(
            w0=product("BNLH,BNLF->BNHF", k, d_gate, dtype),
            w1=product("BNLF,BNLH->BNFH", hidden, v, dtype),
            w2=product("BNLH,BNLF->BNHF", k, d_up, dtype),
        )
