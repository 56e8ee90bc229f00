"""Runs cases of dual-window attention through Triton's interpreter, which needs a process of its
own: `python interpreted_dual_window.py '[{"T": 40, ...}, ...]'` prints a JSON line of relative
errors each.

Every case is compared with `reference` in float64 on the same (rounded) operands.
"""

import os
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from interpreting import gradient, print_errors, relative_errors
from ttcd_kernels.dual_window import reference, triton_call
from ttcd_kernels.dual_window.api import dual_window_attention_with_lse
from ttcd_kernels.dual_window.tuning import Tile, Tuning
from ttcd_kernels.windows import Windows

NAMES = ("teacher", "student", "teacher_lse", "student_lse", "dq", "dk", "dv")


def operands(case):
    """q, k, v, ids and the cotangents of the four results, float64."""
    rng = np.random.default_rng(case.get("seed", 0))
    T, S, N, K, H = (case[name] for name in "TSNKH")
    B = case.get("B", 1)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), (B, T, N, H)]
    shapes += [(B, T, N), (B, T, N)]
    q, k, v, *cotangents = (rng.standard_normal(shape) for shape in shapes)
    ids = None
    if case.get("documents"):
        ids = jnp.asarray(np.sort(rng.integers(0, case["documents"], (B, S)), 1), jnp.int32)
    return (q, k, v), ids, cotangents


def attend(case, ids):
    if case.get("is_public"):
        windows = {"teacher_window": case["teacher"], "student_window": case["student"]}
        call = partial(
            dual_window_attention_with_lse, **windows, segment_ids=ids, implementation="triton"
        )
    else:
        tile = Tile(case.get("block_m", 16), case.get("block_n", 16), 4, 2)
        tuning = Tuning(forward=tile, backward_q=tile, backward_kv=tile)
        call = partial(
            triton_call.dual_window, segment_ids=ids, windows=_windows(case), tuning=tuning
        )
    return {
        None: call,
        "jit": jax.jit(call),
        "remat": jax.checkpoint(call),
        "vmap": lambda *xs: jax.tree.map(
            lambda x: x[0], jax.vmap(call)(*(jnp.stack([x, 2 * x]) for x in xs))
        ),
    }[case.get("transform")]


def _windows(case):
    return Windows(case["teacher"] or case["S"], case["student"], case["H"] ** -0.5)


def errors(case):
    qkv, ids, cotangents = operands(case)
    dtype = jnp.dtype(case.get("dtype", "float32"))
    narrow = [jnp.asarray(x, dtype) for x in (*qkv, *cotangents[:2])]
    narrow += [jnp.asarray(x, jnp.float32) for x in cotangents[2:]]
    found = gradient(attend(case, ids), narrow[:3], narrow[3:])
    wide = [x.astype(jnp.float64) for x in narrow]
    definition = partial(reference.dual_window, segment_ids=ids, windows=_windows(case))
    expected = jax.jit(partial(gradient, definition))(wide[:3], wide[3:])
    return relative_errors(NAMES, found, expected)


if __name__ == "__main__":
    print_errors(errors)
