"""The convolved residual and what it is measured against: its composition in XLA and, on a GPU, two
stock convolutions and a subtraction."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttcd_kernels import launch, measure
from ttcd_kernels.measure import Work
from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv import triton_call
from ttcd_kernels.short_conv.api import Implementation, short_conv_residual
from ttcd_kernels.short_conv.shapes import SHAPES as SHAPES
from ttcd_kernels.short_conv.shapes import Case
from ttcd_kernels.short_conv.tuning import CANDIDATES, Tuning, tuning_for

BASELINE = "xla"  # ratios are times over this one's
PEERS = ("lax.conv",)  # names of what is not ours begin so: they may refuse a shape


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Both z, both taps and the cotangents of difference, target and key."""
    shape = case.batch, case.chunks, case.length, case.num_features
    z = jax.ShapeDtypeStruct(shape, case.dtype)
    taps = jax.ShapeDtypeStruct((case.num_taps, case.num_features), jnp.float32)
    return [z, z, taps, taps, z, z, z]


def programs(case: Case) -> dict[tuple[str, str], Callable[..., Any]]:
    """(direction, implementation) -> function of the operands."""
    return measure.both_directions(_implementations(case), 4)


def work(case: Case, direction: str) -> Work:
    """A multiplication and an addition per tap and branch, three times with the gradients; every
    input read once and every result written once, in each direction."""
    z, _, taps = operand_shapes(case)[:3]
    products = {"forward": 1, "fwd + bwd": 3}[direction]
    # Forward: two z, three results. Backward: two z, three cotangents, two gradients.
    features = {"forward": 5, "fwd + bwd": 5 + 7}[direction]
    rows = {"forward": 2, "fwd + bwd": 2 + 4}[direction]
    moved = features * z.size * z.dtype.itemsize + rows * taps.size * taps.dtype.itemsize
    return Work(products * 2 * 2 * case.num_taps * z.size, moved)


def reference_bytes(case: Case) -> int:
    """Both sums in float32, with one tap's moved rows each."""
    return 4 * 4 * operand_shapes(case)[0].size


def searches(case: Case) -> dict[str, measure.Search]:
    """Per kernel: the tiles to try, and a program with each."""
    capability = launch.capability()
    assert capability is not None

    def convolve(tuning: Tuning) -> Callable[..., Any]:
        return functools.partial(
            triton_call.short_conv_residual,
            segment_ids=None,
            is_causal=case.is_causal,
            normalizes_keys=case.normalizes_keys,
            zero_slope=1.0,
            tuning=tuning,
        )

    return measure.searches(tuning_for(capability), CANDIDATES, convolve, 4)


def _implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(z_teacher, z_student, teacher_taps, student_taps) -> (difference, target, key)."""
    ids = None
    if case.has_documents:
        ids = jnp.arange(case.length) * 3 // case.length
        ids = jnp.broadcast_to(ids, (case.batch, case.chunks, case.length))

    def call(implementation: Implementation) -> Callable[..., Any]:
        return functools.partial(
            short_conv_residual,
            is_causal=case.is_causal,
            normalizes_keys=case.normalizes_keys,
            segment_ids=ids,
            implementation=implementation,
        )

    found = {"xla": call("xla"), "reference": call("reference")}
    if jax.default_backend() != "gpu":
        return found
    z, _, taps = operand_shapes(case)[:3]
    if triton_call.unsupported(z, z, taps, taps) is None:
        found["triton"] = call("triton")
    if not case.has_documents:  # which a stock convolution cannot keep apart
        found["lax.conv"] = _stock(case)
    return found


def _stock(case: Case) -> Callable[..., Any]:
    before = case.num_taps - 1 if case.is_causal else case.num_taps // 2

    def depthwise(z: jax.Array, taps: jax.Array) -> jax.Array:
        moved = jax.lax.conv_general_dilated(
            z.reshape(-1, *z.shape[2:]),
            taps[:, None].astype(z.dtype),
            window_strides=(1,),
            padding=[(before, case.num_taps - 1 - before)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=case.num_features,
        )
        return moved.reshape(z.shape)

    def convolve(
        z_teacher: jax.Array, z_student: jax.Array, teacher_taps: jax.Array, student_taps: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        target = depthwise(z_teacher, teacher_taps)
        student = depthwise(z_student, student_taps)
        key = l2_normalize(student) if case.normalizes_keys else student
        return target - student, target, key

    return convolve
