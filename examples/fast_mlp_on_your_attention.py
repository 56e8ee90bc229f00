"""Only the MLP with a memory, on top of your attention under a long and a short window.

python examples/fast_mlp_on_your_attention.py
"""

import jax
import jax.numpy as jnp
import optax
from block_in_nnx import BLOCK, DIM, STEPS, MyModel, train
from flax import nnx

from ttcd_jax import IPTTCDMLP


def band(length: int, window: int) -> jax.Array:
    """[1, 1, T, T]: which keys a query sees, itself and the window - 1 tokens before it."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    return ((distance >= 0) & (distance < window))[None, None]


class MyBlock(nnx.Module):
    """Flax's attention called twice, with the same weights; the MLP reads teacher and student."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)
        self.norm, self.mlp_norm = (nnx.RMSNorm(DIM, rngs=rngs) for _ in range(2))
        self.mlp = IPTTCDMLP(BLOCK.mlp, rngs=rngs)

    def __call__(self, h: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        x, length = self.norm(h), h.shape[1]
        teacher, student = (h + self.attention(x, mask=band(length, w)) for w in (16, 8))
        return teacher + self.mlp(self.mlp_norm(teacher), self.mlp_norm(student), segment_ids)


if __name__ == "__main__":
    rngs = nnx.Rngs(0)
    losses = train(MyModel(MyBlock(rngs=rngs), rngs=rngs), optax.adamw(1e-2))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
