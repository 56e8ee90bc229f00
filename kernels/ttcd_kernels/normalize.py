"""L2 normalisation of keys, x / max(|x|, 1e-6), with a chosen gradient at zero, for the kernels and
for layers without one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

NORM_EPS = 1e-6
PUBLISHED_ZERO_SLOPE = 1e6


def l2_normalize(x: Float[Array, "... X"], zero_slope: float = 1.0) -> Float[Array, "... X"]:
    """x / max(|x|, 1e-6) over the last axis, statistics in float32 or better.

    The derivative is exact wherever |x| > 1e-6. Below, where the direction of x is undefined, it is
    `zero_slope` times the identity: the exact one there is 1e6 (`PUBLISHED_ZERO_SLOPE`), which lets
    one zero vector dominate the global gradient norm.
    """
    return _l2_normalize(x, zero_slope)


_l2_normalize = jax.custom_jvp(lambda x, _: _normalize(x)[0].astype(x.dtype), nondiff_argnums=(1,))


def _normalize(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(unit vector, 1 / max(|x|, 1e-6), whether |x| > 1e-6), in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    norm = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    scale = 1 / jnp.maximum(norm, NORM_EPS)
    return wide * scale, scale, norm > NORM_EPS


@_l2_normalize.defjvp
def _l2_normalize_jvp(
    zero_slope: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    unit, scale, is_long = _normalize(x)
    along = jnp.sum(unit * dx, axis=-1, keepdims=True) * unit
    slope = jnp.where(is_long, scale, zero_slope)
    tangent = slope * (dx - jnp.where(is_long, along, 0))
    return unit.astype(x.dtype), tangent.astype(x.dtype)
