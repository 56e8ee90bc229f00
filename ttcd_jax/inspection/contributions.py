"""Which token wrote what a token reads, exactly (docs/inspect.md).

With keys k_s, errors e_s, rates beta_s (0 for a sum), and the decay a_s of each group of columns,

    S <- a_s S + k_s^T u_s,   u_s = e_s - beta_s k_s (a_s S),   read_t = eta z_t S
    read_t = sum over s of w[t, s] e_s,   w[t, s] = eta z_t (products of a_r (I - beta_r k_r^T k_r)
                                                    over the writes r after s) k_s^T

w is a number for each group of columns: how much of what s stored is left for t, erasures by later
writes included. Chunks, their systems and documents are those of `ttcd_jax.memory`; all is float64
on the host, chunk by chunk: a state [F, D], and N F numbers for N queries.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.linalg import solve_triangular

Chunked = Float[np.ndarray, "C L X"]


class Walk(NamedTuple):
    """What a pass from left to right finds."""

    writes: Chunked  # u; 0 for tokens that nobody reads, as their document ends in their chunk
    sizes: Float[np.ndarray, " C1"]  # |S|_F before every chunk, and after the last
    reads: Float[np.ndarray, "C L"]  # |eta z S|


@dataclasses.dataclass(frozen=True)
class Memory:
    """The operands of the memory of a layer along a row of C chunks of L tokens, padded at the end.

    `rate` is beta, None for a sum; `log_decay` is a chunk's alone, the sum over its writes.
    `reads_own_chunk`: a token reads the earlier tokens of its chunk too. `mine`: the tokens that
    write into the state after their chunk; `sees`: those whose document the state before it is of.
    Only shown: `base` = |W_base|_F, the `gate` of every write, and by chunk `window_share`,
    |e - e'|^2 / |e|^2 with the errors e' of equal windows; NaN where nothing is written.
    """

    eta: float
    reads: Float[np.ndarray, "C L F"]
    keys: Float[np.ndarray, "C L F"]
    errors: Float[np.ndarray, "C L D"]
    rate: Float[np.ndarray, "C L"] | None
    log_decay: Float[np.ndarray, "C Q"] | None
    reads_own_chunk: bool
    mine: Bool[np.ndarray, "C L"]
    sees: Bool[np.ndarray, "C L"]
    resets: Bool[np.ndarray, " C"]
    segments: Int[np.ndarray, "C L"] | None
    base: float
    gate: Float[np.ndarray, "C L"]
    window_share: Float[np.ndarray, " C"]

    def weights(self, queries: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N T Q"]:
        """w[t, s] of the tokens t = `queries` and all s of the row, padding included (zero)."""
        chunks, size, width = self.keys.shape
        kept = self._kept()
        own, g = queries // size, np.zeros((len(queries), kept.shape[1], width))
        found = np.zeros((len(queries), kept.shape[1], chunks, size))
        for i in range(int(own.max(initial=-1)), -1, -1):
            later, here = own > i, np.flatnonzero(own == i)
            k = self.keys[i].astype(float)
            w = self._weighted(i, (g[later] @ k.T) * self.mine[i])
            found[later, :, i] = w
            left = (1 - self.resets[i]) * g[later] - self._erased(i, w)
            g[later] = kept[i, :, None] * left
            place = queries[here] - i * size
            z = self.reads[i][place].astype(float)
            g[here] = (self.sees[i, place, None] * z)[:, None]
            if self.reads_own_chunk:
                own_scores = np.tril(self._overlaps(i, self.reads[i]), -1)[place]
                found[here, :, i] = w = self._weighted(i, own_scores)[:, None]
                g[here] -= self._erased(i, w)
        return self.eta * np.moveaxis(found.reshape(*found.shape[:2], -1), 1, 2)

    @functools.cached_property
    def walk(self) -> Walk:
        """All writes u, and what the state and its reads measure."""
        kept, (chunks, size, dim) = self._kept(), self.errors.shape
        state, sizes = np.zeros((self.keys.shape[-1], dim)), [0.0]
        writes, reads = np.zeros(self.errors.shape), np.zeros((chunks, size))
        for i in range(chunks):
            z, k, e = (x[i].astype(float) for x in (self.reads, self.keys, self.errors))
            found = self.sees[i, :, None] * (z @ state)
            state = np.repeat(kept[i], dim // kept.shape[1]) * state
            if self.rate is not None:
                e = e - (self.rate[i] * self.sees[i])[:, None] * (k @ state)
                e = self._solved(i, e)
            if self.reads_own_chunk:
                found += np.tril(self._overlaps(i, self.reads[i]), -1) @ e
            u = self.mine[i, :, None] * e
            state = (1 - self.resets[i]) * state + k.T @ u
            writes[i] = e if self.reads_own_chunk else u
            reads[i] = abs(self.eta) * np.linalg.norm(found, axis=-1)
            sizes.append(float(np.linalg.norm(state)))
        return Walk(writes, np.array(sizes), reads)

    def _kept(self) -> Float[np.ndarray, "C Q"]:
        """What a chunk's decays leave of the state before it."""
        return np.ones((len(self.keys), 1)) if self.log_decay is None else np.exp(self.log_decay)

    def _overlaps(self, i: int, z: Float[np.ndarray, "L F"]) -> Float[np.ndarray, "L L"]:
        """z . k of tokens of one document."""
        found = z.astype(float) @ self.keys[i].astype(float).T
        if self.segments is None:
            return found
        return found * (self.segments[i][:, None] == self.segments[i])

    def _solved(self, i: int, sides: np.ndarray, trans: int = 0) -> np.ndarray:
        """The solution [L, X] of the chunk's system, I + beta_i k_i . k_j below the diagonal."""
        if self.rate is None or not sides.size:
            return sides
        system = self.rate[i][:, None] * self._overlaps(i, self.keys[i])
        return solve_triangular(system, sides, trans=trans, lower=True, unit_diagonal=True)

    def _weighted(self, i: int, scores: np.ndarray) -> np.ndarray:
        """What scores [..., L] of the chunk's writes u are as weights of its errors."""
        flat = scores.reshape(-1, scores.shape[-1])
        return self._solved(i, flat.T, trans=1).T.reshape(scores.shape)

    def _erased(self, i: int, w: Float[np.ndarray, "N Q L"]) -> np.ndarray | float:
        """The part of a read that the answers of the state before the chunk to its keys took."""
        if self.rate is None:
            return 0.0
        return (w * self.rate[i] * self.sees[i]) @ self.keys[i].astype(float)
