"""Runs cases of the convolved residual through Triton's interpreter, which needs a process of its
own: `python interpreted_short_conv.py '[{"L": 20, ...}, ...]'` prints a JSON line of relative
errors each.

Every case is compared in float64 on the same (rounded) operands: with `reference`, or, where a
student vector is zero, with `xla`, whose gradient knows `zero_slope`.
"""

import functools
import os

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from interpreting import gradient, print_errors, relative_errors
from ttcd_kernels.short_conv import reference, triton_call, xla
from ttcd_kernels.short_conv.api import short_conv_residual
from ttcd_kernels.short_conv.reference import Facts, Operands
from ttcd_kernels.short_conv.tuning import Tile, Tuning

NAMES = (
    *("difference", "target", "key"),
    *("dz_teacher", "dz_student", "d_teacher_taps", "d_student_taps"),
)


def operands(case):
    """Both z and both taps, ids and the cotangents of the three results, float64."""
    rng = np.random.default_rng(0)
    B, C, L, F, R = (case[name] for name in "BCLFR")
    models = (2,) if case.get("transform") == "vmap" else ()
    shapes = [(*models, B, C, L, F)] * 2 + [(*models, R, F)] * 2 + [(*models, B, C, L, F)] * 3
    *inputs, d_difference, d_target, d_key = (rng.standard_normal(shape) for shape in shapes)
    if case.get("has_zero_row"):
        inputs[1][0, 0, : R + 1] = 0  # the student's vector is zero where all taps read zeros
    ids = None
    if case.get("segments"):  # segments may come back: only taps in between read zero
        ids = jnp.asarray(rng.integers(0, case["segments"], (B, C, L)), jnp.int32)
    return inputs, ids, (d_difference, d_target, d_key)


def facts(case):
    return Facts(case["is_causal"], case["normalizes_keys"], case.get("zero_slope", 1.0))


def convolve(case, ids):
    """The kernels' call, transformed as the case asks."""
    if case.get("is_public"):
        options = facts(case)._asdict() | {"segment_ids": ids, "implementation": "triton"}
        call = functools.partial(short_conv_residual, **options)
    else:
        tiles = {name: Tile(*case[name], num_warps=4) for name in ("forward", "backward")}

        def call(*arrays):
            x = Operands(*arrays, ids)
            return triton_call.short_conv_residual(x, facts(case), Tuning(**tiles))

    transforms = {None: lambda f: f, "jit": jax.jit, "remat": jax.checkpoint, "vmap": jax.vmap}
    return transforms[case.get("transform")](call)


def errors(case):
    inputs, ids, cotangents = operands(case)
    dtype = jnp.dtype(case.get("dtype", "float32"))
    dtypes = dtype, dtype, *[jnp.dtype(case.get("taps_dtype", "float32"))] * 2
    narrow = [jnp.asarray(x, kind) for x, kind in zip(inputs, dtypes, strict=True)]
    cotangents = tuple(jnp.asarray(x, dtype) for x in cotangents)
    found = gradient(convolve(case, ids), narrow, cotangents)
    assert [x.dtype for x in found] == [dtype] * 3 + list(dtypes)

    oracle = xla if case.get("has_zero_row") else reference

    def definition(*arrays):
        return oracle.short_conv_residual(Operands(*arrays, ids), facts(case))

    if case.get("transform") == "vmap":
        definition = jax.vmap(definition)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (narrow, cotangents))
    expected = jax.jit(functools.partial(gradient, definition))(*wide)
    assert all(np.isfinite(x).all() for x in expected)
    return relative_errors(NAMES, found, expected)


if __name__ == "__main__":
    print_errors(errors)
