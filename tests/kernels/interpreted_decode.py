"""Runs cases of decode attention through Triton's interpreter, which needs its own process:
`python interpreted_decode.py '[{"positions": [3], ...}, ...]'` prints a JSON line of
relative errors each.

Every case is compared with `reference` in float64 on the same (rounded) operands. Slots out of
sight hold numbers as large as the others, so that seeing one shows.
"""

import os
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from interpreting import print_errors, relative_errors
from ttcd_kernels.decode import reference, triton_call
from ttcd_kernels.decode.api import decode_attention_with_lse
from ttcd_kernels.decode.tuning import Tuning
from ttcd_kernels.windows import Windows

NAMES = ("teacher", "student", "teacher_lse", "student_lse")


def operands(case):
    """q, k_cache, v_cache in the case's dtype, positions."""
    rng = np.random.default_rng(0)
    B, (N, K, H, W) = len(case["positions"]), (case[name] for name in "NKHW")
    position = jnp.asarray(case["positions"], jnp.int32)
    shapes = (B, N, H), (B, W, K, H), (B, W, K, H)
    dtype = case.get("dtype", "float32")
    arrays = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return *arrays, position


def decode(case):
    """(q, k_cache, v_cache, position) -> results."""
    if case.get("is_public"):
        windows = {"teacher_window": case["teacher"], "student_window": case["student"]}
        return partial(decode_attention_with_lse, **windows, implementation="triton")
    programs = len(case["positions"]) * case["K"] * case["slices"]
    tuning = Tuning(case["block_n"], 4, 2, programs)
    return partial(triton_call.decode, windows=_windows(case), tuning=tuning)


def _windows(case):
    return Windows(case["teacher"], case["student"], case["H"] ** -0.5)


def mapped(call, operands, shares_caches):
    """The second half of `vmap` over two calls, of which the second has these operands."""
    q, k, v, position = operands

    def pair(x):
        return jnp.stack([jnp.roll(x, 1, axis=0), x])

    caches, axis = ((k, v), None) if shares_caches else ((pair(k), pair(v)), 0)
    run = jax.vmap(call, (0, axis, axis, 0))
    return jax.tree.map(lambda x: x[1], run(pair(q), *caches, pair(position)))


def errors(case):
    arrays, call = operands(case), decode(case)
    transform = case.get("transform")
    if transform in ("vmap", "vmap, shared caches"):
        found = mapped(call, arrays, transform != "vmap")
    else:
        found = {None: call, "jit": jax.jit(call)}[transform](*arrays)
    wide = (x.astype(jnp.float64) for x in arrays[:3])
    expected = jax.jit(partial(reference.decode, windows=_windows(case)))(*wide, arrays[3])
    return relative_errors(NAMES, found, expected)


if __name__ == "__main__":
    print_errors(errors)
