"""Weight matrices in [in, out] layout: their initialization, and products with backward passes of
their own, one for precision, one for speed; norms, and Newton-Schulz."""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ttcd_jax.axes import param

PRODUCT = "product"  # the checkpoint name of products with parameters
Operands = tuple[jax.Array, jax.Array]

# Quintic Newton-Schulz coefficients (a, b, c), one triple per iteration, as published.
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_PARTS = 32  # of a kernel, which a CPU reads side by side


def product(
    equation: str, a: Float[Array, "..."], b: Float[Array, "..."], dtype: DTypeLike
) -> Float[Array, "..."]:
    """einsum(equation, a, b) accumulated in `dtype`, which is the result's. The backward rounds the
    cotangent to the operands' dtype first: JAX's would multiply it as it is, in float32. Every
    letter of an operand must be in the other one or in the result."""
    einsum = functools.partial(jnp.einsum, preferred_element_type=dtype)
    operands, out = equation.split("->")
    left, right = operands.split(",")

    def backward(saved: Operands, d_out: jax.Array) -> Operands:
        (a, b), d_out = saved, d_out.astype(saved[0].dtype)
        d_a = einsum(f"{out},{right}->{left}", d_out, b)
        d_b = einsum(f"{out},{left}->{right}", d_out, a)
        return d_a.astype(a.dtype), d_b.astype(b.dtype)

    multiply = jax.custom_vjp(lambda a, b: einsum(equation, a, b))
    multiply.defvjp(lambda a, b: (einsum(equation, a, b), (a, b)), backward)
    return multiply(a, b)


def weight_product(
    x: Float[Array, "*batch X"], kernel: Float[Array, "X Z"]
) -> Float[Array, "*batch Z"]:
    """x kernel, in their dtype. The kernel's gradient sums over all of `batch`. The rule JAX
    derives puts the cotangent first, which XLA copies transposed on a CPU; the narrower operand
    first needs no copy (a SwiGLU of 64 by 128 takes a third of the time, forward and backward)."""
    return checkpoint_name(_weight_product(x, kernel), PRODUCT)


def _multiplied(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum("...X,XZ->...Z", x, kernel)


def _of_one_row(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x kernel of one row of 16-bit numbers on a CPU, where XLA would write a float32 copy of the
    kernel first: parts of the kernel are read once, side by side, and added in float32."""
    parts = kernel.reshape(_PARTS, -1, kernel.shape[1])
    terms = x.astype(jnp.float32).reshape(_PARTS, -1, 1)
    added = sum(part.astype(jnp.float32) * term for part, term in zip(parts, terms, strict=True))
    added = jax.lax.optimization_barrier(added)  # else the sums over rows and parts become one
    y = jnp.ones(len(added), jnp.float32) @ added
    return y.astype(x.dtype).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _weight_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if x.size != len(kernel) or len(kernel) % _PARTS or jnp.finfo(x.dtype).bits != 16:
        return _multiplied(x, kernel)
    run = jax.lax.platform_dependent(x, kernel, cpu=_of_one_row, default=_multiplied)
    return cast(jax.Array, run)


def _weight_product_backward(saved: Operands, d_out: jax.Array) -> Operands:
    x, kernel = saved
    d_x = jnp.einsum("...Z,XZ->...X", d_out, kernel)
    # XLA's CPU backend cannot transpose the float32 result of a product of 16-bit operands.
    is_first = x.shape[-1] <= d_out.shape[-1] or jnp.finfo(x.dtype).bits == 16
    d_kernel = _summed_over_batch(x, d_out) if is_first else _summed_over_batch(d_out, x).T
    return d_x, d_kernel.astype(kernel.dtype)


def _summed_over_batch(a: jax.Array, b: jax.Array) -> jax.Array:
    """a^T b [X, Z] of [*batch, X] and [*batch, Z], accumulated in float32 or wider: on a mesh
    partial sums are added after this. XLA's copy a^T on a CPU misses the cache at every element.
    Two copies, groups of 16 columns first and then inside each, take a third of its time."""
    batch, dtype = tuple(range(a.ndim - 1)), jnp.promote_types(a.dtype, jnp.float32)
    multiply = functools.partial(jax.lax.dot_general, preferred_element_type=dtype)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return multiply(a, b, ((batch, batch), ((), ())))

    def by_columns(a: jax.Array, b: jax.Array) -> jax.Array:
        columns = jnp.moveaxis(a.reshape(*a.shape[:-1], -1, 16), -2, 0)
        columns = jnp.moveaxis(jax.lax.optimization_barrier(columns), -1, 1)
        transposed = jax.lax.optimization_barrier(columns.reshape(a.shape[-1], *a.shape[:-1]))
        return multiply(transposed, b, ((tuple(range(1, a.ndim)), batch), ((), ())))

    if a.shape[-1] % 16:
        return plain(a, b)
    return cast(jax.Array, jax.lax.platform_dependent(a, b, cpu=by_columns, default=plain))


_weight_product.defvjp(
    lambda x, kernel: (_weight_product(x, kernel), (x, kernel)), _weight_product_backward
)


def normal_param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    std: float,
    dtype: DTypeLike,
    *,
    is_operand: bool | None = None,
) -> nnx.Param:
    value = std * jax.random.normal(rngs.params(), shape, dtype)
    return param(value, axes, is_operand=is_operand)


def linear(
    x: Float[Array, "*batch X"], kernel: Float[Array, "X Z"], dtype: DTypeLike
) -> Float[Array, "*batch Z"]:
    """x kernel, operands and result in `dtype`."""
    return weight_product(x.astype(dtype), kernel.astype(dtype))


def rms_norm(
    x: Float[Array, "*batch X"], weight: Float[Array, " X"], eps: float
) -> Float[Array, "*batch X"]:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis. Computed in float32 or better whatever
    the dtype of x (a bfloat16 mean of squares loses two digits), returned in the dtype of x."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(wide.dtype)).astype(x.dtype)


def length(x: Float[Array, "..."], axis: int | tuple[int, ...]) -> Float[Array, "..."]:
    """|x| over `axis`, kept with size 1; its derivative at a zero vector is taken as 0."""
    square = jnp.sum(x * x, axis=axis, keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


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
