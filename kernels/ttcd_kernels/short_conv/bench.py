"""The convolved residual and what it is measured against: its composition in XLA and, on a GPU, two
stock convolutions and a subtraction."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.measure import Search, Work
from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv import triton_call
from ttcd_kernels.short_conv.api import Implementation, short_conv_residual
from ttcd_kernels.short_conv.shapes import SHAPES, Case
from ttcd_kernels.short_conv.tuning import CANDIDATES, Tile, tuning_for

__all__ = [
    "BASELINE",
    "PEERS",
    "SHAPES",
    "operand_shapes",
    "programs",
    "reference_bytes",
    "searches",
    "work",
]

BASELINE = "xla"  # ratios are times over this one's
PEERS = ("lax.conv",)  # names of what is not ours begin so: they may refuse a shape


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Both z, both taps and the cotangents of difference, target and key."""
    shape = case.batch, case.chunks, case.length, case.num_features
    z = jax.ShapeDtypeStruct(shape, case.dtype)
    taps = jax.ShapeDtypeStruct((case.num_taps, case.num_features), jnp.float32)
    return [z, z, taps, taps, z, z, z]


def programs(case: Case) -> dict[tuple[str, str], Callable[..., Any]]:
    """By (direction, implementation): the forward, and the forward with the gradients of both z and
    both taps."""
    found = {}
    for name, convolve in _implementations(case).items():
        found["forward", name] = _forward(convolve)
        found["fwd + bwd", name] = _gradient(convolve)
    return found


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


def searches(case: Case) -> dict[str, Search]:
    """Per kernel: the tiles to try, and a program with each."""
    capability = launch.capability()
    assert capability is not None
    table = tuning_for(capability)

    def program(kernel: str, tile: Tile) -> Callable[..., Any]:
        tuning = dataclasses.replace(table, **{kernel: tile})

        def convolve(z_teacher, z_student, teacher_taps, student_taps):
            operands = z_teacher, z_student, teacher_taps, student_taps, None
            facts = case.is_causal, case.normalizes_keys, 1.0
            return triton_call.short_conv_residual(*operands, *facts, tuning)

        return _forward(convolve) if kernel == "forward" else _gradient(convolve)

    found = {}
    for kernel, candidates in CANDIDATES.items():
        tiles = dict.fromkeys((getattr(table, kernel), *candidates))
        programs = {tile: program(kernel, tile) for tile in tiles}
        found[kernel] = Search(programs, getattr(table, kernel))
    return found


def _implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(z_teacher, z_student, teacher_taps, student_taps) -> (difference, target, key)."""
    ids = None
    if case.has_documents:
        ids = jnp.arange(case.length) * 3 // case.length
        ids = jnp.broadcast_to(ids, (case.batch, case.chunks, case.length))

    def call(implementation: Implementation) -> Callable[..., Any]:
        def convolve(*operands):
            return short_conv_residual(
                *operands,
                is_causal=case.is_causal,
                normalizes_keys=case.normalizes_keys,
                segment_ids=ids,
                implementation=implementation,
            )

        return convolve

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

    def depthwise(z, taps):
        moved = jax.lax.conv_general_dilated(
            z.reshape(-1, *z.shape[2:]),
            taps[:, None].astype(z.dtype),
            window_strides=(1,),
            padding=[(before, case.num_taps - 1 - before)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=case.num_features,
        )
        return moved.reshape(z.shape)

    def convolve(z_teacher, z_student, teacher_taps, student_taps):
        target = depthwise(z_teacher, teacher_taps)
        student = depthwise(z_student, student_taps)
        key = l2_normalize(student) if case.normalizes_keys else student
        return target - student, target, key

    return convolve


def _forward(convolve: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: convolve(*operands[:4])


def _gradient(convolve: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(*operands):
        results, pull = jax.vjp(convolve, *operands[:4])
        return results, pull(operands[4:])

    return gradient
