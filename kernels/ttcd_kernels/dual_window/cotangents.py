"""The differentiable call of dual-window attention, and the cotangents its backwards start from.

In the near band (distance < w_S) P_T = rho P_S with rho = exp(lse_S - lse_T) <= 1, so both outputs'
gradients pass through one set of weights:

    near:  dS = P_S * ((dO_S + rho dO_T) V^T - (D_S + rho D_T)),     dV += P_S^T (dO_S + rho dO_T)
    far:   dS = P_T * (dO_T V^T - D_T),                              dV += P_T^T dO_T

with D = rowsum(dO * O) - d_lse: five matrix products per query-key pair of the teacher's window.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ttcd_kernels.partitioning import everywhere
from ttcd_kernels.windows import Ids, Keys, Queries, Results

ATTENTION = "attention"  # the checkpoint name of results
GRADIENTS = "QKKIQLLQLL -> QKK"  # of `backward_operands` the kinds, as of `everywhere`

type QKV = tuple[Queries, Keys, Keys]


def with_gradients(
    forward: Callable[..., Results], backward: Callable[..., QKV], *operands: jax.Array | None
) -> Results:
    """`forward(q, k, v, segment_ids)`, made differentiable in q, k, v through all four results by
    `backward(*backward_operands)`, which recomputes the scores.

    The results carry the checkpoint name `ATTENTION`: a remat policy that saves them runs nothing
    again, because they are computed outside of the function with the VJP.
    """

    @jax.custom_vjp
    def attach(results: Results, *operands: Any) -> Results:
        return results

    def pull(saved: tuple[Any, Results], cotangents: Results) -> tuple[Any, ...]:
        of_results = jax.tree.map(jnp.zeros_like, cotangents)
        return of_results, *backward(*backward_operands(*saved, cotangents)), None

    attach.defvjp(lambda results, *operands: (results, (operands, results)), pull)
    results = forward(*jax.lax.stop_gradient(operands))
    return attach(checkpoint_name(results, ATTENTION), *operands)


def by_kernels(
    forward: Callable[..., Results], backward: Callable[..., QKV], *operands: jax.Array | None
) -> Results:
    """`with_gradients` of launches, under vmap and on a mesh."""
    run = functools.partial(everywhere, forward, "QKKI -> QQLL")
    pull = functools.partial(everywhere, backward, GRADIENTS)
    return with_gradients(run, pull, *operands)


def backward_operands(
    operands: tuple[Queries, Keys, Keys, Ids | None], results: Results, cotangents: Results
) -> tuple[jax.Array | None, ...]:
    """q, k, v, ids, then for the near and the far band dO in q's dtype [B, T, N, H], D and the
    log-sum-exp in that of the latter [B, T, N]. The near dO is rounded once, and its D is that of
    the rounded one."""
    teacher, student, teacher_lse, student_lse = results
    d_teacher, d_student, d_teacher_lse, d_student_lse = cotangents
    dtype, state = teacher.dtype, teacher_lse.dtype

    def row_dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a.astype(state) * b.astype(state)).sum(-1)

    rho = jnp.exp(student_lse - teacher_lse)
    far_delta = row_dot(d_teacher, teacher) - d_teacher_lse
    near_delta = row_dot(d_student, student) - d_student_lse + rho * far_delta
    exact = d_student.astype(state) + rho[..., None] * d_teacher.astype(state)
    if dtype != state:
        # Of the dO that is used; not by a cast, as XLA folds one there and back.
        narrow = jnp.finfo(dtype)
        rounded = jax.lax.reduce_precision(exact, narrow.nexp, narrow.nmant)
        near_delta += row_dot(rounded - exact, student)
    near = exact.astype(dtype), near_delta, student_lse
    return *operands, *near, d_teacher, far_delta, teacher_lse
