"""Cases of the convolved residual of a chunk: shapes, definition, implementations."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import launch, short_conv_call, short_conv_residual

from experiments.studies.kernels import definition
from experiments.studies.kernels.programs import Work

INPUTS = 4  # z of teacher and student, taps of both
NAMES = (
    *("difference", "target", "key", "dz_teacher", "dz_student"),
    *("d_teacher_taps", "d_student_taps"),
)


class Case(NamedTuple):
    """One call."""

    name: str
    batch: int
    num_chunks: int
    chunk_size: int
    num_features: int
    num_taps: int = 5
    is_causal: bool = False
    normalizes_keys: bool = True
    has_documents: bool = False  # in every chunk others, of which one comes again
    dtype: str = "bfloat16"
    rounds: int = 5
    num_compared: None = None  # all
    size: float = 1.0  # that z and taps are multiplied by
    zero_slope: float = 1.0

    @property
    def ids(self) -> np.ndarray | None:
        chunk = np.arange(self.batch * self.num_chunks).reshape(self.batch, -1, 1)
        ids = (np.arange(self.chunk_size, dtype=np.int32) + 5 * chunk) * 3 // self.chunk_size % 2
        return ids if self.has_documents else None


# Odd lengths and widths, chunks longer than a program's span, keys as they are. Once: norms on both
# sides of the smallest.
_CHECK = (
    Case("2 x 3 x 67 F40, 5 taps", 2, 3, 67, 40),
    Case("1 x 2 x 301 F257, 3 causal taps", 1, 2, 301, 257, 3, is_causal=True),
    Case("1 x 2 x 130 F1536, 8 taps, keys as they are", 1, 2, 130, 1536, 8, normalizes_keys=False),
)
_SMALL = _CHECK[0]._replace(name="2 x 3 x 67 F40, norms of 1e-6", size=2.6e-4, zero_slope=1e6)
SHAPES: dict[str, tuple[Case, ...]] = {
    "tiny": (Case("2 x 3 x 16 F8, 3 taps", 2, 3, 16, 8, 3, dtype="float32", rounds=3),),
    "cpu": (Case("4 x 256 F1408, 5 taps", 1, 4, 256, 1408, dtype="float32", rounds=3),),
    "paper": (Case("760M: 32 x 1024 F4096, 5 taps", 1, 32, 1024, 4096),),
    "more": (),
    "check": (
        *(
            case._replace(name=case.name + " documents" * ids, dtype=dtype, has_documents=ids)
            for case, dtype, ids in itertools.product(_CHECK, launch.DTYPES, (False, True))
        ),
        _SMALL._replace(dtype="float32", has_documents=True),
    ),
}


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """z and taps of both branches, and the cotangents of difference, target and key."""
    shape = case.batch, case.num_chunks, case.chunk_size, case.num_features
    z, taps = (
        jax.ShapeDtypeStruct(x, case.dtype) for x in (shape, (case.num_taps, case.num_features))
    )
    return [z, z, taps, taps, z, z, z]


def expected(case: Case, operands: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """All results and gradients by name."""
    arrays = [np.asarray(x).astype(np.float64) for x in operands]
    inputs = (case.size * x for x in arrays[:INPUTS])
    before = case.num_taps - 1 if case.is_causal else case.num_taps // 2
    options: Any = {"normalizes": case.normalizes_keys, "zero_slope": case.zero_slope}
    options |= {"ids": case.ids, "before": before}
    results = definition.short_conv_residual(*inputs, *arrays[INPUTS:], **options)
    gradients = (case.size * x for x in results[3:])
    return dict(zip(NAMES, (*results[:3], *gradients), strict=True))


def implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(z_teacher, z_student, teacher_taps, student_taps) -> (difference, target, key)."""
    options: Any = {"is_causal": case.is_causal, "normalizes_keys": case.normalizes_keys}
    options["segment_ids"] = None if case.ids is None else jnp.asarray(case.ids)
    residual = functools.partial(short_conv_residual, **options, zero_slope=case.zero_slope)

    def run(name: Any, *operands: jax.Array) -> Any:
        return residual(*(case.size * x for x in operands), implementation=name)

    has_triton = short_conv_call.unsupported(*operand_shapes(case)[:4], None) is None
    return {x: functools.partial(run, x) for x in ("xla", "triton")[: 1 + has_triton]}


def work(case: Case, direction: str) -> Work:
    """A product and a sum per tap of either branch, thrice with the gradients; every array moved
    once."""
    z = operand_shapes(case)[0]
    flops = 4.0 * case.num_taps * z.size * {"forward": 1, "fwd + bwd": 3}[direction]
    moved = {"forward": 5, "fwd + bwd": 13}[direction]
    return Work(flops, float(moved * z.size * z.dtype.itemsize))
