"""A trained base gets a memory; its own parameters are frozen, the added ones are trained.

python examples/train_added_parameters.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from block_in_nnx import ATTENTION, BLOCK, STEPS, MyModel, batch, train
from flax import nnx

from ttcd_jax import Block, BlockConfig, IPTTCDBlock

BASE = BlockConfig(mixer=ATTENTION, mlp=BLOCK.mlp.mlp)  # attention and SwiGLU
# The start of continued training: at first the memory adds nothing to the base's features.
MEMORY = BLOCK.mlp.memory.replace(output="teacher_raw", normalizes_keys=False)
MEMORY = MEMORY.replace(teacher_conv_init="identity", student_conv_init="zeros")
GROWN = BLOCK.replace(mlp=BLOCK.mlp.replace(memory=MEMORY))


def grown(base: MyModel) -> MyModel:
    """The base with a memory: all that the base has, at its values, and the added parameters."""
    model = MyModel(IPTTCDBlock(GROWN, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(1))
    nnx.update(model, nnx.state(base, nnx.Param))
    return model


def paths(model: MyModel) -> set[tuple[Any, ...]]:
    return {path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def added_only(base: MyModel) -> optax.GradientTransformation:
    """AdamW on the parameters that the base lacks; the others have no update and no moments."""
    old = paths(base)

    def labels(params: nnx.State) -> nnx.State:
        return nnx.map_state(lambda path, _: "frozen" if path in old else "added", params)

    return optax.partition({"added": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels)


if __name__ == "__main__":
    base = MyModel(Block(BASE, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    train(base, optax.adamw(3e-3))
    model = grown(base)
    print("the same logits at first:", bool(jnp.array_equal(model(batch(0)), base(batch(0)))))
    old = paths(base)
    losses = train(model, added_only(base))
    same = jax.tree.map(
        jnp.array_equal, nnx.state(base, nnx.Param), nnx.state(model, lambda path, _: path in old)
    )
    print("the base is unchanged:", all(map(bool, jax.tree.leaves(same))))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
