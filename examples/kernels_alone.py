"""Only the kernels: attention under two windows with its gradient, and one decoded token.

python examples/kernels_alone.py
"""

import jax
import jax.numpy as jnp
from ttcd_kernels import decode_attention, dual_window_attention

TEACHER, STUDENT = 8, 4
B, T, N, K, H = 2, 24, 4, 2, 16


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, N, H], k and v [B, T, K, H]: N / K query heads share a head of keys and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H))
    q, k, v = (jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))
    return q, k, v


def both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(teacher, student) [B, T, N, H]; on a GPU one fused kernel, elsewhere XLA."""
    return dual_window_attention(q, k, v, teacher_window=TEACHER, student_window=STUDENT)


def missed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The mean square of the difference between both windows."""
    teacher, student = both(q, k, v)
    return jnp.mean((teacher - student) ** 2)


def last_token(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(teacher, student) [B, N, H] of the last token, from a ring of `TEACHER` keys: position p is
    in slot p mod TEACHER."""
    slots = (jnp.arange(T - TEACHER, T)) % TEACHER
    k_cache, v_cache = (
        jnp.zeros((B, TEACHER, K, H)).at[:, slots].set(x[:, -TEACHER:]) for x in (k, v)
    )
    windows = {"teacher_window": TEACHER, "student_window": STUDENT}
    return decode_attention(q[:, -1], k_cache, v_cache, jnp.full(B, T - 1), **windows)


if __name__ == "__main__":
    q, k, v = operands()
    loss, gradients = jax.value_and_grad(missed, argnums=(0, 1, 2))(q, k, v)
    print(f"missed {loss:.4f}, gradients of {[x.shape for x in gradients]}")
    for whole, decoded in zip(both(q, k, v), last_token(q, k, v), strict=True):
        print(f"decoded and whole differ by {jnp.abs(whole[:, -1] - decoded).max():.1e}")
