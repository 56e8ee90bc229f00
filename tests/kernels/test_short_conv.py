"""The convolved residual: its composition in XLA against definitions, the Triton kernels by the
interpreter and as machine code, meshes, and refusals.

Run as a program, the file prints the measurements of the mesh test: a mesh needs its own devices.
"""

import functools
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, distance, draw
from devices import COLLECTIVES, printed
from interpreting import errors_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ttcd_kernels import launch, parity
from ttcd_kernels.normalize import PUBLISHED_ZERO_SLOPE, l2_normalize
from ttcd_kernels.short_conv import bench, reference, triton_call, xla
from ttcd_kernels.short_conv.api import short_conv_residual
from ttcd_kernels.short_conv.reference import Facts, Operands
from ttcd_kernels.short_conv.tuning import TABLE, tuning_for

B, C, L, F = 2, 3, 7, 5
CAUSAL = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "symmetric"])
DOCUMENTS = pytest.mark.parametrize("has_documents", [False, True], ids=["plain", "documents"])

# Cases of the interpreter: tiles that divide neither tokens nor features.
BASE = {
    **{"B": 1, "C": 2, "L": 11, "F": 24, "R": 5, "forward": [4, 16], "backward": [4, 16]},
    **{"is_causal": True, "normalizes_keys": True},
}
SYMMETRIC, PLAIN_KEYS = {"is_causal": False}, {"normalizes_keys": False}
CASES = [
    # taps
    BASE | {"B": 2},
    BASE | {"R": 3} | SYMMETRIC | PLAIN_KEYS,
    BASE | {"R": 4} | SYMMETRIC,
    BASE | {"R": 1},
    # tiles
    BASE | {"L": 3, "C": 3} | SYMMETRIC,  # less than the taps reach, less than a tile
    BASE | {"F": 7, "L": 8, "forward": [8, 8], "backward": [8, 8]} | PLAIN_KEYS,
    BASE | {"F": 300, "is_public": True},
    # segments
    BASE | {"segments": 2, "B": 2},
    BASE | {"segments": 3} | SYMMETRIC | PLAIN_KEYS,
    # transforms
    *[BASE | {"transform": name} for name in ("jit", "remat")],
    BASE | {"transform": "vmap", "segments": 2},
    # zero vectors
    *[BASE | {"has_zero_row": True, "zero_slope": slope} for slope in (3.0, PUBLISHED_ZERO_SLOPE)],
    # narrow
    BASE | {"dtype": "bfloat16", "taps_dtype": "bfloat16"},
    BASE | {"dtype": "bfloat16"} | PLAIN_KEYS,
    BASE | {"dtype": "float16"},
]
# float32: sums of up to 22 products. Narrow: results rounded once, a difference of two of them.
BOUND = {"float32": 1e-6, "bfloat16": 1.5e-2, "float16": 2e-3}


def test_kernels_give_results_and_gradients_of_the_definition():
    for case, errors in zip(CASES, errors_of("short_conv", CASES), strict=True):
        # One by one: `max` passes over NaN, the value of an unwritten result.
        bound = BOUND[case.get("dtype", "float32")]
        assert all(error < bound for error in errors.values()), (case, errors)
        if "taps_dtype" not in case:  # products of narrow numbers, never rounded
            assert errors["d_teacher_taps"] < BOUND["float32"], (case, errors)


def _operands(num_taps, has_documents, dtype=None):
    """Both z, both taps, ids and cotangents."""
    z_shape, taps_shape = (B, C, L, F), (num_taps, F)
    shapes = *[z_shape] * 2, *[taps_shape] * 2, *[z_shape] * 3
    *arrays, d_difference, d_target, d_key = draw(num_taps, *shapes, dtype=dtype)
    ids = None
    if has_documents:  # not sorted: a segment may come back
        ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, C, L)))
    return arrays, ids, (d_difference, d_target, d_key)


def _by_hand(x, taps, ids, is_causal):
    """The convolution, one product at a time."""
    x, taps = np.asarray(x), np.asarray(taps)
    y = np.zeros(x.shape)
    before = len(taps) - 1 if is_causal else len(taps) // 2
    for b, c, t, r in np.ndindex(B, C, L, len(taps)):
        source = t + r - before
        if 0 <= source < L and (ids is None or ids[b, c, source] == ids[b, c, t]):
            y[b, c, t] += taps[r] * x[b, c, source]
    return y


@CAUSAL
@DOCUMENTS
@pytest.mark.parametrize("num_taps", [1, 3, 4])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_definition_and_composition_follow_the_formula(
    implementation, num_taps, has_documents, is_causal, float64
):
    arrays, ids, _ = _operands(num_taps, has_documents)
    target, student = (
        _by_hand(x, taps, ids, is_causal) for x, taps in zip(arrays[:2], arrays[2:], strict=True)
    )
    unit = student / np.linalg.norm(student, axis=-1, keepdims=True)
    for normalizes_keys, key in ((True, unit), (False, student)):
        found = short_conv_residual(
            *arrays,
            is_causal=is_causal,
            normalizes_keys=normalizes_keys,
            segment_ids=ids,
            implementation=implementation,
        )
        assert_close(found, tuple(map(jnp.asarray, (target - student, target, key))))


@CAUSAL
@DOCUMENTS
@pytest.mark.parametrize("normalizes_keys", [True, False], ids=["unit keys", "plain keys"])
def test_gradients_of_the_composition_are_those_of_the_definition(
    normalizes_keys, has_documents, is_causal, float64
):
    arrays, ids, cotangents = _operands(5, has_documents)
    facts = {"is_causal": is_causal, "normalizes_keys": normalizes_keys, "segment_ids": ids}

    @jax.jit
    def gradient(implementation_free_arrays):
        found = []
        for name in ("xla", "reference"):
            call = functools.partial(short_conv_residual, **facts, implementation=name)
            found.append(jax.vjp(call, *implementation_free_arrays)[1](cotangents))
        return found

    assert_close(*gradient(arrays))


@pytest.mark.parametrize("slope", [1.0, PUBLISHED_ZERO_SLOPE])
def test_a_zero_key_passes_on_its_gradient_times_the_slope(slope):
    z, d_key = draw(0, (1, 1, 4, F), (1, 1, 4, F))
    z = z.at[0, 0, 2].set(0)
    identity = jnp.ones((1, F))

    def key(z_student):
        facts = {"is_causal": True, "normalizes_keys": True, "zero_slope": slope}
        return short_conv_residual(z, z_student, identity, identity, **facts)[2]

    gradient = jax.vjp(key, z)[1](d_key)[0]
    assert_close(gradient[0, 0, 2], slope * d_key[0, 0, 2])
    assert_close(gradient[0, 0, 1], jax.vjp(l2_normalize, z[0, 0, 1])[1](d_key[0, 0, 1])[0])


@CAUSAL
def test_each_convolution_is_rounded_once_and_the_rest_starts_from_that(is_causal):
    (z_teacher, z_student, *taps), ids, _ = _operands(5, True, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (z_teacher, z_student, *taps)]
    convolve = functools.partial(xla.short_conv, is_causal=is_causal, segment_ids=ids)
    target = convolve(wide[0], wide[2]).astype(jnp.bfloat16)
    student = convolve(wide[1], wide[3]).astype(jnp.bfloat16)
    facts = {"is_causal": is_causal, "normalizes_keys": True, "segment_ids": ids}
    for name in ("xla", "reference"):
        found = short_conv_residual(z_teacher, z_student, *taps, **facts, implementation=name)
        assert_same(found[:2], (target - student, target))
        assert_close(found[2], l2_normalize(student), 0 if name == "xla" else 2**-8)


def test_without_a_gpu_auto_is_the_composition():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    arrays, ids, _ = _operands(5, True)
    facts = {"is_causal": True, "normalizes_keys": True, "segment_ids": ids}
    xla_results = short_conv_residual(*arrays, **facts, implementation="xla")
    assert_same(short_conv_residual(*arrays, **facts), xla_results)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("num_features", [2816, 4096])
@pytest.mark.parametrize(
    "facts",
    [
        {"normalizes_keys": False},
        {"normalizes_keys": True},
        {"normalizes_keys": True, "has_segments": True},
    ],
    ids=["plain keys", "unit keys", "unit keys, documents"],
)
def test_machine_code_is_one_launch_each_way_and_spills_nothing(facts, num_features, capability):
    kernels, launched = bench.compile_gradient(capability, num_features, **facts)
    assert launched == ["short_conv_residual_forward", "short_conv_residual_backward"]
    assert [kernel.name for kernel in kernels] == launched
    forward, backward = kernels
    assert forward.spill_bytes == 0
    assert backward.spill_bytes == 0
    # 16 warps per multiprocessor and more hide the latency of memory.
    assert backward.registers <= 128


def test_variants_are_named_by_what_they_do(monkeypatch):
    monkeypatch.setattr(bench, "compile_gradient", lambda _, features, **facts: ([facts], []))
    variants = dict(bench.variants(90))
    assert len(variants) == 8
    assert variants["F4096"] == [{"normalizes_keys": False, "has_segments": False}]
    assert variants["F2816 unit keys documents"] == [
        {"normalizes_keys": True, "has_segments": True}
    ]


def test_the_table_knows_older_and_newer_gpus():
    assert tuning_for(86) == TABLE[80]
    assert tuning_for(100) == TABLE[90]


def test_all_that_is_measured_agrees_with_the_definition():
    for case in bench.SHAPES["tiny"]:
        rows = parity.compare(bench, case)
        assert {row.implementation for row in rows} >= {"xla"}
        assert all(row.max_relative_error < 1e-5 for row in rows)


def test_the_least_work_counts_every_array_once():
    case = bench.SHAPES["tiny"][0]
    z, taps = 4 * 2 * 2 * 16 * 32, 4 * 5 * 32
    assert bench.work(case, "forward").bytes == 5 * z + 2 * taps
    assert bench.work(case, "fwd + bwd").bytes == 12 * z + 6 * taps
    forward, both = (bench.work(case, name).flops for name in ("forward", "fwd + bwd"))
    assert forward == 2 * 2 * 5 * 2 * 2 * 16 * 32
    assert both == 3 * forward


SHAPE = (1, 2, 8, 4)


def _call(z=SHAPE, z_student=SHAPE, taps=(5, 4), student_taps=(5, 4), ids=None, **facts):
    dtypes = facts.pop("dtypes", ("bfloat16",) * 2)
    shapes = z, z_student, taps, student_taps
    kinds = *dtypes, facts.pop("taps_dtype", "float32"), "float32"
    arrays = [jnp.zeros(*facts) for facts in zip(shapes, kinds, strict=True)]
    segments = None if ids is None else jnp.zeros(ids, int)
    facts = {"is_causal": True, "normalizes_keys": True, "segment_ids": segments} | facts
    # Without the instrumented shapes of the tests, as a user calls it.
    return inspect.unwrap(short_conv_residual)(*arrays, **facts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"z_student": (1, 2, 9, 4)}, r"\(1, 2, 8, 4\) and z_student \(1, 2, 9, 4\)"),
        ({"student_taps": (4, 4)}, r"\(5, 4\) and student_taps \(4, 4\).*pad the shorter"),
        ({"taps": (5, 3), "student_taps": (5, 3)}, r"\(5, 3\) and z \(1, 2, 8, 4\) differ"),
        ({"ids": (1, 2, 9)}, r"\(1, 2, 9\) must match the tokens, \(1, 2, 8\)"),
        ({"implementation": "cuda"}, "'cuda' is not one of auto, triton, xla, reference"),
    ],
)
def test_operands_that_do_not_fit_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        _call(**facts)


def test_what_the_kernels_cannot_take_is_refused_before_launch():
    triton = functools.partial(_call, implementation="triton")
    with launch.compiling_for(90):
        with pytest.raises(ValueError, match="bfloat16, float16: they must be of one dtype"):
            triton(dtypes=("bfloat16", "float16"))
        with pytest.raises(ValueError, match="taps are float8_e4m3fn and float32"):
            triton(taps_dtype="float8_e4m3fn")
        with pytest.raises(ValueError, match="9 taps are more than 8"):
            triton(taps=(9, 4), student_taps=(9, 4))
    with launch.compiling_for(75), pytest.raises(ValueError, match="75, less than 80"):
        triton()
    if jax.default_backend() != "gpu":
        with pytest.raises(ValueError, match=r"no GPU: the backend is cpu; use 'auto' or 'xla'"):
            triton()


# Meshes, with the definition in place of the launches: JAX cannot run the interpreter's callback
# inside a partitioned call.

# Axis of the mesh (data 2, tensor 2) that splits b, c and f; are keys normalised.
LAYOUTS = {
    "batch and chunks": (("data", "tensor", None), True),
    "batch and features, plain keys": (("data", None, "tensor"), False),
    "batch and features, unit keys": (("data", None, "tensor"), True),
}


def _forward_stand_in(shape, z_teacher, z_student, teacher_taps, student_taps, ids):
    def one_row(z_teacher, z_student, teacher_taps, student_taps, ids):
        x = Operands(z_teacher[None], z_student[None], teacher_taps, student_taps, ids[None])
        found = reference.short_conv_residual(x, shape.facts)
        norm = jnp.linalg.norm(found[1] - found[0], axis=-1)
        return tuple(x[0] for x in (*found, *([norm] if shape.facts.normalizes_keys else [])))

    return jax.vmap(one_row)(z_teacher, z_student, teacher_taps, student_taps, ids)


def _backward_stand_in(shape, z_teacher, z_student, taps, _, ids, key, slope, along, *cotangents):
    """Any function of arrays of every kind."""
    d_difference, d_target, d_key = cotangents
    if key is not None:
        d_key = slope[..., None] * (d_key - along[..., None] * key)

    def sums(z, d):
        return taps[:, None] * jnp.sum(z * d, 2)[:, :, None]

    dz = z_teacher + d_difference, z_student + d_key
    return *dz, sums(z_teacher, d_target), sums(z_student, d_key)


def _gradient(normalizes_keys, *operands):
    *arrays, ids = operands

    def call(*arrays):
        return triton_call.short_conv_residual(Operands(*arrays, ids), Facts(True, normalizes_keys))

    (difference, target, key), pull = jax.vjp(call, *arrays)
    return (difference, target, key), pull((target, key, difference))


def _measure_mesh() -> dict[str, object]:
    triton_call._launch_forward = _forward_stand_in
    triton_call._launch_backward = _backward_stand_in
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)
    arrays = draw(0, *[(2, 4, 8, 16)] * 2, *[(3, 16)] * 2)
    operands = *arrays, jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 4, 8)))
    found = {}
    for layout, ((b, c, f), normalizes_keys) in LAYOUTS.items():
        specs = [(b, c, None, f)] * 2 + [(None, f)] * 2 + [(b, c, None)]
        shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
        function = functools.partial(_gradient, normalizes_keys)
        functions = {"forward": lambda *xs, f=function: f(*xs)[0], "gradient": function}
        with launch.compiling_for(90):
            programs = {
                name: jax.jit(run, in_shardings=shardings).lower(*operands).compile()
                for name, run in functions.items()
            }
            expected = jax.tree.leaves(jax.jit(function)(*operands))
        ours = jax.tree.leaves(programs["gradient"](*jax.device_put(operands, shardings)))
        found[layout] = {
            name: [kind for kind in COLLECTIVES if kind in (program.as_text() or "")]
            for name, program in programs.items()
        }
        found[layout]["distance"] = max(map(distance, ours, expected))
        found[layout]["shard"] = ours[0].addressable_shards[0].data.shape
    return found


def test_a_mesh_splits_batch_chunks_and_the_features_of_plain_keys():
    found = json.loads(printed(__file__))
    assert found.keys() == LAYOUTS.keys()
    chunks, plain, unit = found.values()
    for layout in (chunks, plain):
        assert layout["forward"] == []
        assert layout["gradient"] == ["all-reduce"]  # the taps' gradients, over batch and chunks
    assert "all-gather" in unit["forward"]  # a norm needs all features
    assert max(layout["distance"] for layout in found.values()) <= 1e-5
    assert chunks["shard"] == [1, 2, 8, 16]
    assert plain["shard"] == [1, 4, 8, 8]


if __name__ == "__main__":
    print(json.dumps(_measure_mesh()))
