"""Cases of the convolved residual for `bench`, `tune` and `aot`: shapes, its implementations and,
on a GPU, two stock convolutions and a subtraction."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ttcd_kernels import launch, measure
from ttcd_kernels.measure import SetName, Work
from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv import triton_call
from ttcd_kernels.short_conv.api import Implementation, short_conv_residual
from ttcd_kernels.short_conv.operands import Facts, Operands, Results
from ttcd_kernels.short_conv.tuning import CANDIDATES as CANDIDATES
from ttcd_kernels.short_conv.tuning import Tuning, tuning_for

NUM_INPUTS = 4
PEERS = ("lax.conv",)  # name prefixes of foreign implementations, which may refuse a shape


class Case(NamedTuple):
    """One call on `chunks` chunks of `length` tokens each."""

    name: str
    chunks: int
    length: int
    num_features: int
    num_taps: int = 5
    is_causal: bool = True
    normalizes_keys: bool = True
    has_documents: bool = False  # three in every chunk
    batch: int = 1
    dtype: str = "bfloat16"
    rounds: int = 5

    @property
    def facts(self) -> Facts:
        return Facts(self.is_causal, self.normalizes_keys)


SHAPES: dict[SetName, tuple[Case, ...]] = {
    "tiny": (
        Case("2 x 16 F32", 2, 16, 32, batch=2, dtype="float32", rounds=3),
        Case("2 x 16 F32 symmetric", 2, 16, 32, is_causal=False, dtype="float32", rounds=3),
    ),
    "cpu": (
        Case("4K chunk 1024 F2816", 4, 1024, 2816, dtype="float32", rounds=3),
        Case("4K chunk 1024 F2816 bf16", 4, 1024, 2816, rounds=3),
    ),
    "paper": (
        Case("760M: 32K chunk 1024 F4096", 32, 1024, 4096),
        Case("760M: 32K chunk 1024 F4096, documents", 32, 1024, 4096, has_documents=True),
        Case("760M: 32K chunk 1024 F4096, plain keys", 32, 1024, 4096, normalizes_keys=False),
        Case("760M: 4 x 32K chunk 1024 F4096", 32, 1024, 4096, batch=4),
        Case("340M: 4 x 32K chunk 1024 F2816", 32, 1024, 2816, batch=4),
        Case("64K chunk 4096 F3072", 16, 4096, 3072),
    ),
    "parity": (
        Case("2 x 2 x 300 F200", 2, 300, 200, batch=2, dtype="float32"),
        Case("2 x 2 x 300 F200", 2, 300, 200, batch=2),
        Case("3 x 131 F513 R4 symmetric", 3, 131, 513, 4, is_causal=False, dtype="float16"),
        Case("3 x 131 F264 documents", 3, 131, 264, has_documents=True),
        Case("2 x 7 F1000 R3 plain keys", 2, 7, 1000, 3, normalizes_keys=False),
    ),
    "aot": tuple(
        Case(
            f"F{width}{' unit keys' * unit}{' documents' * ids}",
            *(32, 1024, width),
            normalizes_keys=unit,
            has_documents=ids,
        )
        for width, unit, ids in itertools.product((4096, 2816), (False, True), (False, True))
    ),
}


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Both z, both taps and the cotangents of difference, target and key."""
    shape = case.batch, case.chunks, case.length, case.num_features
    z = jax.ShapeDtypeStruct(shape, case.dtype)
    taps = jax.ShapeDtypeStruct((case.num_taps, case.num_features), jnp.float32)
    return [z, z, taps, taps, z, z, z]


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


def tuning(_: Case) -> Tuning:
    return tuning_for(launch.known_capability())


def with_tuning(case: Case, tuning: Tuning) -> Callable[..., Results]:
    return lambda *arrays: triton_call.short_conv_residual(
        Operands(*arrays), case.facts, tuning=tuning
    )


def implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(z_teacher, z_student, teacher_taps, student_taps) -> (difference, target, key)."""
    tokens = case.batch, case.chunks, case.length
    ids = measure.three_documents(*tokens) if case.has_documents else None

    def call(implementation: Implementation) -> Callable[..., Any]:
        options: Any = case.facts._asdict() | {"implementation": implementation}
        return functools.partial(short_conv_residual, segment_ids=ids, **options)

    functions = {"xla": call("xla")}
    operands: Any = operand_shapes(case)
    if triton_call.unsupported(Operands(*operands[:4])) is None:
        functions["triton"] = call("triton")
    # A stock convolution cannot keep documents apart, and is slow on a CPU.
    if jax.default_backend() == "gpu" and not case.has_documents:
        functions["lax.conv"] = _stock(case)
    return functions


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

    def convolve(*arrays: jax.Array) -> Results:
        x = Operands(*arrays)
        target = depthwise(x.z_teacher, x.teacher_taps)
        student = depthwise(x.z_student, x.student_taps)
        key = l2_normalize(student) if case.normalizes_keys else student
        return target - student, target, key

    return convolve
