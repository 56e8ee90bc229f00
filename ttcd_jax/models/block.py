"""Pre-norm blocks: a mixer and an MLP on a residual stream. One config class names one block
class."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.config import Config
from ttcd_jax.layers.attention import Attention, AttentionConfig, row_positions
from ttcd_jax.layers.dual_window import DualWindowAttention, DualWindowConfig
from ttcd_jax.layers.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryStats
from ttcd_jax.layers.mlp import MLPConfig, SwiGLU
from ttcd_jax.layers.norm import rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainBlockConfig(Config):
    mixer: AttentionConfig
    mlp: MLPConfig
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPTTCDBlockConfig(Config):
    mixer: DualWindowConfig
    mlp: IPTTCDConfig
    norm_eps: float = 1e-6


class _Block(nnx.Module):
    """What every block has: two RMS norms, and a call that leaves the statistics out."""

    def __init__(self, config: PlainBlockConfig | IPTTCDBlockConfig, mlp: MLPConfig):
        self.config = config
        ones = jnp.ones((mlp.dim,), mlp.precision.param_dtype)
        self.mixer_norm = param(ones, ("embed",))
        self.mlp_norm = param(ones, ("embed",))

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.forward(h, positions, segment_ids)[0]

    def forward(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MemoryStats | None]:
        """(output, what the memory holds at the end of the row; None without a memory)."""
        raise AssertionError(f"{type(self).__name__} defines its own forward")

    def _mixer_input(self, h):
        return rms_norm(h, self.mixer_norm[...], self.config.norm_eps)

    def _mlp_input(self, h):
        return rms_norm(h, self.mlp_norm[...], self.config.norm_eps)


class PlainBlock(_Block):
    """h + attention(norm h), then + SwiGLU(norm of that)."""

    def __init__(self, config: PlainBlockConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.mlp)
        self.attention = Attention(config.mixer, rngs=rngs)
        self.mlp = SwiGLU(config.mlp, rngs=rngs)

    def forward(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], None]:
        """(output, no statistics): the signature all blocks share."""
        positions = row_positions(h) if positions is None else positions
        residual = h + self.attention(self._mixer_input(h), positions, segment_ids)
        return residual + self.mlp(self._mlp_input(residual)), None


class IPTTCDBlock(_Block):
    """One fast-weight block. The teacher's residual r = h + attention_T goes on; with x = norm(r)
    and t = norm(h + attention_S), same norm, the MLP reads and writes its memory: r + MLP(x, t)."""

    def __init__(self, config: IPTTCDBlockConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.mlp.mlp)
        self.attention = DualWindowAttention(config.mixer, rngs=rngs)
        self.mlp = IPTTCDMLP(config.mlp, rngs=rngs)

    def forward(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MemoryStats]:
        """(output, what the memory holds at the end of the row)."""
        positions = row_positions(h) if positions is None else positions
        teacher, student = self.attention(self._mixer_input(h), positions, segment_ids)
        residual = h + teacher
        x, t = self._mlp_input(residual), self._mlp_input(h + student)
        y, stats = self.mlp.forward(x, t, segment_ids)
        return residual + y, stats


type BlockConfig = PlainBlockConfig | IPTTCDBlockConfig
type Block = PlainBlock | IPTTCDBlock


def build_block(config: BlockConfig, *, rngs: nnx.Rngs) -> Block:
    cls = {PlainBlockConfig: PlainBlock, IPTTCDBlockConfig: IPTTCDBlock}[type(config)]
    return cls(config, rngs=rngs)
