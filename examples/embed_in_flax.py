"""An IP-TTCD block inside your own Flax model: NNX, or Linen through `nnx.bridge`.

    python examples/embed_in_flax.py

Each model is trained a few steps on a toy task and prints its first and last loss.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import bridge

from ttcd_jax import (
    AttentionConfig,
    DualWindowConfig,
    IPTTCDBlock,
    IPTTCDBlockConfig,
    IPTTCDConfig,
    MemoryConfig,
    MLPConfig,
)

VOCAB, DIM, STEPS = 32, 32, 30
BLOCK = IPTTCDBlockConfig(
    mixer=DualWindowConfig(
        attention=AttentionConfig(dim=DIM, num_heads=2, num_kv_heads=1, head_dim=16, window=16),
        student_window=8,
    ),
    mlp=IPTTCDConfig(
        mlp=MLPConfig(dim=DIM, hidden_dim=64),
        memory=MemoryConfig(chunk_size=8, teacher_conv_init="identity"),
    ),
)


class MyModel(nnx.Module):
    """A hand-written NNX model: embedding, one IP-TTCD block, a head."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.block = IPTTCDBlock(BLOCK, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.block(self.embed(tokens)))


class MyLinenModel(nn.Module):
    """The same in Linen: `to_linen` adds the block's parameters to those of the model."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = nn.Embed(VOCAB, DIM)(tokens)
        h = bridge.to_linen(IPTTCDBlock, BLOCK, name="block")(h)
        return nn.Dense(VOCAB)(h)


def batch(seed: int) -> jax.Array:
    """Rows of 24 tokens that count upwards from a random start."""
    start = jax.random.randint(jax.random.key(seed), (16, 1), 0, VOCAB)
    return (start + jnp.arange(24)) % VOCAB


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def train_nnx() -> list[float]:
    model = MyModel(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss_of(model):
            return next_token_loss(model(tokens), tokens)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, batch(i))) for i in range(STEPS)]


def train_linen() -> list[float]:
    model, optimizer = MyLinenModel(), optax.adamw(1e-2)
    params = model.init(jax.random.key(0), batch(0))["params"]
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, tokens):
        def loss_of(params):
            return next_token_loss(model.apply({"params": params}, tokens), tokens)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for i in range(STEPS):
        params, opt_state, loss = step(params, opt_state, batch(i))
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    for name, losses in (("NNX", train_nnx()), ("Linen", train_linen())):
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
