"""The fused attention call as the compiler splits it on a mesh, with the definition in place of the
launches: JAX cannot run the interpreter's callback inside a partitioned call.

Run as a program, the file prints the measurements of the test: a mesh needs its own devices.
"""

import json

import jax
import jax.numpy as jnp
from devices import COLLECTIVES, printed
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ttcd_kernels import launch
from ttcd_kernels.dual_window import reference, triton_call
from ttcd_kernels.windows import Windows

WINDOWS = Windows(16, 8, 0.2)


def _forward(shape, q, k, v, ids):
    return reference.dual_window(q, k, v, ids, Windows(*shape[:3]))


def _backward(shape, q, k, v, ids, near_out, near_delta, near_lse, far_out, *_):
    """Any function of arrays of every kind."""
    return (near_out + far_out) * (near_delta - near_lse)[..., None], k, 2 * v


def _gradient(q, k, v, ids):
    results, pull = jax.vjp(lambda *qkv: triton_call.dual_window(*qkv, ids, WINDOWS), q, k, v)
    return results, pull(results)


def _measure() -> dict[str, object]:
    triton_call._launch_forward, triton_call._launch_backward = _forward, _backward
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 24, 4, 32), (2, 24, 2, 32), (2, 24, 2, 32)
    q, k, v = (jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))
    ids = jnp.sort(jax.random.randint(keys[0], (2, 24), 0, 3), axis=1)
    with launch.compiling_for(90):
        expected = jax.jit(_gradient)(q, k, v, ids)
        run = jax.jit(_gradient, in_shardings=(split, split, split, rows))
        program = run.lower(q, k, v, ids).compile().as_text()
        found = run(q, k, v, ids)
        parts = split.spec, rows.spec
        by_hand = jax.shard_map(
            _gradient,
            mesh=mesh,
            in_specs=(*parts[:1] * 3, parts[1]),
            out_specs=((parts[0],) * 4, (parts[0],) * 3),
        )
        found_by_hand = jax.jit(by_hand)(q, k, v, ids)
        # Split where the kernel is not: along the sequence, and the queries alone.
        along = NamedSharding(mesh, PartitionSpec("data", "tensor"))
        none = NamedSharding(mesh, PartitionSpec())
        moved = [
            jax.jit(_gradient, in_shardings=shardings)(q, k, v, ids)
            for shardings in ((along, along, along, rows), (split, none, none, none))
        ]

    def distance(found):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)

    return {
        "collectives": [name for name in COLLECTIVES if name in program],
        "distance": distance(found),
        "distance in shard_map": distance(found_by_hand),
        "distance after moving": max(map(distance, moved)),
        "is_split": [len(x.sharding.device_set) == 4 for x in jax.tree.leaves(found)],
        "shard": found[0][0].addressable_shards[0].data.shape,
    }


def test_a_mesh_splits_batch_and_kv_heads_and_moves_nothing_else():
    found = json.loads(printed(__file__))
    assert found["collectives"] == []
    assert found["distance"] <= 1e-5
    assert found["distance in shard_map"] <= 1e-5
    assert found["distance after moving"] <= 1e-5
    assert all(found["is_split"])
    assert found["shard"] == [1, 24, 2, 32]


if __name__ == "__main__":
    print(json.dumps(_measure()))
