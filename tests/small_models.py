"""A model of two small layers for every method, whose windows and chunks are four tokens; the
attention of small layers; and a method outside the package: a Hebbian memory in the down projection
that forgets by half.

    S <- S / 2 + sum over the chunk of tanh(z)^T x,   y = z (W_base + eta S),   z = feat(x)
"""

import dataclasses

import jax
import jax.numpy as jnp

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.memory.chunks import masked
from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.methods.in_place import InPlaceConfig, InPlaceMLP, InPlaceSettings
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.methods.registry import Method
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.nn.block import BlockConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.precision import Precision


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


def _toy(model, settings):
    mlp = ToyConfig(mlp=model.mlp(), memory=settings)
    return BlockConfig(mixer=model.attention(), mlp=mlp)


TOY = Method("toy", "a toy", _toy, settings=ToySettings)


CHUNK, WINDOW, D = 4, 4, 8
FLOAT64 = Precision(param="float64", compute="float64", state="float64")
SETTINGS = {
    "ipttcd": MemoryConfig(chunk_size=CHUNK, num_taps=3, form="blocked"),
    "ipttcd_ideal": IdealMemoryConfig(chunk_size=CHUNK),
    # One that forgets, for all that methods share.
    "ipttt": TargetMemoryConfig(
        **{"chunk_size": CHUNK, "num_taps": 3, "form": "blocked", "target": "embedding"},
        **{"half_lives": (3.0, 50.0), "decay": "gated"},
    ),
    "toy": ToySettings(chunk_size=CHUNK),
    "lact": LaCTMemoryConfig(chunk_size=CHUNK, num_fast_heads=2, low_rank=3),
}
DELTA = DeltaRuleConfig(chunk_size=CHUNK, num_taps=3, value_expansion=1.5)
SETTINGS |= dict.fromkeys(("deltanet", "gated_deltanet", "deltanet_hybrid"), DELTA)


def _small(settings):
    """Settings of a method that has no entry above: its defaults, in small chunks."""
    names = () if settings is None else settings.__dataclass_fields__
    return settings and settings(**{"chunk_size": CHUNK} if "chunk_size" in names else {})


def config_of(method: str, **changes) -> TransformerConfig:
    """The model; `fast_layers` (default: the first) apply where the method leaves the choice."""
    layers = changes.pop("fast_layers", (0,))
    fields = {
        "vocab_size": 11,
        "dim": D,
        "num_layers": 2,
        "num_heads": 2,
        "mlp_dim": 12,
        "method": method,
        "window": None if method == "full" else WINDOW,
        "student_window": 2,
        "fast_layers": layers if METHODS[method].layers == "fast" else (),
        "memory": SETTINGS.get(method) or _small(METHODS[method].settings),
        "precision": FLOAT64,
    }
    return TransformerConfig(**fields | changes)


def byte_model(**changes) -> TransformerConfig:
    """A model of text for commands: one IP-TTCD layer of bytes, float32."""
    fields = {"num_layers": 1, "dim": 8, "mlp_dim": 8, "window": 8, "student_window": 4}
    fields |= {"vocab_size": ByteTokenizer.vocab_size, "precision": Precision()}
    return config_of("ipttcd", **fields | changes)


def small_attention(**changes) -> AttentionConfig:
    """Two pairs of heads that share keys and values."""
    fields = {"dim": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "window": WINDOW}
    return AttentionConfig(**fields | {"precision": FLOAT64} | changes)
