"""The convolved residual: its composition in XLA against definitions, the Triton kernels by the
interpreter and as machine code."""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw
from interpreting import check_errors
from ttcd_kernels.aot import compile_kernels
from ttcd_kernels.normalize import PUBLISHED_ZERO_SLOPE, l2_normalize
from ttcd_kernels.short_conv import bench, xla
from ttcd_kernels.short_conv.api import short_conv_residual
from ttcd_kernels.short_conv.operands import Facts, Operands

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
    check_errors("short_conv", CASES, BOUND, "d_teacher_taps")


def _operands(num_taps, has_documents, dtype=None):
    """Both z, both taps, ids and cotangents."""
    z_shape, taps_shape = (B, C, L, F), (num_taps, F)
    shapes = *[z_shape] * 2, *[taps_shape] * 2, *[z_shape] * 3
    *arrays, d_difference, d_target, d_key = draw(num_taps, *shapes, dtype=dtype)
    ids = None
    if has_documents:  # not sorted: a segment may come back
        ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, C, L)))
    return arrays, ids, (d_difference, d_target, d_key)


def _definition(*arrays, segment_ids, **facts):
    return definitions.short_conv_residual(Operands(*arrays, segment_ids), Facts(**facts))


FORMS = {
    "definition": _definition,
    "xla": functools.partial(short_conv_residual, implementation="xla"),
}


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
@pytest.mark.parametrize("num_taps", [1, 3, 4, 9])  # 9 reach past both ends of a chunk
@pytest.mark.parametrize("form", FORMS)
def test_definition_and_composition_follow_the_formula(
    form, num_taps, has_documents, is_causal, float64
):
    arrays, ids, _ = _operands(num_taps, has_documents)
    target, student = (
        _by_hand(x, taps, ids, is_causal) for x, taps in zip(arrays[:2], arrays[2:], strict=True)
    )
    unit = student / np.linalg.norm(student, axis=-1, keepdims=True)
    for normalizes_keys, key in ((True, unit), (False, student)):
        facts = {"is_causal": is_causal, "normalizes_keys": normalizes_keys}
        found = FORMS[form](*arrays, segment_ids=ids, **facts)
        assert_close(found, tuple(map(jnp.asarray, (target - student, target, key))))


@CAUSAL
@DOCUMENTS
@pytest.mark.parametrize("normalizes_keys", [True, False], ids=["unit keys", "plain keys"])
def test_gradients_of_the_composition_are_those_of_the_definition(
    normalizes_keys, has_documents, is_causal, float64
):
    arrays, ids, cotangents = _operands(5 if normalizes_keys else 9, has_documents)
    facts = {"is_causal": is_causal, "normalizes_keys": normalizes_keys, "segment_ids": ids}

    @jax.jit
    def gradients():
        calls = (functools.partial(form, **facts) for form in FORMS.values())
        return [jax.vjp(call, *arrays)[1](cotangents) for call in calls]

    assert_close(*gradients())


def test_one_document_needs_no_segments(float64):
    x, taps = draw(0, (1, 2, 7, F), (5, F))
    conv = functools.partial(xla.short_conv, is_causal=True)
    assert_same(conv(x, taps, segment_ids=jnp.ones((1, 2, 7), int)), conv(x, taps))


def test_identity_taps_pass_everything_through():
    (x,) = draw(0, (1, 2, 7, F))
    last, middle = jnp.zeros((2, 5, F)).at[0, 4].set(1).at[1, 2].set(1)
    assert_same(xla.short_conv(x, last, is_causal=True), x)
    assert_same(xla.short_conv(x, middle, is_causal=False), x)


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
    for name, form in FORMS.items():
        found = form(z_teacher, z_student, *taps, **facts)
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
@pytest.mark.parametrize(
    "case",
    [case for case in bench.SHAPES["aot"] if case.normalizes_keys or not case.has_documents],
    ids=lambda case: case.name,
)
def test_machine_code_is_one_launch_each_way_and_spills_nothing(case, capability):
    kernels, launched = compile_kernels(bench, case, capability)
    assert launched == ["short_conv_residual_forward", "short_conv_residual_backward"]
    assert [kernel.name for kernel in kernels] == launched
    forward, backward = kernels
    assert forward.spill_bytes == 0
    assert backward.spill_bytes == 0
    # 16 warps per multiprocessor and more hide the latency of memory.
    assert backward.registers <= 128


def test_the_least_work_counts_every_array_once():
    case = bench.SHAPES["tiny"][0]
    z, taps = 4 * 2 * 2 * 16 * 32, 4 * 5 * 32
    assert bench.work(case, "forward").bytes == 5 * z + 2 * taps
    assert bench.work(case, "fwd + bwd").bytes == 12 * z + 6 * taps
    forward, both = (bench.work(case, name).flops for name in ("forward", "fwd + bwd"))
    assert forward == 2 * 2 * 5 * 2 * 2 * 16 * 32
    assert both == 3 * forward
