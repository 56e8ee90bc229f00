"""The kernels' calls as the compiler splits them on a mesh, with other functions for the launches:
JAX cannot run the interpreter's callback inside a partitioned call.

Run as a program, the file prints what the tests compare: a mesh needs its own devices.
"""

import json
from functools import partial

import definitions
import jax
import jax.numpy as jnp
import numpy as np
from checks import distance, draw
from devices import COLLECTIVES, printed
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ttcd_kernels import launch
from ttcd_kernels.decode import triton_call as decode_call
from ttcd_kernels.decode import xla as decode_xla
from ttcd_kernels.dual_window import mosaic_call, triton_call
from ttcd_kernels.windows import Windows

WINDOWS = Windows(16, 8, 0.2)
BATCH, HEADS = ("data",), ("data", None, "tensor")
LAUNCHED = []  # shapes of queries and keys, the last time those of a device's part


def _measured(mesh, function, specs, operands, whole=None):
    """Collectives and launch of the split program, the distance of its results from those of one
    device, and the shard of each."""
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    program = jax.jit(function, in_shardings=shardings).lower(*operands).compile()
    found = jax.tree.leaves(program(*jax.device_put(operands, shardings)))
    launched = LAUNCHED[-1]
    expected = jax.tree.leaves(jax.jit(whole or function)(*operands))
    return {
        "launched": launched,
        "moves": [name for name in COLLECTIVES if name in program.as_text()],
        "distance": max(map(distance, found, expected)),
        "shards": [x.addressable_shards[0].data.shape for x in found],
    }


def _attention_operands(kv_heads):
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 24)), axis=1)
    return *draw(0, (2, 24, 4, 64), *[(2, 24, kv_heads, 64)] * 2), jnp.asarray(ids)


def _dual_window(mesh):
    def backward(windows, tuning, q, k, v, ids, near_out, near_delta, near_lse, far_out, *_):
        """Any function of arrays of every kind."""
        return (near_out + far_out) * (near_delta - near_lse)[..., None], k, 2 * v

    def gradient(q, k, v, ids):
        results, pull = jax.vjp(lambda *qkv: triton_call.dual_window(*qkv, ids, WINDOWS), q, k, v)
        return results, pull(results)

    def forward(windows, tuning, q, k, v, ids):
        LAUNCHED.append((q.shape, k.shape))
        return definitions.dual_window(q, k, v, ids, windows)

    triton_call._launch_forward, triton_call._launch_backward = forward, backward
    split, rows, partly = (PartitionSpec(*x) for x in (HEADS, BATCH, BATCH))
    specs = {"in_specs": (split, split, split, rows), "out_specs": ((split,) * 4, (split,) * 3)}
    by_hand = jax.shard_map(gradient, mesh=mesh, **specs)
    specs = {"in_specs": partly, "out_specs": partly, "axis_names": {"data"}}
    in_part = jax.shard_map(gradient, mesh=mesh, **specs)
    whole, along = [HEADS] * 3 + [BATCH], ("data", "tensor")
    calls = {
        "heads": (gradient, whole),
        "by hand": (by_hand, whole),
        "in part": (in_part, whole),
        # Split where the kernel is not: along the sequence, the queries alone, keys otherwise.
        "sequence": (gradient, [along] * 3 + [BATCH]),
        "queries": (gradient, [HEADS, (), (), ()]),
        "across": (gradient, [BATCH, (None, None, "data"), (None, None, "data"), ()]),
    }
    # The queries of a single kv head, which no device has alone.
    single = [HEADS, BATCH, BATCH, BATCH]
    alone = {"heads": (gradient, single), "in part": (in_part, single)}
    found, as_many = {}, dict([*calls.items()][:2])
    for kv_heads, chosen in ((4, as_many), (2, calls), (1, alone)):
        operands = _attention_operands(kv_heads)
        for name, (function, specs) in chosen.items():
            found[f"{name} {kv_heads}"] = _measured(mesh, function, specs, operands, gradient)
    mosaic_call.launch_forward = lambda windows, *arrays: forward(windows, None, *arrays)
    attend = partial(mosaic_call.dual_window, windows=WINDOWS)
    return found | {"mosaic 2": _measured(mesh, attend, whole, _attention_operands(2))}


def _decode(mesh):
    def launch_one(windows, _, *arrays):
        LAUNCHED.append([x.shape for x in arrays[:2]])
        return decode_xla._decode(windows, *arrays)

    decode_call._launch = launch_one
    call, found = partial(decode_call.decode, windows=WINDOWS), []
    for kv_heads in (2, 4, 1):
        position = jnp.asarray([30, 11], jnp.int32)
        operands = *draw(0, (2, 4, 32), *[(2, 24, kv_heads, 32)] * 2), position
        cache = HEADS if kv_heads > 1 else BATCH
        specs = [("data", "tensor"), cache, cache, BATCH]
        found.append(_measured(mesh, call, specs, operands))
    return found


def test_calls_split_batch_and_kv_heads_and_move_nothing_else():
    found = json.loads(printed(__file__))
    attention, decode = found["dual_window"], found["decode"]
    for name in ("heads 4", "by hand 4", "heads 2", "by hand 2", "mosaic 2"):
        layout, kv_heads = attention[name], int(name[-1])
        out, lse, keys = [1, 24, 2, 64], [1, 24, 2], [1, 24, kv_heads // 2, 64]
        assert layout["moves"] == []
        assert layout["launched"] == [out, keys]
        shards = [out, out, lse, lse, out, keys, keys]
        assert layout["shards"] == shards[: 4 if "mosaic" in name else 7]
    assert len(attention) == 11
    layout, *others = decode  # others: as many kv heads as queries, a single one
    assert layout["launched"] == [[1, 2, 32], [1, 24, 1, 32]]
    assert layout["moves"] == []
    assert layout["shards"] == [[1, 2, 32], [1, 2, 32], [1, 2], [1, 2]]
    assert max(x["distance"] for x in (*attention.values(), layout, *others)) <= 1e-5


if __name__ == "__main__":
    ops = {"dual_window": _dual_window, "decode": _decode}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    with launch.compiling_for(90):
        print(json.dumps({op: measured(mesh) for op, measured in ops.items()}))
