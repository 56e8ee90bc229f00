"""The IP-TTT MLP: a SwiGLU whose down projection learns to predict targets from features.

    h = conv_A(feat(x)),  v = conv_T(targets)                  both inside their chunk
    W_i = W_base + eta * sum over earlier chunks of h^T (v P),   y = h W_i

x is the normed hidden state; the targets are x itself or the raw token embeddings. Its writes have
no error, no token rate and, without `corrects_errors`, no key norm. A symmetric target convolution
stays causal, because only later chunks read; a symmetric activation convolution would not be.
"""

from typing import ClassVar, Literal

from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv import short_conv

from ttcd_jax.errors import UserError
from ttcd_jax.memory.prefix import Writes
from ttcd_jax.methods import registry
from ttcd_jax.methods.in_place import ConvInit, InPlaceConfig, InPlaceMLP, PrefixSettings, ProjInit
from ttcd_jax.nn.block import BlockConfig, Names
from ttcd_jax.nn.linear import weight_product
from ttcd_jax.nn.row import Hidden, Piece, Row


class TargetMemoryConfig(PrefixSettings):
    """The settings of IP-TTT. The defaults are the published ones.

    `target`: the token embeddings or the hidden states are stored, after their convolution with
    `has_target_conv`; with `has_activation_conv` the features have one too. Both begin as
    `conv_init`: zero targets write nothing until the taps are trained. `is_conv_causal` and
    `proj_init` are those of the base, with other defaults.
    """

    target: Literal["embedding", "hidden"] = "hidden"
    has_target_conv: bool = True
    has_activation_conv: bool = False
    is_conv_causal: bool = False
    conv_init: ConvInit = "zeros"
    proj_init: ProjInit = "gaussian_diagonal"


class IPTTTConfig(InPlaceConfig):
    """An MLP that stores targets in its down projection."""

    reference_names: ClassVar[Names] = InPlaceConfig.reference_names | {
        "ttt_conv.weight": ("target_conv", "conv"),
        "ttt_activation_conv.weight": ("activation_conv", "conv"),
    }

    memory: TargetMemoryConfig = TargetMemoryConfig()

    def flops(self, length: int) -> int | float:
        """Besides a SwiGLU: delta_w, the read of the memory; and what errors need."""
        return (3 + 2) * self.mlp.unit_flops(length) + self.memory.error_flops(self.mlp, length)


class IPTTTMLP(InPlaceMLP[Writes, Writes], config=IPTTTConfig):
    """(x, targets) [B, T, D] -> y [B, T, D], any T. Parameters of SwiGLU plus P and the
    convolutions; gradient flows into the targets. Features and targets become keys and errors."""

    settings: TargetMemoryConfig

    def __init__(self, config: IPTTTConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        settings = config.memory
        self._init_sum(rngs)
        if settings.has_target_conv:
            self.target_conv = self._init_conv(settings.conv_init, rngs, "embed")
            self.look_ahead = settings.look_ahead
        if settings.has_activation_conv:
            self.activation_conv = self._init_conv(settings.conv_init, rngs, "mlp")
            self.convolved_reads = "has_activation_conv"
        if settings.has_target_conv or settings.has_activation_conv:
            self.look_back = settings.num_taps - 1

    def source(self, x: Hidden, row: Row | Piece, student: Hidden | None) -> Hidden:
        """The targets. Raises `UserError` for a row without embeddings."""
        if self.settings.target == "hidden":
            return x
        if row.embeddings is None:
            raise UserError("this block stores token embeddings: pass embeddings=[B, T, D]")
        return row.embeddings

    def tokens(self, x: Hidden, t: Hidden) -> Writes:
        h = self.features(x)
        return Writes(h, t.astype(h.dtype), self.log_decay(x))

    def convolved(self, tokens: Writes, segments: Int[Array, "B C L"] | None) -> Writes:
        (h, v, *decay), causal = tokens, self.settings.is_conv_causal
        if self.settings.has_activation_conv:
            h = short_conv(h, self.activation_conv[...], is_causal=causal, segment_ids=segments)
        if self.settings.has_target_conv:
            v = short_conv(v, self.target_conv[...], is_causal=causal, segment_ids=segments)
        return Writes(h, v, *decay)

    def read_scale(self, has_gap: bool) -> Float[Array, " F"]:
        return self.own_tap("activation_conv")

    def operands(self, convolved: Writes) -> tuple[Float[Array, "B C L F"], Writes]:
        h, v, *decay = convolved
        if self.settings.has_proj:
            v = weight_product(v, self.proj[...].astype(v.dtype))
        keys = l2_normalize(h) if self.settings.corrects_errors else h
        return h, Writes(keys, v, *decay)


def _block(config: registry.ModelConfig, settings: TargetMemoryConfig) -> BlockConfig:
    mlp = IPTTTConfig(mlp=config.mlp(), memory=settings)
    return BlockConfig(mixer=config.attention(), mlp=mlp)


_TARGETS: dict[str, str] = dict.fromkeys(("hidden", "hidden_state", "hidden_states"), "hidden")
_TARGETS |= dict.fromkeys(("embedding", "embed", "input_embed", "input_embeds"), "embedding")
# In the reference's IP-TTT both diagonal initializations are random.
_PROJ_INIT = registry.PROJ_INIT | {"diagonal": "gaussian_diagonal"}
_KEYS = (
    *registry.FAST_KEYS,
    registry.Key("ttt_chunk", "memory.chunk_size", 8192),
    registry.Key("ttt_lr", "memory.eta", 0.3),
    registry.Key("ttt_target", "memory.target", "hidden", _TARGETS),
    registry.Key("ttt_proj", "memory.has_proj", True),
    registry.Key("ttt_proj_init", "memory.proj_init", "diagonal_gaussian", _PROJ_INIT),
    registry.Key("ttt_conv", "memory.has_target_conv", True),
    registry.Key("ttt_activation_conv", "memory.has_activation_conv", False),
    registry.Key("ttt_conv_kernel_size", "memory.num_taps", 5),
    registry.Key("ttt_conv_causal", "memory.is_conv_causal", False),
)
_REFERENCE = registry.Reference(("ipttt",), _KEYS, registry.ATTENTION_FIXED, has_switch=True)
registry.register(
    registry.Method("ipttt", "IP-TTT", _block, settings=TargetMemoryConfig, reference=_REFERENCE)
)
