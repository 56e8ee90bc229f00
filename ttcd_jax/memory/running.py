"""Memories that are not a prefix sum: the update of a chunk, or its scale, depends on the running
weight."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int
from ttcd_kernels.normalize import NORM_EPS

from ttcd_jax.memory.chunks import masked
from ttcd_jax.memory.delta_rule import unit_lower_solve
from ttcd_jax.memory.prefix import PrefixOptions, Sum, SumMemory, Writes, chunk_delta, decayed
from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.nn.linear import length, product

Weight = Float[Array, "B F D"]  # the running weight of every row
Group = tuple[Weight, Sum, Int[Array, " B"]]  # B_g, the group's sum of delta_w, chunks written
Views = tuple[Float[Array, "*rest F"], Float[Array, "*rest F"]]  # z_teacher, z_student


@struct.dataclass
class IdealMemory(ChunkedMemory[Views, Weight]):
    """Gradient descent on the distillation loss, one update per chunk: the paper's eq.
    inplace_update_sw, in [F, D] layout. With L_CD(W), the mean over a chunk of |stopgrad(z_teacher
    W_i) - z_student W|^2 / 2, chunk i is read through W_i and writes

        W_{i+1} = W_i - eta dL_CD/dW at W_i
                = W_i + eta * mean over the chunk of z_student^T (z_teacher W_i - z_student W_i).

    No gradient flows through the teacher's term; all else is differentiable. The mean is over the
    tokens that write. Read by z_teacher, written by both.
    """

    w_base: Float[Array, "F D"]
    eta: float = struct.field(pytree_node=False)
    state_dtype: DTypeLike = struct.field(pytree_node=False)

    def start(self, batch_size: int) -> Weight:
        base = self.w_base.astype(self.state_dtype)
        return jnp.broadcast_to(base, (batch_size, *base.shape))

    def read(self, state: Weight, reads: Float[Array, "B L F"]) -> Float[Array, "B L D"]:
        return _read(state, reads)

    def write(
        self, state: Weight, writes: Views, mask: Bool[Array, "#B L"] | None = None
    ) -> Weight:
        z_student = writes[1]
        narrow = state.astype(z_student.dtype)
        teacher, student = (product("BLF,BFD->BLD", z, narrow, self.state_dtype) for z in writes)
        error = masked(jax.lax.stop_gradient(teacher) - student, mask).astype(z_student.dtype)
        delta = product("BLF,BLD->BFD", z_student, error, self.state_dtype)
        count = z_student.shape[1] if mask is None else mask.sum(-1)[:, None, None]
        return state + self.eta * delta / jnp.asarray(count, self.state_dtype)

    def squared_size(self, state: Weight) -> Float[Array, " B"]:
        """|W - W_base|_F^2 / eta^2."""
        return _squared_change(state, self.w_base, self.eta)


@struct.dataclass
class CorrectingMemory(SumMemory):
    """The memory of a `PrefixMemory` with error correction, the delta rule (Schlag et al., 2021): a
    token writes its error less the memory's answer to its key,

        S <- S + k^T (e - beta k S),   k S read after the earlier tokens of its chunk wrote,

    so that a key that comes again replaces its old value. The writes u of a chunk solve a unit
    lower triangular system (`memory.delta_rule`):

        (I + A) U = E - beta K S,   A_ij = beta_i (k_i . k_j) for j < i

    Reads, decays and documents are those of `PrefixMemory`; every operand has its gradient.
    `Writes.rate` is beta, None: 1; products of the system are in the state dtype.
    """

    def write(self, state: Sum, writes: Writes, mask: Bool[Array, "#B L"] | None = None) -> Sum:
        (keys, errors, log_decay, rate), wide = writes, self.options.state_dtype
        state = decayed(state, log_decay, mask)
        rate = jnp.ones((*errors.shape[:-1], 1), wide) if rate is None else rate[..., None]
        rate = masked(rate.astype(wide), mask)  # a token outside the mask has u = 0
        returned = product("BLF,BFD->BLD", keys, state.astype(keys.dtype), wide)
        sides = masked(errors, mask).astype(wide) - rate * returned
        u = unit_lower_solve(rate * product("BLF,BMF->BLM", keys, keys, wide), sides)
        return state + product("BLF,BLD->BFD", keys, u.astype(keys.dtype), wide)


@struct.dataclass
class RenormalizedMemory(ChunkedMemory[Writes, Group]):
    """The memory whose Frobenius norm is held at that of W_base.

    Inside a group of `group_chunks` chunks W_i = R(B_g + eta * sum_{j<i in group} delta_w_j), and
    the group ends with B_{g+1} = R(the same with all its chunks); R(M) = M |W_base|_F / max(|M|_F,
    1e-6). Groups are counted from the first chunk a document can write into. Read by features z,
    written by keys and errors.
    """

    w_base: Float[Array, "F D"]
    options: PrefixOptions = struct.field(pytree_node=False)
    group_chunks: int = struct.field(pytree_node=False)

    def start(self, batch_size: int) -> Group:
        base = self.w_base.astype(self.options.state_dtype)
        group_start = jnp.broadcast_to(base, (batch_size, *base.shape))
        return group_start, jnp.zeros_like(group_start), jnp.zeros(batch_size, jnp.int32)

    def read(self, state: Group, reads: Float[Array, "B L F"]) -> Float[Array, "B L D"]:
        return _read(self._weight(state), reads)

    def write(self, state: Group, writes: Writes, mask: Bool[Array, "#B L"] | None = None) -> Group:
        """The state after the chunk, and after the group if it ends there."""
        group_start, total, count = state
        keys, errors, *_ = writes
        delta = chunk_delta(self.options, masked(errors, mask)[:, None], keys[:, None])
        total, count = total + delta[:, 0], count + 1
        is_group_end = (count % self.group_chunks == 0)[:, None, None]
        group_end = self._weight((group_start, total, count))
        group_start = jnp.where(is_group_end, group_end, group_start)
        return group_start, jnp.where(is_group_end, 0, total), count

    def squared_size(self, state: Group) -> Float[Array, " B"]:
        """|W - W_base|_F^2 / eta^2."""
        return _squared_change(self._weight(state), self.w_base, self.options.eta)

    def _weight(self, state: Group) -> Weight:
        group_start, total, _ = state
        norm = length(self.w_base.astype(self.options.state_dtype), (-2, -1))
        matrix = group_start + self.options.eta * total
        size = length(matrix, (-2, -1))
        return matrix * (norm / jnp.where(size > NORM_EPS, size, NORM_EPS))


def _read(weight: Weight, z: Float[Array, "B L F"]) -> Float[Array, "B L D"]:
    """z W in the dtype of z, accumulated in that of W."""
    return product("BLF,BFD->BLD", z, weight.astype(z.dtype), weight.dtype).astype(z.dtype)


def _squared_change(weight: Weight, w_base: Float[Array, "F D"], eta: float) -> Float[Array, " B"]:
    change = (weight - w_base.astype(weight.dtype)) / (eta or 1.0)
    return jnp.sum(change.astype(jnp.float32) ** 2, axis=(-2, -1))
