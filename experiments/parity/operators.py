"""Checks of operators without parameters: the delta rule, attention under two windows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from ttcd_kernels import dual_window_attention, dual_window_attention_with_lse

from experiments.parity.golden import Comparison, Golden, bound, relative_error, worst
from ttcd_jax.errors import DataError
from ttcd_jax.memory.delta_rule import delta_rule, l2_normalize_inside

_DELTA_CHUNK = 16  # several chunks in the files' short rows
_HEADS = ("B", "T", "H", "HK", "D")


def check_delta_rule(golden: Golden, dtype: str) -> Comparison:
    """kind delta_op: outputs, final state and all gradients of the chunk-parallel form."""
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
        return delta_rule(
            rescale * q,
            k,
            x["v"],
            x["beta"],
            log_decay=x.get("g"),
            initial_state=x.get("S0"),
            chunk_size=_DELTA_CHUNK,
            state_dtype=jnp.dtype(dtype),
        )

    @jax.jit
    def differentiate(x: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        results, pull = jax.vjp(run, x)
        cotangents = (jnp.asarray(arrays["in.G_o"]), jnp.asarray(arrays["in.G_S"]))
        return results, pull(tuple(c.astype(dtype) for c in cotangents))[0]

    (out, state), grads = differentiate(inputs)
    ours: dict[str, Any] = {"out.o": out, "out.S": state}
    ours |= {f"grad_in.{name}": value for name, value in grads.items()}
    return worst(ours, golden, dtype)


def check_attention(golden: Golden, dtype: str) -> Comparison:
    """kind dual_attn: both outputs, both log-sum-exps, gradients of each output alone."""
    inputs, config = _attention_inputs(golden), golden.config
    q, k, v = (jnp.asarray(inputs.arrays[f"in.{name}"], dtype) for name in "qkv")
    attention = functools.partial(
        dual_window_attention_with_lse,
        teacher_window=config["window_teacher"],
        student_window=config["window_student"],
        scale=config["scale"],
    )

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, ...]:
        (teacher, student, lse_teacher, lse_student), pull = jax.vjp(attention, q, k, v)
        nothing = jnp.zeros_like(teacher), jnp.zeros_like(lse_teacher)
        d_teacher, d_student = (
            jnp.asarray(inputs.arrays[f"in.G_{which}"], dtype) for which in ("teacher", "student")
        )
        grads = {
            "grad_teacher": pull((d_teacher, nothing[0], nothing[1], nothing[1])),
            "grad_student": pull((nothing[0], d_student, nothing[1], nothing[1])),
        }
        return teacher, student, lse_teacher.mT, lse_student.mT, grads

    *outputs, grads = run(q, k, v)
    names = ("out.o_teacher", "out.o_student", "out.lse_teacher", "out.lse_student")
    ours: dict[str, Any] = dict(zip(names, outputs, strict=True))
    for which, values in grads.items():
        ours |= {f"{which}.{name}": x for name, x in zip("qkv", values, strict=True)}
    return worst(ours, golden, dtype)


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
    """kind dual_attn_inputs: the arrays have the stated shapes; on them the blockwise form agrees
    with the plain definition (the reference's outputs are in the dual_attn files)."""
    arrays = golden.arrays
    B, T, H, HK, D = (golden.config[name] for name in _HEADS)
    shapes = {"in.q": (B, T, H, D), "in.k": (B, T, HK, D), "in.v": (B, T, HK, D)}
    shapes |= {"in.G_teacher": (B, T, H, D), "in.G_student": (B, T, H, D)}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise DataError(f"{name} has shape {arrays[name].shape}, its description {shape}")
    q, k, v = (jnp.asarray(arrays[f"in.{name}"], dtype) for name in "qkv")
    forms = [
        dual_window_attention(
            q, k, v, teacher_window=T // 2, student_window=T // 4, implementation=form
        )
        for form in ("auto", "reference")
    ]
    error = max(relative_error(a, jnp.asarray(b).__array__()) for a, b in zip(*forms, strict=True))
    return Comparison("blockwise against plain", error, bound(golden, dtype, "out"))
