"""What devices that hold neighbouring parts of a row tell each other, along the mesh axis `seq`.

For functions that run inside `rules.sharded`: x [B, T, ...] is a device's own part of the row, T
positions. Nothing here grows with the length of the row but `passed_along`'s time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

SEQ = "seq"
# The segment of positions in front of the row: equal to none of a document.
NOWHERE = jnp.iinfo(jnp.int32).min


def num_parts() -> int:
    """Parts that a row is cut into."""
    return jax.lax.axis_size(SEQ)


def is_last() -> jax.Array:
    return jax.lax.axis_index(SEQ) == num_parts() - 1


def from_left(tree: Any, distance: int = 1) -> Any:
    """Every array as the neighbour `distance` to the left holds it; zeros where there is none."""
    pairs = [(i, i + distance) for i in range(num_parts() - distance)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, SEQ, pairs), tree)


def with_halo(x: Array, size: int) -> Array:
    """x with the `size` positions in front of it, [B, size + T, ...]: zeros before the row begins,
    and no more than the row has. Takes as many neighbours as they stand on."""
    length = x.shape[1]
    parts = [x]
    for distance in range(1, num_parts()):
        take = min(length, size - (distance - 1) * length)
        if take <= 0:
            break
        parts.insert(0, from_left(x[:, length - take :], distance))
    return jnp.concatenate(parts, axis=1)


def segments_with_halo(
    segment_ids: Int[Array, "B T"] | None, length: int, batch: int, size: int
) -> Int[Array, "B S"]:
    """Segment ids to `with_halo`'s positions, `NOWHERE` before the row begins."""
    ids = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    ids = with_halo(ids, size)
    halo = ids.shape[1] - length
    place = jax.lax.axis_index(SEQ) * length + jnp.arange(-halo, length)
    return jnp.where(place >= 0, ids, NOWHERE)


def left_segment(segment_ids: Int[Array, "B T"]) -> Int[Array, " B"]:
    """The segment of the position in front of this part; at the row's begin that of its first."""
    is_first = jax.lax.axis_index(SEQ) == 0
    return jnp.where(is_first, segment_ids[:, 0], from_left(segment_ids[:, -1]))


def exclusive_prefix(element: Any, combine: Callable[[Any, Any], Any], neutral: Any) -> Any:
    """combine of the elements of all devices to the left, in order; `neutral` on the first.

    In logarithmic steps: the elements move one to the right, then partial results twice as far each
    time, so a device sends 1 + ceil(log2(n - 1)) elements, never more than the n - 1 of an
    all-gather.
    """
    index, parts = jax.lax.axis_index(SEQ), num_parts()

    def shifted(tree: Any, distance: int) -> Any:
        has_left = index >= distance
        return jax.tree.map(
            lambda left, empty: jnp.where(has_left, left, empty), from_left(tree, distance), neutral
        )

    prefix = shifted(element, 1)
    distance = 1
    while distance < parts - 1:
        prefix = combine(shifted(prefix, distance), prefix)
        distance *= 2
    return prefix


def passed_along(step: Callable[[Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
    """(state, result) of step(state), the first device's state being `state` and every other's what
    its left neighbour's step left behind.

    For chains that no prefix replaces: devices take turns, so it lasts as long as on one device;
    it sends one state per device. The backward recomputes each step.
    """
    index = jax.lax.axis_index(SEQ)
    _, result = jax.eval_shape(step, state)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
    step = jax.checkpoint(step)

    def turn(carry: Any, number: jax.Array) -> tuple[Any, None]:
        given, done = carry
        mine = index == number
        after, result = jax.lax.cond(mine, step, lambda given: (given, nothing), given)
        done = jax.tree.map(jnp.add, done, result)
        choose = functools.partial(jnp.where, index == number + 1)
        return (jax.tree.map(choose, from_left(after), after), done), None

    (state, result), _ = jax.lax.scan(turn, (state, nothing), jnp.arange(num_parts()))
    return state, result
