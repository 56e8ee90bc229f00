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
from ttcd_kernels.short_conv import triton_call as short_conv_call
from ttcd_kernels.short_conv.operands import Facts, Operands
from ttcd_kernels.windows import Windows

WINDOWS = Windows(16, 8, 0.2)
BATCH, HEADS = ("data",), ("data", None, "tensor")
# Axis of the mesh (data 2, tensor 2) that splits b, c and f; are keys normalised.
LAYOUTS = {
    "batch and chunks": (("data", "tensor", None), True),
    "batch and features, plain keys": (("data", None, "tensor"), False),
    "batch and features, unit keys": (("data", None, "tensor"), True),
}


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


def _attention_operands():
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 24)), axis=1)
    return *draw(0, (2, 24, 4, 64), *[(2, 24, 2, 64)] * 2), jnp.asarray(ids)


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
    along = "data", "tensor"
    calls = {
        "heads": (gradient, [HEADS] * 3 + [BATCH]),
        "by hand": (by_hand, [HEADS] * 3 + [BATCH]),
        # Split where the kernel is not: along the sequence, and the queries alone.
        "sequence": (gradient, [along] * 3 + [BATCH]),
        "queries": (gradient, [HEADS, (), (), ()]),
    }
    operands = _attention_operands()
    return {name: _measured(mesh, *call, operands, gradient) for name, call in calls.items()}


def _mosaic(mesh):
    launched = []

    def launch_forward(windows, q, k, v):
        launched.append((q.shape, k.shape))  # the last time as a device's part
        return definitions.dual_window(q, k, v, None, windows)

    def attend(q, k, v):
        return mosaic_call.dual_window(q, k, v, None, WINDOWS)

    def definition(q, k, v):
        return definitions.dual_window(q, k, v, None, WINDOWS)

    mosaic_call.launch_forward = launch_forward
    found = _measured(mesh, attend, [HEADS] * 3, _attention_operands()[:3], definition)
    return found | {"launched": launched[-1]}


def _decode(mesh):
    launched = []

    def launch_one(windows, _, *arrays):
        launched.append(arrays[0].shape)
        return definitions.decode(*arrays, windows)

    decode_call._launch = launch_one
    operands = *draw(0, (2, 4, 32), *[(2, 24, 2, 32)] * 2), jnp.asarray([30, 11], jnp.int32)
    call = partial(decode_call.decode, windows=WINDOWS)
    definition = partial(definitions.decode, windows=WINDOWS)
    found = _measured(mesh, call, [("data", "tensor"), HEADS, HEADS, BATCH], operands, definition)
    return found | {"launched": launched[-1]}


def _short_conv_forward(shape, z_teacher, z_student, teacher_taps, student_taps, ids):
    def one_row(z_teacher, z_student, teacher_taps, student_taps, ids):
        x = Operands(z_teacher[None], z_student[None], teacher_taps, student_taps, ids[None])
        found = definitions.short_conv_residual(x, shape.facts)
        norm = jnp.linalg.norm(found[1] - found[0], axis=-1)
        return tuple(x[0] for x in (*found, *([norm] if shape.facts.normalizes_keys else [])))

    return jax.vmap(one_row)(z_teacher, z_student, teacher_taps, student_taps, ids)


def _short_conv_backward(shape, z_teacher, z_student, taps, _, ids, key, slope, along, *cotangents):
    """Any function of arrays of every kind."""
    d_difference, d_target, d_key = cotangents
    if key is not None:
        d_key = slope[..., None] * (d_key - along[..., None] * key)

    def sums(z, d):
        return taps[:, None] * jnp.sum(z * d, 2)[:, :, None]

    dz = z_teacher + d_difference, z_student + d_key
    return *dz, sums(z_teacher, d_target), sums(z_student, d_key)


def _short_conv(mesh):
    short_conv_call._launch_forward = _short_conv_forward
    short_conv_call._launch_backward = _short_conv_backward
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 4, 8)))
    operands = *draw(0, *[(2, 4, 8, 16)] * 2, *[(3, 16)] * 2), ids

    def forward(normalizes_keys, *arrays):
        facts = Facts(is_causal=True, normalizes_keys=normalizes_keys)
        return short_conv_call.short_conv_residual(Operands(*arrays), facts)

    def gradient(normalizes_keys, *arrays):
        call = partial(forward, normalizes_keys)
        (difference, target, key), pull = jax.vjp(lambda *xs: call(*xs, arrays[4]), *arrays[:4])
        return (difference, target, key), pull((target, key, difference))

    found = {}
    for layout, ((b, c, f), normalizes_keys) in LAYOUTS.items():
        specs = [(b, c, None, f)] * 2 + [(None, f)] * 2 + [(b, c, None)]
        found[layout] = [
            _measured(mesh, partial(run, normalizes_keys), specs, operands)
            for run in (forward, gradient)
        ]
    return found


def _found(op):
    return json.loads(printed(__file__, op))


def test_attention_splits_batch_and_kv_heads_and_moves_nothing_else():
    found = _found("dual_window")
    for name in ("heads", "by hand"):
        assert found[name]["moves"] == []
        dq, dk, dv = found[name]["shards"][4:]
        assert found[name]["shards"][:4] == [dq, dq, [1, 24, 2], [1, 24, 2]]
        assert (dq, dk, dv) == ([1, 24, 2, 64], [1, 24, 1, 64], [1, 24, 1, 64])
    assert max(layout["distance"] for layout in found.values()) <= 1e-5


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


def test_the_residual_splits_batch_chunks_and_the_features_of_plain_keys():
    found = _found("short_conv")
    assert found.keys() == LAYOUTS.keys()
    chunks, plain, unit = found.values()
    for forward, gradient in (chunks, plain):
        assert forward["moves"] == []
        assert gradient["moves"] == ["all-reduce"]  # the taps' gradients, over batch and chunks
    assert "all-gather" in unit[0]["moves"]  # a norm needs all features
    assert max(run["distance"] for runs in found.values() for run in runs) <= 1e-5
    assert chunks[1]["shards"][0] == [1, 2, 8, 16]
    assert plain[1]["shards"][0] == [1, 4, 8, 8]


if __name__ == "__main__":
    measure = {"dual_window": _dual_window, "mosaic": _mosaic, "decode": _decode}
    measure["short_conv"] = _short_conv
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    with launch.compiling_for(90):
        print(json.dumps(measure[sys.argv[1]](mesh)))
