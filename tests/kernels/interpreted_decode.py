"""Runs cases of decode attention through Triton's interpreter, which needs a process of its own:
`python interpreted_decode.py '[{"positions": [3], ...}, ...]'` prints a JSON line of
relative errors each.

Every case is compared with `reference` in float64 on the same (rounded) operands. Slots out of
sight hold numbers as large as the others, so that seeing one shows.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from interpreting import print_errors, relative_error
from ttcd_kernels.decode import reference, triton_call
from ttcd_kernels.decode.api import decode_attention_with_lse
from ttcd_kernels.decode.tuning import Tuning

NAMES = ("teacher", "student", "teacher_lse", "student_lse")


def operands(case):
    """q, k_cache, v_cache in the case's dtype, positions, page table."""
    rng = np.random.default_rng(0)
    B, (N, K, H, W) = len(case["positions"]), (case[name] for name in "NKHW")
    position = jnp.asarray(case["positions"], jnp.int32)
    slots, table = (B, W), None
    if "page_size" in case:
        used, unused = B * W // case["page_size"], 3
        slots = used + unused, case["page_size"]
        table = jnp.asarray(rng.permutation(used + unused)[:used].reshape(B, -1), jnp.int32)
        is_reached = jnp.arange(table.shape[1]) * case["page_size"] <= position[:, None]
        table = jnp.where(is_reached, table, -(10**6))
    shapes = (B, N, H), (*slots, K, H), (*slots, K, H)
    dtype = case.get("dtype", "float32")
    arrays = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return *arrays, position, table


def decode(case):
    """(q, k_cache, v_cache, position, page_table) -> results."""
    windows, scale = (case["teacher"], case["student"]), case["H"] ** -0.5
    if case.get("is_public"):

        def call(q, k_cache, v_cache, position, page_table):
            return decode_attention_with_lse(
                q,
                k_cache,
                v_cache,
                position,
                teacher_window=windows[0],
                student_window=windows[1],
                page_table=page_table,
                implementation="triton",
            )

        return call
    programs = len(case["positions"]) * case["K"] * case["slices"]
    tuning = Tuning(case["block_n"], 4, 2, programs)
    return lambda *arrays: triton_call.decode(*arrays, *windows, scale, tuning)


def mapped(call, operands, shares_caches):
    """The second half of `vmap` over two calls, of which the second has these operands."""
    q, k, v, position, table = operands

    def pair(x):
        return None if x is None else jnp.stack([jnp.roll(x, 1, axis=0), x])

    caches, axis = ((k, v), None) if shares_caches else ((pair(k), pair(v)), 0)
    run = jax.vmap(call, (0, axis, axis, 0, 0))
    return jax.tree.map(lambda x: x[1], run(pair(q), *caches, pair(position), pair(table)))


def errors(case):
    arrays, call = operands(case), decode(case)
    transform = case.get("transform")
    if transform in ("vmap", "vmap, shared caches"):
        found = mapped(call, arrays, transform != "vmap")
    else:
        found = {None: call, "jit": jax.jit(call)}[transform](*arrays)
    q, k, v, position, table = arrays
    wide = (x.astype(jnp.float64) for x in (q, k, v))
    windows = case["teacher"], case["student"]
    facts = *windows, case["H"] ** -0.5
    expected = jax.jit(lambda *xs: reference.decode(*xs, *facts))(*wide, position, table)
    return {name: relative_error(*pair) for name, *pair in zip(NAMES, found, expected, strict=True)}


if __name__ == "__main__":
    print_errors(errors)
