"""Gradients for forwards that have none of their own: the fused backward of this machine."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax

from ttcd_kernels.dual_window import triton_call, xla
from ttcd_kernels.dual_window.cotangents import Residuals


def with_gradients(
    forward: Callable[..., Any], q, k, v, segment_ids, *windows_and_scale
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`forward(q, k, v, segment_ids, teacher_window, student_window, scale)`, which returns what
    `reference.dual_window` does, made differentiable in q, k, v through all four results. Nothing
    of the forward is computed again but the scores."""
    return cast(Any, _call(forward, windows_and_scale, q, k, v, segment_ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _call(forward, static, q, k, v, segment_ids):
    return forward(q, k, v, segment_ids, *static)


def _forward(forward, static, q, k, v, segment_ids):
    results = forward(q, k, v, segment_ids, *static)
    return results, Residuals(q, k, v, segment_ids, *results)


def _backward(forward, static, saved: Residuals, cotangents):
    runs_triton = triton_call.unsupported(saved.q, saved.k, saved.v) is None
    gradients = triton_call.gradients if runs_triton else xla.gradients
    return *gradients(saved, cotangents, *static), None


_call.defvjp(_forward, _backward)
