"""Collectives along a row against their definitions on the whole row; the operator of the prefix
does not commute.

Run as a program, the file prints what every device of a mesh (seq) got.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import printed
from jax.sharding import PartitionSpec as P

from ttcd_jax.sharding import sequence
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh
from ttcd_jax.sharding.rules import Shard

LENGTH = 3  # positions per device
REACH = 7  # of the halo: more than two devices


@functools.cache
def results(count: int) -> dict[str, np.ndarray]:
    found = json.loads(printed(__file__, count=count))
    return {name: np.asarray(values) for name, values in found.items()}


def row(count: int) -> np.ndarray:
    return np.arange(1, 1 + count * LENGTH)


def matrices(count: int) -> np.ndarray:
    """One per device; products of different order differ."""
    return np.random.default_rng(count).integers(-3, 4, (count, 2, 2))


@pytest.mark.parametrize("count", [4, 5])
def test_a_prefix_is_combined_from_left_to_right(count):
    expected = [np.eye(2)]
    for matrix in matrices(count)[:-1]:
        expected.append(expected[-1] @ matrix)
    backwards = functools.reduce(lambda left, right: right @ left, matrices(count)[:-1])
    assert not np.array_equal(expected[-1], backwards)
    np.testing.assert_array_equal(results(count)["prefix"], expected)


@pytest.mark.parametrize("count", [4, 5])
def test_devices_take_turns_from_left_to_right(count):
    states, state = [], np.eye(2)
    for matrix in matrices(count):
        states.append(state)
        state = state @ matrix
    np.testing.assert_array_equal(results(count)["turns"], states)


@pytest.mark.parametrize("count", [4, 5])
def test_a_halo_is_what_comes_before(count):
    whole = np.concatenate([np.zeros(REACH, int), row(count)])
    expected = [whole[i * LENGTH : (i + 1) * LENGTH + REACH] for i in range(count)]
    np.testing.assert_array_equal(results(count)["halo"], expected)
    segments = np.where(np.array(expected) > 0, np.array(expected) // 5, sequence.NOWHERE)
    np.testing.assert_array_equal(results(count)["segments"], segments)
    before = [row(count)[max(i * LENGTH - 1, 0)] // 5 for i in range(count)]
    np.testing.assert_array_equal(results(count)["left"], before)


def _print_results() -> None:
    count = jax.device_count()
    collect = jax.shard_map(
        functools.partial(_collect, Shard(frozenset({"seq"}))),
        in_specs=(P(None, "seq"), P("seq")),
        out_specs=P("seq"),
        check_vma=False,
    )
    arrays = jnp.asarray(row(count))[None], jnp.asarray(matrices(count), jnp.float32)
    with jax.set_mesh(build_mesh(MeshConfig(fsdp=1, seq=count))):
        found = jax.jit(collect)(*arrays)
    print(json.dumps({name: np.asarray(values).tolist() for name, values in found.items()}))


def _collect(shard, x, matrix):
    neutral = jnp.eye(2)[None]
    halo, segments = sequence.halo(shard, x, x // 5, REACH)
    _, turns = sequence.passed_along(shard, lambda state: (state @ matrix, state), neutral)
    return {
        "prefix": sequence.exclusive_prefix(shard, matrix, jnp.matmul, neutral),
        "turns": turns,
        "halo": halo,
        "segments": segments,
        "left": sequence.left_segment(shard, x // 5),
    }


if __name__ == "__main__":
    _print_results()
