"""Collectives along a row against their definitions on the whole row; the operator of the prefix
does not commute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import elsewhere
from jax.sharding import PartitionSpec as P

from ttcd_jax.sharding import sequence
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh
from ttcd_jax.sharding.rules import Shard

LENGTH = 3  # positions per device
REACH = 7  # of the halo: more than two devices


def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The row, and a matrix per device: products of different order differ."""
    matrices = np.random.default_rng(count).integers(-3, 4, (count, 2, 2))
    return np.arange(1, 1 + count * LENGTH), matrices


def collected():
    """By name, what every device of a mesh (seq) got."""
    count = jax.device_count()
    collect = jax.shard_map(
        functools.partial(_collect, Shard(frozenset({"seq"}))),
        in_specs=(P(None, "seq"), P("seq")),
        out_specs=P("seq"),
        check_vma=False,
    )
    row, matrices = drawn(count)
    with jax.set_mesh(build_mesh(MeshConfig(fsdp=1, seq=count))):
        found = jax.jit(collect)(jnp.asarray(row)[None], jnp.asarray(matrices, jnp.float32))
    return jax.tree.map(np.asarray, found)


def _collect(shard, x, matrix):
    neutral = jnp.eye(2)[None]
    halo, segments = sequence.halo(shard, x, x // 5, REACH)
    _, turns = sequence.passed_along(shard, lambda state: (state @ matrix, state), neutral)
    prefix = sequence.exclusive_prefix(shard, matrix, jnp.matmul, neutral)
    left = sequence.left_segment(shard, x // 5)
    return {"prefix": prefix, "turns": turns, "halo": halo, "segments": segments, "left": left}


@pytest.mark.parametrize("count", [4, 5])
def test_devices_get_what_the_whole_row_defines(count):
    row, matrices = drawn(count)
    prefix = [np.eye(2)]
    for matrix in matrices[:-1]:  # from left to right
        prefix.append(prefix[-1] @ matrix)
    backwards = functools.reduce(lambda left, right: right @ left, matrices[:-1])
    assert not np.array_equal(prefix[-1], backwards)
    whole = np.concatenate([np.zeros(REACH, int), row])
    halo = np.stack([whole[i * LENGTH : (i + 1) * LENGTH + REACH] for i in range(count)])
    expected = {
        "prefix": prefix,
        "turns": prefix,
        "halo": halo,
        "segments": np.where(halo > 0, halo // 5, sequence.NOWHERE),
        "left": [row[max(i * LENGTH - 1, 0)] // 5 for i in range(count)],
    }
    found = elsewhere(collected, count=count)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], name)
