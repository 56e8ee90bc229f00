"""Runs cases of an op through Triton's interpreter, which needs a process of its own:
`python interpreted.py decode '[{"positions": [3], ...}, ...]'` prints a JSON line of relative
errors each, by result.

Every case is compared with the definition in float64 on the same (rounded) operands, under vmap
with the definition under vmap.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import triton_interpreter
from ttcd_kernels import decode_attention_with_lse, dual_window_attention_with_lse, launch
from ttcd_kernels.decode import triton_call as decode_call
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import triton_call as dual_window_call
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.windows import Windows

ATTENTION = ("teacher", "student", "teacher_lse", "student_lse")


class Problem(NamedTuple):
    """One case of an op."""

    call: Callable  # the kernels
    definition: Callable
    inputs: list[np.ndarray]
    cotangents: list[np.ndarray]  # none: not differentiable
    dtypes: list[str]  # of inputs and cotangents
    names: tuple[str, ...]  # of results and gradients


def _normal(rng, *shapes):
    return [rng.standard_normal(shape) for shape in shapes]


def _windows(case, length):
    scale = case.get("scale", case["H"] ** -0.5)
    return Windows(case["teacher"] or length, case["student"], scale)


def _public_windows(case):
    return {"teacher_window": case["teacher"], "student_window": case["student"]}


def dual_window(case):
    rng = np.random.default_rng(0)
    B, (T, S, N, K, H) = case.get("B", 1), (case[name] for name in "TSNKH")
    q, k, lse = (B, T, N, H), (B, S, K, H), (B, T, N)
    inputs, cotangents = _normal(rng, q, k, k), _normal(rng, q, q, lse, lse)
    ids = None
    if case.get("documents"):
        ids = rng.integers(0, case["documents"], (B, S))
        ids = jnp.asarray(ids if case.get("is_mixed") else np.sort(ids, 1), jnp.int32)
    windows = _windows(case, S)
    tile = dual_window_tuning.Tile(case.get("block_m", 16), case.get("block_n", 16), 4, 2)
    tuning = dual_window_tuning.Tuning(tile, tile, tile)
    call = partial(dual_window_call.dual_window, segment_ids=ids, windows=windows, tuning=tuning)
    if case.get("is_public"):
        options = _public_windows(case) | {"segment_ids": ids, "implementation": "triton"}
        call = partial(dual_window_attention_with_lse, **options)
    definition = partial(definitions.dual_window, segment_ids=ids, windows=windows)
    dtypes = [case.get("dtype", "float32")] * 5 + ["float32"] * 2
    names = *ATTENTION, "dq", "dk", "dv"
    return Problem(call, definition, inputs, cotangents, dtypes, names)


def decode(case):
    """Slots out of sight hold numbers as large as the others, so that seeing one shows."""
    B, (N, K, H, W) = len(case["positions"]), (case[name] for name in "NKHW")
    inputs = _normal(np.random.default_rng(0), (B, N, H), (B, W, K, H), (B, W, K, H))
    inputs.append(np.asarray(case["positions"], np.int32))
    windows = _windows(case, None)
    tile = decode_tuning.Tile(case["block_n"], 4, 2, B * K * case["slices"])
    call = partial(decode_call.decode, windows=windows, tuning=decode_tuning.Tuning(tile))
    if case.get("is_public"):
        options = _public_windows(case) | {"implementation": "triton"}
        call = partial(decode_attention_with_lse, **options)
    definition = partial(definitions.decode, windows=windows)
    dtypes = [case.get("dtype", "float32")] * 3 + ["int32"]
    return Problem(call, definition, inputs, [], dtypes, ATTENTION)


def _run(function, inputs, cotangents):
    """(*results, *gradients of the inputs) with these cotangents, of which decode has none."""
    if not cotangents:
        return function(*inputs)
    results, pull = jax.vjp(function, *inputs)
    return *results, *pull(tuple(cotangents))


def _two_calls(arrays, shared):
    """Arrays of two calls for vmap, but for those at the places `shared`."""
    return [x if i in shared else jnp.stack([jnp.roll(x, 1, 0), x]) for i, x in enumerate(arrays)]


def errors(op, case):
    call, definition, inputs, cotangents, dtypes, names = OPS[op](case)
    num_inputs, transform = len(inputs), case.get("transform")
    arrays = list(map(jnp.asarray, (*inputs, *cotangents), dtypes))
    if transform in ("vmap", "vmap, shared caches"):
        shared = () if transform == "vmap" else (1, 2)
        arrays = _two_calls(arrays, shared)
        axes = tuple(None if i in shared else 0 for i in range(num_inputs))
        call, definition = jax.vmap(call, axes), jax.vmap(definition, axes)
    else:
        call = {None: call, "jit": jax.jit(call), "remat": jax.checkpoint(call)}[transform]
    found = _run(call, arrays[:num_inputs], arrays[num_inputs:])
    wide = [x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays]
    expected = jax.jit(partial(_run, definition))(wide[:num_inputs], wide[num_inputs:])
    if cotangents:
        assert [x.dtype for x in found] == dtypes[num_inputs:] + dtypes[:num_inputs]
        assert all(np.isfinite(x).all() for x in expected)
    return {name: _error(x, y) for name, x, y in zip(names, found, expected, strict=True)}


def _error(found, expected) -> float:
    """max |a - b| / max |b| of two arrays; infinities, the log-sum-exps of rows that see nothing,
    must be at the same places. In NumPy: XLA's maximum on a CPU may pass over a NaN in bfloat16."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    both = np.isneginf(found) & np.isneginf(expected)
    found, expected = np.where(both, 0, found), np.where(both, 0, expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


OPS = {"dual_window": dual_window, "decode": decode}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    triton_interpreter.install()
    with launch.compiling_for(90):
        for case in json.loads(sys.argv[2]):
            print(json.dumps(errors(sys.argv[1], case)), flush=True)
