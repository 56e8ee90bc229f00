"""Newton-Schulz: the nearest semi-orthogonal matrix, by matrix products alone."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ttcd_jax.nn.linear import length
from ttcd_jax.nn.product import product

# Quintic Newton-Schulz coefficients (a, b, c), one triple per iteration, as published.
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def newton_schulz(matrix: Float[Array, "... X Z"]) -> Float[Array, "... X Z"]:
    """The nearest semi-orthogonal matrix, approximately: five quintic iterations.

    X <- a X + (b A + c A A) X with A = X X^T, from X = matrix / (|matrix|_F + 1e-7); tall matrices
    are transposed first. Leading axes are a batch. Operands of products are in the dtype of
    `matrix`; sums, norm and coefficients in float32 or wider.
    """
    narrow, wide = matrix.dtype, jnp.promote_types(matrix.dtype, jnp.float32)
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if is_tall else matrix).astype(wide)
    x = (x / (length(x, (-2, -1)) + 1e-7)).astype(narrow)
    for a, b, c in NEWTON_SCHULZ:
        gram = product("...XZ,...YZ->...XY", x, x, wide)
        gram_squared = product("...XY,...YW->...XW", gram.astype(narrow), gram.astype(narrow), wide)
        polynomial = (b * gram + c * gram_squared).astype(narrow)
        x = (a * x.astype(wide) + product("...XY,...YZ->...XZ", polynomial, x, wide)).astype(narrow)
    return x.mT if is_tall else x
