"""A method outside the package: a Hebbian memory in the down projection that forgets by half.

S <- S / 2 + sum over the chunk of tanh(z)^T x,   y = z (W_base + eta S),   z = feat(x)
"""

import dataclasses

import jax
import jax.numpy as jnp

from ttcd_jax.memory.chunks import masked
from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.methods.in_place import InPlaceConfig, InPlaceMLP, InPlaceSettings
from ttcd_jax.methods.registry import Method
from ttcd_jax.nn.block import BlockConfig
from ttcd_jax.nn.mlp import MLPConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySettings(InPlaceSettings):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(InPlaceConfig):
    mlp: MLPConfig
    memory: ToySettings

    def flops(self, length):
        return (3 + 2) * self.mlp.unit_flops(length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToyMemory(ChunkedMemory):
    w_base: jax.Array
    eta: float = dataclasses.field(metadata={"static": True})

    def start(self, batch):
        return jnp.zeros((batch, *self.w_base.shape), self.w_base.dtype)

    def read(self, state, z):
        return z @ (self.w_base + self.eta * state)

    def write(self, state, writes, mask=None):
        z, x = writes
        return state / 2 + jnp.tanh(z).mT @ masked(x, mask)


class ToyMLP(InPlaceMLP, config=ToyConfig):
    def source(self, x, row, student):
        return x

    def tokens(self, x, t):
        return (self.features(x), t)

    def operands(self, convolved):
        return (convolved[0], convolved)

    def memory(self, length):
        return ToyMemory(self.w_base(), self.settings.eta)


def block(model, settings):
    mlp = ToyConfig(mlp=model.mlp(), memory=settings)
    return BlockConfig(mixer=model.attention(), mlp=mlp)


METHOD = Method("toy", "a toy", block, settings=ToySettings)
