"""Checks of operators without parameters: the delta rule, dual-window attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import dual_window_attention, dual_window_attention_with_lse, window_attention

from tests.parity.golden import Comparison, Golden, bound, relative_error, worst
from ttcd_jax.errors import DataError
from ttcd_jax.memory.delta_rule import delta_rule, l2_normalize_inside

_DELTA_CHUNK = 16  # several chunks in the files' short rows
_HEADS = ("B", "T", "H", "HK", "D")


def check_delta_rule(golden: Golden, dtype: str) -> Comparison:
    """Kind delta_op: outputs, final state and all gradients of the chunk-parallel form."""
    arrays, config = golden.arrays, golden.config
    inputs = {
        name: jnp.asarray(arrays[f"in.{name}"], dtype)
        for name in ("q", "k", "v", "beta", "g", "S0")
        if f"in.{name}" in arrays
    }
    rescale = config["scale"] * inputs["q"].shape[-1] ** 0.5  # ours is 1 / sqrt(K)

    def run(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k = x["q"], x["k"]
        if config["l2norm_inside"]:
            q, k = l2_normalize_inside(q), l2_normalize_inside(k)
        settings: Any = {"chunk_size": _DELTA_CHUNK, "state_dtype": jnp.dtype(dtype)}
        settings |= {"log_decay": x.get("g"), "initial_state": x.get("S0")}
        return delta_rule(rescale * q, k, x["v"], x["beta"], **settings)

    @jax.jit
    def differentiate(x: dict[str, jax.Array], cotangents: Any) -> tuple[Any, Any]:
        results, pull = jax.vjp(run, x)
        return results, pull(cotangents)[0]

    cotangents = tuple(jnp.asarray(arrays[name], dtype) for name in ("in.G_o", "in.G_S"))
    (out, state), grads = differentiate(inputs, cotangents)
    ours = {f"grad_in.{name}": value for name, value in grads.items()}
    return worst({"out.o": out, "out.S": state} | ours, golden, dtype)


def check_attention(golden: Golden, dtype: str) -> Comparison:
    """Kind dual_attn: both outputs, both log-sum-exps, gradients of each output alone."""
    inputs, config = _attention_inputs(golden), golden.config
    q, k, v, d_teacher, d_student = (
        jnp.asarray(inputs.arrays[f"in.{name}"], dtype)
        for name in ("q", "k", "v", "G_teacher", "G_student")
    )
    attention = functools.partial(
        dual_window_attention_with_lse,
        teacher_window=config["window_teacher"],
        student_window=config["window_student"],
        scale=config["scale"],
    )

    @jax.jit
    def run(*operands: jax.Array) -> tuple[Any, ...]:
        (teacher, student, *lse), pull = jax.vjp(attention, *operands)
        nothing, no_lse = jnp.zeros_like(teacher), jnp.zeros_like(lse[0])
        d_of_teacher = pull((d_teacher, nothing, no_lse, no_lse))
        d_of_student = pull((nothing, d_student, no_lse, no_lse))
        return teacher, student, *(x.mT for x in lse), *d_of_teacher, *d_of_student

    outputs = ("out.o_teacher", "out.o_student", "out.lse_teacher", "out.lse_student")
    grads = (f"grad_{which}.{name}" for which in ("teacher", "student") for name in "qkv")
    return worst(dict(zip((*outputs, *grads), run(q, k, v), strict=True)), golden, dtype)


def _attention_inputs(golden: Golden) -> Golden:
    """The file in the same folder with q, k, v and cotangents of its shape."""
    for path in sorted(golden.path.parent.glob("*inputs*.npz")):
        inputs = Golden(path)
        if inputs.kind == "dual_attn_inputs" and all(
            inputs.config[name] == golden.config[name] for name in _HEADS
        ):
            return inputs
    raise DataError(f"no file of kind dual_attn_inputs with the shape of {golden.path.name} here")


def check_attention_inputs(golden: Golden, dtype: str) -> Comparison:
    """Kind dual_attn_inputs: on these inputs one pass over both windows agrees with a call for each
    (the reference's outputs are in the dual_attn files)."""
    q, k, v = (jnp.asarray(golden.arrays[f"in.{name}"], dtype) for name in "qkv")
    T = q.shape[1]
    windows = T // 2, T // 4
    forms = (
        dual_window_attention(q, k, v, teacher_window=windows[0], student_window=windows[1]),
        [window_attention(q, k, v, window=window) for window in windows],
    )
    error = max(relative_error(a, np.asarray(b)) for a, b in zip(*forms, strict=True))
    return Comparison("one sweep against two calls", error, bound(golden, dtype, "out"))
