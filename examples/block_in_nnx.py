"""An IP-TTCD block inside your own Flax NNX model.

python examples/block_in_nnx.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ttcd_jax as ttcd

VOCAB, DIM, STEPS = 32, 32, 30
ATTENTION = ttcd.AttentionConfig(dim=DIM, num_heads=2, num_kv_heads=1, head_dim=16, window=16)
MEMORY = ttcd.MemoryConfig(chunk_size=8, teacher_conv_init="identity")
BLOCK = ttcd.IPTTCDBlockConfig(
    mixer=ttcd.DualWindowConfig(attention=ATTENTION, student_window=8),
    mlp=ttcd.IPTTCDConfig(mlp=ttcd.MLPConfig(dim=DIM, hidden_dim=64), memory=MEMORY),
)


class MyModel(nnx.Module):
    def __init__(self, block: nnx.Module, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.block = block  # [B, T, D] -> [B, T, D]
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.block(self.embed(tokens)))


def batch(seed: int) -> jax.Array:
    """Rows of 24 tokens that count upwards from a random start."""
    return (jax.random.randint(jax.random.key(seed), (16, 1), 0, VOCAB) + jnp.arange(24)) % VOCAB


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train(model: nnx.Module, update: optax.GradientTransformation) -> list[float]:
    """The losses of `STEPS` steps."""
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
        gradient = nnx.value_and_grad(lambda model: next_token_loss(model(tokens), tokens))
        loss, grads = gradient(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, batch(i))) for i in range(STEPS)]


if __name__ == "__main__":
    rngs = nnx.Rngs(0)
    losses = train(MyModel(ttcd.IPTTCDBlock(BLOCK, rngs=rngs), rngs=rngs), optax.adamw(1e-2))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
