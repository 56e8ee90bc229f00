"""Muon as published: a matrix is updated along its orthogonalised momentum.

    buf <- mu buf + g,   u = g + mu buf (Nesterov),
    p <- p (1 - rate * decay) - rate * 0.2 sqrt(max(A, B)) NS(u)      for every matrix p [A, B]

NS is five quintic iterations, each with its own coefficients, from u / (|u|_F + 1e-7). All other
parameters, and the embedding and the head, follow AdamW at the same rate and decay.
(`optax.contrib.muon` has bias corrections in its momentum, one eps, and no dtype of NS.)
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ttcd_jax.nn.linear import newton_schulz

Axes = tuple[str, ...]
AxesTree = Any  # nested as the parameters are, with `Axes` for each
Group = Literal["muon", "adamw"]


def group_of(axes: Axes) -> Group:
    """The optimizer of a parameter by its axis names: "muon" for two or more besides `layers`
    (projections, convolutions, fast weights) without `vocab` (embedding and head); else "adamw"."""
    names = [name for name in axes if name != "layers"]
    return "muon" if len(names) >= 2 and "vocab" not in names else "adamw"


def parameter_groups(axes: AxesTree) -> Any:
    return jax.tree.map(group_of, axes, is_leaf=lambda node: isinstance(node, tuple))


def orthogonalization(axes: AxesTree, dtype: DTypeLike) -> optax.GradientTransformation:
    """u -> 0.2 sqrt(max(A, B)) NS(u), Newton-Schulz in `dtype`."""

    def direction(names: Axes, u: Any) -> Any:  # of a parameter of the other group: none
        return u if isinstance(u, optax.MaskedNode) else orthogonalized(u, names, dtype)

    def update(updates: Any, _: Any) -> Any:
        return jax.tree.map(direction, axes, updates, is_leaf=lambda x: isinstance(x, tuple))

    return optax.stateless(update)


def orthogonalized(u: Float[Array, "..."], axes: Axes, dtype: DTypeLike) -> Float[Array, "..."]:
    """0.2 sqrt(max(A, B)) NS(u) of every matrix [A, B] of a tensor, in u's dtype: the last two
    dimensions; taps [R, F] of a depthwise convolution are F matrices of shape 1 x R."""
    assert len(axes) == u.ndim, f"{len(axes)} axis names for a tensor of shape {u.shape}"
    narrow = u.astype(dtype)
    if "taps" in axes:
        taps = axes.index("taps")
        longest = u.shape[taps]
        rows = newton_schulz(jnp.moveaxis(narrow, taps, -1)[..., None, :])
        direction = jnp.moveaxis(rows[..., 0, :], -1, taps)
    else:
        longest = max(u.shape[-2:])
        stack = narrow.reshape(-1, *u.shape[-2:])
        direction = _shared_newton_schulz(stack).reshape(u.shape)
    return 0.2 * math.sqrt(longest) * direction.astype(u.dtype)


def _shared_newton_schulz(stack: Float[Array, "Y X Z"]) -> Float[Array, "Y X Z"]:
    """Newton-Schulz with whole matrices on every device of the mesh, if there is one.

    XLA would gather a stack that is sharded inside its matrices, once per product. Instead
    all-to-alls in the narrow dtype exchange the shards for whole matrices and back: no intermediate
    array is larger than a device's shard or its ceil(Y / devices) matrices. To keep XLA from
    gathering, mesh axes move one at a time, the last first, and zero matrices pad the stack to a
    multiple of the devices. The copies of the model along `data` each compute all of it.
    """
    mesh, free = jax.typeof(stack).sharding.mesh, PartitionSpec.UNCONSTRAINED
    axes = [name for name in reversed(mesh.auto_axes) if name != "data"]
    names = tuple(name for name in axes if mesh.shape[name] > 1)
    devices = math.prod(mesh.shape[name] for name in names)
    # Padded inside its matrices, or XLA would share out the uneven stack.
    stages = [
        NamedSharding(mesh, PartitionSpec(names[:count], free, free))
        for count in range(0 if len(stack) % devices else 1, len(names) + 1)
    ]
    x = jnp.pad(stack, ((0, -len(stack) % devices), (0, 0), (0, 0)))
    for stage in stages:
        x = jax.lax.with_sharding_constraint(x, stage)
    x = newton_schulz(x)
    for stage in reversed(stages):
        x = jax.lax.with_sharding_constraint(x, stage)
    return x[: len(stack)]
