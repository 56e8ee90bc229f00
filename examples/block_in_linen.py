"""An IP-TTCD block inside your own Flax Linen model, through `flax.nnx.bridge`.

python examples/block_in_linen.py
"""

import flax.linen as nn
import jax
import optax
from block_in_nnx import BLOCK, DIM, STEPS, VOCAB, batch, next_token_loss
from flax.nnx import bridge

from ttcd_jax import IPTTCDBlock


class MyModel(nn.Module):
    """`to_linen` adds the block's parameters to those of the model."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = nn.Embed(VOCAB, DIM)(tokens)
        h = bridge.to_linen(IPTTCDBlock, BLOCK, name="block")(h)
        return nn.Dense(VOCAB)(h)


def train() -> list[float]:
    """The losses of `STEPS` steps."""
    model, optimizer = MyModel(), optax.adamw(1e-2)
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
    losses = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
