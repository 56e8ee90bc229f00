"""The axis legend, used in every shape, einsum and suffix of the project.

    B batch          T query positions    S key positions      N query heads     K kv heads
    G = N / K        H head dim           D model dim          F mlp hidden dim  V vocabulary
    C chunks         L positions per chunk (T = C * L)         R conv taps       Y stacked layers
    Q time scales of a memory

Parameters carry the names of their logical axes as metadata (`axes=(...)`), one per dimension:
`embed` (D), `mlp` (F), `heads` (N * H), `kv_heads` (K * H), `head_dim` (H), `vocab` (V), `taps`
(R), `layers` (Y, added when blocks are stacked). Fast weights add `fast_heads` (N), `fast_mlp` (F),
`rank` (the inner dimension of low-rank initial weights, or a pair of factors per channel) and
`scales` (Q). `ttcd_jax.sharding.rules` maps them to mesh axes.
"""

import jax
from flax import nnx

LOGICAL_AXES = (
    *("embed", "embed_out", "mlp", "heads", "kv_heads", "head_dim", "vocab", "taps"),
    *("fast_heads", "fast_mlp", "rank", "scales", "layers"),
)


def param(value: jax.Array, axes: tuple[str, ...], *, is_operand: bool | None = None) -> nnx.Param:
    """A parameter with one logical axis name per dimension.

    `is_operand`: whether it is only an operand of products in the compute dtype, and may be rounded
    to it early (before a collective, once for inference); by default, whether it has two dimensions
    or more. Raises `KeyError` for an unknown name.
    """
    for name in axes:
        if name not in LOGICAL_AXES:
            raise KeyError(
                f"unknown logical axis {name!r}; the legend has {', '.join(LOGICAL_AXES)}"
            )
    assert len(axes) == value.ndim, f"{len(axes)} axis names for a parameter of shape {value.shape}"
    return nnx.Param(
        value, axes=axes, is_operand=value.ndim > 1 if is_operand is None else is_operand
    )
