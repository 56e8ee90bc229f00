"""Your model that reads a prompt and decodes: the block's state in, the state out.

python examples/your_decode_loop.py
"""

from typing import Any

import jax
import jax.numpy as jnp
from block_in_nnx import BLOCK, MyModel, batch
from flax import nnx

from ttcd_jax import IPTTCDBlock, Piece

CHUNK, WINDOW = BLOCK.mlp.memory.chunk_size, BLOCK.mixer.attention.window


@nnx.jit(static_argnames="start")
def read(model: MyModel, tokens: jax.Array, state: Any, start: int) -> tuple[jax.Array, Any]:
    """(logits [B, T, V], state) of the next T tokens of rows that have `start` already."""
    h = model.embed(tokens)
    piece = Piece.of(h, start, chunk_size=CHUNK, window=WINDOW)
    h, state = model.block.extend(h, piece, state)
    return model.head(h), state


@nnx.jit
def decode(
    model: MyModel, token: jax.Array, state: Any, position: jax.Array
) -> tuple[jax.Array, Any]:
    """(logits [B, V], state) of one token [B] at `position` [B]: one program for all positions."""
    h = model.embed(token[:, None])
    piece = Piece.of(h, position, chunk_size=CHUNK, window=WINDOW)
    h, state = model.block.extend(h, piece, state)
    return model.head(h)[:, 0], state


def generate(model: MyModel, prompt: jax.Array, count: int) -> jax.Array:
    """The `count` most probable next tokens [B, count], one after another."""
    state, length = model.block.start(len(prompt), max_length=None), prompt.shape[1]
    for start in range(0, length, CHUNK):  # chunk by chunk; the last piece may be shorter
        logits, state = read(model, prompt[:, start : start + CHUNK], state, start=start)
    token, tokens = logits[:, -1].argmax(-1), []
    for position in range(length, length + count):
        tokens.append(token)
        logits, state = decode(model, token, state, jnp.full(len(prompt), position))
        token = logits.argmax(-1)
    return jnp.stack(tokens, axis=1)


if __name__ == "__main__":
    model = MyModel(IPTTCDBlock(BLOCK, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    prompt = batch(0)[:2, :20]
    found = generate(model, prompt, 30)
    whole = model(jnp.concatenate([prompt, found], axis=1)).argmax(-1)[:, 19:-1]
    print("as one pass over the row says:", bool(jnp.array_equal(found, whole)))
