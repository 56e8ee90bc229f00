"""The update of one chunk: error, key and delta_w. To change the update rule, change this file.

With teacher features z_target and student features z_student [B, C, L, F] and W_base [F, D] (the
transpose of the paper's [D, F], as everywhere in this project):

    e = beta * ((z_target - z_student) W_base) P       error, gated per token
    k = z_student / |z_student|                        key (`ttcd_kernels.short_conv`)
    delta_w = sum over the chunk of k^T e              [F, D], the paper's delta W transposed

No gradient is stopped: W_base, P, beta and both features receive theirs through e and k.
"""

from jax.typing import DTypeLike
from jaxtyping import Array, Float
from ttcd_kernels.normalize import l2_normalize

from ttcd_jax.memory.newton_schulz import newton_schulz
from ttcd_jax.nn.product import product, weight_product


def chunk_errors(
    difference: Float[Array, "B C L F"],
    w_base: Float[Array, "F D"],
    *,
    beta: Float[Array, "B C L"] | None,
    proj: Float[Array, "D D"] | None,
    normalizes: bool,
    zero_slope: float,
) -> Float[Array, "B C L D"]:
    """e: the student's error (`difference`, z_target - z_student) times the base weight, gated by
    beta, projected by P."""
    error = weight_product(difference, w_base)
    if normalizes:
        error = l2_normalize(error, zero_slope)
    if beta is not None:
        error = error * beta[..., None]
    if proj is not None:
        error = weight_product(error, proj)
    return error


def chunk_delta(
    errors: Float[Array, "B C L D"],
    keys: Float[Array, "B C L F"],
    *,
    orthogonalizes: bool,
    dtype: DTypeLike,
) -> Float[Array, "B C F D"]:
    """delta_w of every chunk, a sum over its tokens accumulated in `dtype`; operands keep
    their own."""
    delta = product("BCLF,BCLD->BCFD", keys, errors, dtype)
    return newton_schulz(delta) if orthogonalizes else delta
