"""The definition of decode attention: the whole cache, masks, plain jnp, sums in float32 or wider.

A row's cache is a ring of W slots: position p is in slot p mod W. For the query at position p,
slot s holds the position d = (p - s) mod W before it, if it was ever written (d <= p). A
window w sees it when d < w:

    lse = log sum_s exp(scale * q . k_s),    out = sum_s exp(scale * q . k_s - lse) v_s

over the visible slots; without any (p < 0: an idle row) lse is -inf and out 0.
"""

import jax
import jax.numpy as jnp

from ttcd_kernels.windows import Results, Windows


def visible_slots(position: jax.Array, num_slots: int, window: int) -> jax.Array:
    """[B, W]: which slots hold one of the last `window` positions."""
    distance = (position[:, None] - jnp.arange(num_slots)) % num_slots
    return (distance < window) & (distance <= position[:, None])


def decode(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, position: jax.Array, windows: Windows
) -> Results:
    """(teacher out, student out, teacher lse, student lse), each by its own softmax."""
    state = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (cache.astype(state) for cache in (k_cache, v_cache))
    group = q.shape[1] // k.shape[2]
    k_BSNH, v_BSNH = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    score = jnp.einsum("BNH,BSNH->BNS", q.astype(state), k_BSNH, precision="highest")
    score = score * windows.scale

    def softmax(window: int) -> tuple[jax.Array, jax.Array]:
        visible = visible_slots(position, k.shape[1], window)[:, None]
        lse = jax.nn.logsumexp(score, axis=-1, where=visible)
        weight = jnp.where(visible, jnp.exp(score - lse[..., None]), 0)
        out = jnp.einsum("BNS,BSNH->BNH", weight, v_BSNH, precision="highest")
        return out.astype(q.dtype), lse

    (teacher, teacher_lse), (student, student_lse) = map(softmax, windows[:2])
    return teacher, student, teacher_lse, student_lse
