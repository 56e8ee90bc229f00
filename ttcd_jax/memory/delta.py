"""What one chunk writes: error, key and delta_w. To change the update rule, change this file.

With teacher features z_target and student features z_student [B, C, L, F] and W_base [F, D] (the
transpose of the paper's [D, F], as everywhere in this project):

    e = beta * ((z_target - z_student) W_base) P       error, gated per token
    k = z_student / |z_student|                        key (`ttcd_kernels.short_conv`)
    delta_w = sum over the chunk of k^T e              [F, D], the paper's delta W transposed

Nothing is stopped: W_base, P, beta and both features receive gradient through e and k.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float
from ttcd_kernels.normalize import l2_normalize

from ttcd_jax.nn.product import product, weight_product

# Quintic Newton-Schulz coefficients (a, b, c), one triple per step, as published.
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def newton_schulz(matrix: Float[Array, "... X Z"]) -> Float[Array, "... X Z"]:
    """The nearest semi-orthogonal matrix, approximately: five quintic steps.

    X <- a X + (b A + c A A) X with A = X X^T, from X = matrix / (|matrix|_F + 1e-7); tall matrices
    are transposed first. Leading axes are a batch. Operands of products stand in the dtype of
    `matrix`; sums, norm and coefficients in float32 or wider (4.0848 rounded to bfloat16 alone
    turns the result by some percent).
    """
    narrow, wide = matrix.dtype, jnp.promote_types(matrix.dtype, jnp.float32)
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if is_tall else matrix).astype(wide)
    square = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
    # The norm's derivative at a zero matrix (a chunk that writes nothing) is taken as 0.
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    x = (x / (norm + 1e-7)).astype(narrow)
    for a, b, c in NEWTON_SCHULZ:
        gram = product("...XZ,...YZ->...XY", x, x, wide)
        gram_squared = product("...XY,...YW->...XW", gram.astype(narrow), gram.astype(narrow), wide)
        step = (b * gram + c * gram_squared).astype(narrow)
        x = (a * x.astype(wide) + product("...XY,...YZ->...XZ", step, x, wide)).astype(narrow)
    return x.mT if is_tall else x


def chunk_errors(
    difference: Float[Array, "B C L F"],
    w_base: Float[Array, "F D"],
    *,
    beta: Float[Array, "B C L"] | None,
    proj: Float[Array, "D D"] | None,
    normalizes: bool,
    zero_slope: float,
) -> Float[Array, "B C L D"]:
    """e: what the student missed (`difference`, z_target - z_student), seen through the base
    weight, gated by beta, projected by P."""
    error = weight_product(difference, w_base)
    if normalizes:
        error = l2_normalize(error, zero_slope)
    if beta is not None:
        error = error * beta[..., None]
    if proj is not None:
        error = weight_product(error, proj)
    return error


def chunk_delta(
    errors: Float[Array, "B C L D"], keys: Float[Array, "B C L F"], *, orthogonalizes: bool, dtype
) -> Float[Array, "B C F D"]:
    """delta_w of every chunk, a sum over its tokens accumulated in `dtype`; operands stay
    narrow."""
    delta = product("BCLF,BCLD->BCFD", keys, errors, dtype)
    return newton_schulz(delta) if orthogonalizes else delta
