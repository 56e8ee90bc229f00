"""The kernels' calls as the compiler splits them on a mesh, with definitions in place of launches:
JAX cannot run the interpreter's callback inside a partitioned call.

Run as a program with the name of an op, the file prints the measurements of its test: a mesh needs
its own devices.
"""

import json
import sys
from functools import partial

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import distance, draw
from devices import COLLECTIVES, printed
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ttcd_kernels import launch
from ttcd_kernels.decode import triton_call as decode_call
from ttcd_kernels.dual_window import mosaic_call, triton_call
from ttcd_kernels.windows import Windows

WINDOWS = Windows(16, 8, 0.2)
BATCH, HEADS = ("data",), ("data", None, "tensor")


def _measured(mesh, function, specs, operands, definition=None):
    """Collectives of the split program, the distance of its results from those of one device or of
    a definition, and the shard of each."""
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    program = jax.jit(function, in_shardings=shardings).lower(*operands).compile()
    found = jax.tree.leaves(program(*jax.device_put(operands, shardings)))
    expected = jax.tree.leaves(jax.jit(definition or function)(*operands))
    return {
        "moves": [name for name in COLLECTIVES if name in program.as_text()],
        "distance": max(map(distance, found, expected)),
        "shards": [x.addressable_shards[0].data.shape for x in found],
    }


def _attention_operands(kv_heads=2):
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 24)), axis=1)
    return *draw(0, (2, 24, 4, 64), *[(2, 24, kv_heads, 64)] * 2), jnp.asarray(ids)


def _dual_window(mesh):
    def backward(shape, q, k, v, ids, near_out, near_delta, near_lse, far_out, *_):
        """Any function of arrays of every kind."""
        return (near_out + far_out) * (near_delta - near_lse)[..., None], k, 2 * v

    def gradient(q, k, v, ids):
        results, pull = jax.vjp(lambda *qkv: triton_call.dual_window(*qkv, ids, WINDOWS), q, k, v)
        return results, pull(results)

    def forward(shape, q, k, v, ids):
        return definitions.dual_window(q, k, v, ids, shape.windows)

    triton_call._launch_forward, triton_call._launch_backward = forward, backward
    split, rows = PartitionSpec(*HEADS), PartitionSpec(*BATCH)
    in_specs, out_specs = (split, split, split, rows), ((split,) * 4, (split,) * 3)
    by_hand = jax.shard_map(gradient, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    partly = PartitionSpec("data")
    in_part = jax.shard_map(
        gradient, mesh=mesh, in_specs=partly, out_specs=partly, axis_names={"data"}
    )
    along = "data", "tensor"
    calls = {
        "heads": (gradient, [HEADS] * 3 + [BATCH]),
        "by hand": (by_hand, [HEADS] * 3 + [BATCH]),
        "in part": (in_part, [HEADS] * 3 + [BATCH]),
        # Split where the kernel is not: along the sequence, and the queries alone.
        "sequence": (gradient, [along] * 3 + [BATCH]),
        "queries": (gradient, [HEADS, (), (), ()]),
    }
    found = {}
    for kv_heads in (4, 2, 1):
        operands = _attention_operands(kv_heads)
        if kv_heads == 1:  # the queries of a single kv head, which no device has alone
            specs = [HEADS, BATCH, BATCH, BATCH]
            calls = {"heads": (gradient, specs), "in part": (in_part, specs)}
        found[kv_heads] = {
            name: _measured(mesh, *call, operands, gradient) for name, call in calls.items()
        }
    return found


def _mosaic(mesh):
    launched = []

    def launch_forward(windows, q, k, v, ids):
        launched.append((q.shape, k.shape))  # the last time as a device's part
        return definitions.dual_window(q, k, v, ids, windows)

    def attend(q, k, v, ids):
        return mosaic_call.dual_window(q, k, v, ids, WINDOWS)

    def definition(q, k, v, ids):
        return definitions.dual_window(q, k, v, ids, WINDOWS)

    mosaic_call.launch_forward = launch_forward
    specs = [HEADS] * 3 + [BATCH]
    found = _measured(mesh, attend, specs, _attention_operands()[:4], definition)
    return found | {"launched": launched[-1]}


def _decode(mesh):
    launched = []

    def launch_one(windows, _, *arrays):
        launched.append(arrays[0].shape)
        return definitions.decode(*arrays, windows)

    decode_call._launch = launch_one
    call = partial(decode_call.decode, windows=WINDOWS)
    definition = partial(definitions.decode, windows=WINDOWS)
    found = {}
    for kv_heads in (4, 1, 2):
        position = jnp.asarray([30, 11], jnp.int32)
        operands = *draw(0, (2, 4, 32), *[(2, 24, kv_heads, 32)] * 2), position
        cache = HEADS if kv_heads > 1 else BATCH
        specs = [("data", "tensor"), cache, cache, BATCH]
        found[kv_heads] = _measured(mesh, call, specs, operands, definition)
    return found[2] | {"launched": launched[-1], "others": [found[4], found[1]]}


def _found(op):
    return json.loads(printed(__file__, op))


def test_attention_splits_batch_and_kv_heads_and_moves_nothing_else():
    found = _found("dual_window")
    for kv_heads, name in ((4, "heads"), (4, "by hand"), (2, "heads"), (2, "by hand")):
        layout = found[str(kv_heads)][name]
        assert layout["moves"] == []
        dq, dk, dv = layout["shards"][4:]
        assert layout["shards"][:4] == [dq, dq, [1, 24, 2], [1, 24, 2]]
        assert (dq, dk) == ([1, 24, 2, 64], [1, 24, kv_heads // 2, 64])
        assert dk == dv
    layouts = [layout for of_heads in found.values() for layout in of_heads.values()]
    assert len(layouts) == 12
    assert max(layout["distance"] for layout in layouts) <= 1e-5


@pytest.mark.parametrize(
    ("op", "launched", "out", "lse"),
    [
        ("mosaic", [[1, 24, 2, 64], [1, 24, 1, 64]], [1, 24, 2, 64], [1, 24, 2]),
        ("decode", [1, 2, 32], [1, 2, 32], [1, 2]),
    ],
)
def test_a_single_launch_splits_batch_and_kv_heads_and_moves_nothing(op, launched, out, lse):
    found = _found(op)
    assert found["launched"] == launched
    assert found["moves"] == []
    assert found["distance"] <= 1e-5
    assert found["shards"] == [out, out, lse, lse]
    for other in found.get("others", []):  # as many kv heads as queries, a single one
        assert other["distance"] <= 1e-5


if __name__ == "__main__":
    measure = {"dual_window": _dual_window, "mosaic": _mosaic, "decode": _decode}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    with launch.compiling_for(90):
        print(json.dumps(measure[sys.argv[1]](mesh)))
