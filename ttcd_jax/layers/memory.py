"""What every MLP that writes into its own down projection shares: switches, start, statistics."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ttcd_jax.axes import param
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.layers.linear import normal_param
from ttcd_jax.precision import Precision
from ttcd_jax.ttt.scan import Form, MemoryRule

ConvInit = Literal["zeros", "identity", "normal"]
ProjInit = Literal["identity", "gaussian_diagonal", "zeros", "normal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastWeightConfig(Config):
    """A memory that is a prefix sum: chunk i reads W_base + eta * (what chunks before i wrote)."""

    chunk_size: int = 1024
    eta: float = 0.3
    num_taps: int = 5
    has_proj: bool = True
    # 0.02 I, 0.02 diag(N(0, 1)), zero, or dense N(0, init_std^2).
    proj_init: ProjInit = "identity"
    folds_state: bool = False  # published read: round W_base + eta S, then one product
    resets_at_document: bool = True  # published: the memory leaks from document to document
    form: Form = "blocked"
    block_chunks: int = 4

    def validate(self) -> None:
        for name in ("chunk_size", "num_taps", "block_chunks"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{type(self).__name__}.{name} {getattr(self, name)} must be at least 1"
                )
        if self.folds_state and self.resets_at_document:
            raise UserError(
                "folds_state reproduces code without documents: set resets_at_document=False"
            )
        if self.form == "attention" and self.folds_state:
            raise UserError("form 'attention' does not know folds_state")

    def rule(self, precision: Precision, *, orthogonalizes: bool = False) -> MemoryRule:
        """The static facts of a read, for `ttt.scan.apply_memory`."""
        return MemoryRule(
            eta=self.eta,
            orthogonalizes=orthogonalizes,
            folds_state=self.folds_state,
            form=self.form,
            block_chunks=self.block_chunks,
            state_dtype=precision.state_dtype,
        )


class MemoryStats(NamedTuple):
    """Scalars of one fast layer, without gradient."""

    # |eta * sum of delta_w|_F / |W_base|_F at the end of the row, batch mean
    memory_ratio: jax.Array
    # mean of beta over tokens; 1 without a token rate
    gate_mean: jax.Array


def memory_stats(
    state: Float[Array, "B F D"],
    w_base: Float[Array, "F D"],
    eta: float,
    beta: Float[Array, "B T"] | None = None,
) -> MemoryStats:
    """What stands in the memory at the end of the row; `state` is the sum without eta."""
    state = jax.lax.stop_gradient(state).astype(jnp.float32)
    base = jax.lax.stop_gradient(w_base).astype(jnp.float32)
    size = jnp.linalg.norm(state, axis=(-2, -1)).mean()
    gate = jnp.ones(()) if beta is None else jax.lax.stop_gradient(beta).mean()
    return MemoryStats(abs(eta) * size / jnp.linalg.norm(base), gate.astype(jnp.float32))


def init_proj(init: ProjInit, rngs: nnx.Rngs, dim: int, std: float, dtype: DTypeLike) -> nnx.Param:
    """P [D, D], which multiplies errors from the right."""
    axes = ("embed", "embed_out")
    match init:
        case "identity":
            return param(0.02 * jnp.eye(dim, dtype=dtype), axes)
        case "gaussian_diagonal":
            return param(jnp.diag(0.02 * jax.random.normal(rngs.params(), (dim,), dtype)), axes)
        case "zeros":
            return param(jnp.zeros((dim, dim), dtype), axes)
        case "normal":
            return normal_param(rngs, (dim, dim), axes, std, dtype)


def init_conv(
    init: ConvInit,
    rngs: nnx.Rngs,
    shape: tuple[int, int],
    axis: str,
    *,
    is_causal: bool,
    std: float,
    dtype: DTypeLike,
) -> nnx.Param:
    """Taps [R, channels]; the identity passes the current token through."""
    axes = ("taps", axis)
    if init == "normal":
        return normal_param(rngs, shape, axes, std, dtype)
    taps = jnp.zeros(shape, dtype)
    if init == "identity":
        taps = taps.at[shape[0] - 1 if is_causal else shape[0] // 2].set(1)
    return param(taps, axes)
