"""Collectives between devices that hold neighboring shards of a sequence, along mesh axis `seq`,
inside `rules.sharded`: x [B, T, ...] is a device's shard of the rows, T positions. On one device
every function returns the result of its argument alone. The bytes sent do not grow with the length
of the row; only the time of `passed_along` does."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ttcd_jax.sharding.rules import Shard

SEQ = "seq"
# The segment id of positions before the row: no document has it.
NOWHERE = jnp.iinfo(jnp.int32).min


def from_left(shard: Shard, tree: Any, distance: int = 1) -> Any:
    """Every array of the neighbor `distance` to the left; zeros without one."""
    if shard.size(SEQ) <= distance:
        return jax.tree.map(jnp.zeros_like, tree)
    pairs = [(i, i + distance) for i in range(shard.size(SEQ) - distance)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, SEQ, pairs), tree)


def halo(
    shard: Shard, tree: Any, segment_ids: Int[Array, "B T"] | None, reach: int | None
) -> tuple[Any, Int[Array, "B S"] | None]:
    """(every array with up to `reach` positions before it, None: the whole row; their segment ids).
    Before the start of the row, arrays are zero and segments `NOWHERE`; without a halo both are
    unchanged."""
    batch, length = jax.tree.leaves(tree)[0].shape[:2]
    available = (shard.size(SEQ) - 1) * length
    size = available if reach is None else min(reach, available)
    if not size:
        return tree, segment_ids

    def extended(x: jax.Array) -> jax.Array:
        parts = [x]
        for distance in range(1, -(-size // length) + 1):
            first = max(distance * length - size, 0)
            parts.insert(0, from_left(shard, x[:, first:], distance))
        return jnp.concatenate(parts, axis=1)

    ids = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    tree, ids = jax.tree.map(extended, (tree, ids))
    position = shard.index(SEQ) * length + jnp.arange(-size, length)
    return tree, jnp.where(position >= 0, ids, NOWHERE)


def left_segment(shard: Shard, segment_ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """The segment id of the position before this shard; at the start of the row, the first one."""
    left = from_left(shard, segment_ids[:, -1])
    return jnp.where(shard.index(SEQ) == 0, segment_ids[:, 0], left)


def exclusive_prefix(
    shard: Shard, element: Any, combine: Callable[[Any, Any], Any], neutral: Any
) -> Any:
    """The elements of all devices to the left, combined in order; `neutral` on the first. In
    logarithmic rounds: a device sends 1 + ceil(log2(n - 1)) elements."""
    index, parts = shard.index(SEQ), shard.size(SEQ)

    def shifted(tree: Any, distance: int) -> Any:
        choose = functools.partial(jnp.where, index >= distance)
        return jax.tree.map(choose, from_left(shard, tree, distance), neutral)

    prefix = shifted(element, 1)
    distance = 1
    while distance < parts - 1:
        prefix = combine(shifted(prefix, distance), prefix)
        distance *= 2
    return prefix


def passed_along(
    shard: Shard, advance: Callable[[Any], tuple[Any, Any]], state: Any
) -> tuple[Any, Any]:
    """(state, result) of advance(state): the first device starts from `state`, every other from the
    state of its left neighbor. Devices take turns, so the time is that of one device with the whole
    row; each sends one state. The backward recomputes each call."""
    index = shard.index(SEQ)
    _, result = jax.eval_shape(advance, state)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
    advance = jax.checkpoint(advance)

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        before, total = carry
        mine = index == number
        after, result = jax.lax.cond(mine, advance, lambda state: (state, nothing), before)
        total = jax.tree.map(jnp.add, total, result)
        choose = functools.partial(jnp.where, index == number + 1)
        return (jax.tree.map(choose, from_left(shard, after), after), total), None

    (state, result), _ = jax.lax.scan(turn, (state, nothing), jnp.arange(shard.size(SEQ)))
    return state, result
