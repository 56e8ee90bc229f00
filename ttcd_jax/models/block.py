"""Pre-norm blocks: a mixer and an MLP on a residual stream. One config class names one block
class."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.config import Config
from ttcd_jax.methods.delta_net import DeltaNet, DeltaNetConfig, DeltaSublayer
from ttcd_jax.methods.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from ttcd_jax.methods.ideal import IdealConfig, IdealMLP
from ttcd_jax.methods.in_place import MemoryStats
from ttcd_jax.methods.ip_ttt import IPTTTMLP, IPTTTConfig
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig
from ttcd_jax.methods.lact import LaCT, LaCTConfig
from ttcd_jax.nn.attention import Attention, AttentionConfig, row_positions
from ttcd_jax.nn.dual_window import DualWindowAttention, DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.nn.norm import rms_norm
from ttcd_jax.nn.stream import Piece

# A mixer maps (h [B, T, D], positions, segment_ids) to [B, T, D].
_MIXERS = {
    AttentionConfig: Attention,
    DeltaNetConfig: DeltaNet,
    GatedDeltaNetConfig: GatedDeltaNet,
    LaCTConfig: LaCT,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainBlockConfig(Config):
    mixer: AttentionConfig | DeltaNetConfig | GatedDeltaNetConfig | LaCTConfig
    mlp: MLPConfig
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPTTCDBlockConfig(Config):
    mixer: DualWindowConfig
    mlp: IPTTCDConfig | IdealConfig
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPTTTBlockConfig(Config):
    mixer: AttentionConfig
    mlp: IPTTTConfig
    norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridBlockConfig(Config):
    mixer: AttentionConfig
    delta: DeltaNetConfig
    mlp: MLPConfig
    norm_eps: float = 1e-6


class BlockState(NamedTuple):
    """A block in the middle of rows: what its sub-layers keep, None for one that keeps nothing."""

    mixer: Any  # KVCache | DeltaState | LaCTState
    memory: Any  # MemoryState | DeltaState | None


class _Block(nnx.Module):
    """What every block has: two RMS norms, and a call that leaves the statistics out."""

    def __init__(self, config: "BlockConfig", mlp: MLPConfig):
        self.config = config
        self.mixer_norm = _norm(mlp)
        self.mlp_norm = _norm(mlp)

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.forward(h, positions, segment_ids, embeddings)[0]

    def forward(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        embeddings: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MemoryStats | None]:
        """(output, what the memory holds at the end of the row; None without a memory).

        `embeddings`, the raw token embeddings, are the targets of an IP-TTT block that stores them;
        no other block reads them.
        """
        raise AssertionError(f"{type(self).__name__} defines its own forward")

    def start(self, batch_size: int, max_length: int | None) -> BlockState:
        """What `extend` finds in front of rows; `max_length` bounds those of full attention."""
        raise AssertionError(f"{type(self).__name__} defines its own start")

    def extend(
        self,
        h: Float[Array, "B T D"],
        piece: Piece,
        state: BlockState,
        embeddings: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T D"], BlockState]:
        """The same for a piece of rows of one document: (output, the state behind it). Piece after
        piece, the outputs are those of `forward`, and without gradient."""
        raise AssertionError(f"{type(self).__name__} defines its own extend")

    def _normed(self, h, weight: nnx.Param):
        return rms_norm(h, weight[...], self.config.norm_eps)


def _norm(mlp: MLPConfig) -> nnx.Param:
    return param(jnp.ones((mlp.dim,), mlp.precision.param_dtype), ("embed",))


class PlainBlock(_Block):
    """h + mixer(norm h), then + SwiGLU(norm of that)."""

    def __init__(self, config: PlainBlockConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.mlp)
        self.mixer = _MIXERS[type(config.mixer)](config.mixer, rngs=rngs)
        self.mlp = SwiGLU(config.mlp, rngs=rngs)

    def forward(self, h, positions=None, segment_ids=None, embeddings=None):
        """(output, None)."""
        positions = row_positions(h) if positions is None else positions
        h = h + self.mixer(self._normed(h, self.mixer_norm), positions, segment_ids)
        return h + self.mlp(self._normed(h, self.mlp_norm)), None

    def start(self, batch_size, max_length):
        """What `extend` finds in front of rows."""
        return BlockState(self.mixer.start(batch_size, max_length), None)

    def extend(self, h, piece, state, embeddings):
        """(output, the state behind the piece)."""
        mixed, mixer = self.mixer.extend(self._normed(h, self.mixer_norm), piece, state.mixer)
        h = h + mixed
        return h + self.mlp(self._normed(h, self.mlp_norm)), BlockState(mixer, None)


class IPTTCDBlock(_Block):
    """One fast-weight block. The teacher's residual r = h + attention_T goes on; with x = norm(r)
    and t = norm(h + attention_S), same norm, the MLP reads and writes its memory: r + MLP(x, t)."""

    def __init__(self, config: IPTTCDBlockConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.mlp.mlp)
        self.mixer = DualWindowAttention(config.mixer, rngs=rngs)
        mlp = {IPTTCDConfig: IPTTCDMLP, IdealConfig: IdealMLP}[type(config.mlp)]
        self.mlp = mlp(config.mlp, rngs=rngs)

    def forward(self, h, positions=None, segment_ids=None, embeddings=None):
        """(output, what the memory holds at the end of the row)."""
        residual, x, t = self._mixed(h, positions, segment_ids)
        y, stats = self.mlp.forward(x, t, segment_ids)
        return residual + y, stats

    def start(self, batch_size, max_length):
        """What `extend` finds in front of rows."""
        return BlockState(self.mixer.start(batch_size, max_length), self.mlp.start(batch_size))

    def extend(self, h, piece, state, embeddings):
        """(output, the state behind the piece)."""
        views, mixer = self.mixer.extend(self._normed(h, self.mixer_norm), piece, state.mixer)
        residual, x, t = self._seen(h, *views)
        y, memory = self.mlp.extend(x, t, piece, state.memory)
        return residual + y, BlockState(mixer, memory)

    def keys(self, h, positions=None, segment_ids=None) -> Float[Array, "B C L F"]:
        """What the chunks write under; not for the ideal memory, which has no keys."""
        assert isinstance(self.mlp, IPTTCDMLP)
        return self.mlp.keys(self._mixed(h, positions, segment_ids)[2], segment_ids)

    def _mixed(self, h, positions, segment_ids):
        """(residual, x, t) in front of the MLP."""
        positions = row_positions(h) if positions is None else positions
        normed = self._normed(h, self.mixer_norm)
        return self._seen(h, *self.mixer(normed, positions, segment_ids))

    def _seen(self, h, teacher, student):
        residual = h + teacher
        x, t = (self._normed(r, self.mlp_norm) for r in (residual, h + student))
        return residual, x, t


class IPTTTBlock(_Block):
    """h + attention(norm h), then + MLP(x, targets): targets are x, the normed input of the MLP, or
    the raw token embeddings."""

    def __init__(self, config: IPTTTBlockConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.mlp.mlp)
        self.mixer = Attention(config.mixer, rngs=rngs)
        self.mlp = IPTTTMLP(config.mlp, rngs=rngs)

    def forward(self, h, positions=None, segment_ids=None, embeddings=None):
        """(output, what the memory holds at the end of the row). Raises `ValueError` when the
        block stores embeddings and gets none."""
        h, x = self._mixed(h, positions, segment_ids)
        y, stats = self.mlp.forward(x, self._targets(x, embeddings), segment_ids)
        return h + y, stats

    def start(self, batch_size, max_length):
        """What `extend` finds in front of rows."""
        return BlockState(self.mixer.start(batch_size, max_length), self.mlp.start(batch_size))

    def extend(self, h, piece, state, embeddings):
        """(output, the state behind the piece)."""
        mixed, mixer = self.mixer.extend(self._normed(h, self.mixer_norm), piece, state.mixer)
        h = h + mixed
        x = self._normed(h, self.mlp_norm)
        y, memory = self.mlp.extend(x, self._targets(x, embeddings), piece, state.memory)
        return h + y, BlockState(mixer, memory)

    def _targets(self, x, embeddings):
        targets = x if self.mlp.memory.target == "hidden" else embeddings
        if targets is None:
            raise ValueError("this block stores token embeddings: pass embeddings=[B, T, D]")
        return targets

    def keys(self, h, positions=None, segment_ids=None) -> Float[Array, "B C L F"]:
        """What the chunks write under."""
        return self.mlp.keys(self._mixed(h, positions, segment_ids)[1], segment_ids)

    def _mixed(self, h, positions, segment_ids):
        """(residual, x) in front of the MLP."""
        positions = row_positions(h) if positions is None else positions
        h = h + self.mixer(self._normed(h, self.mixer_norm), positions, segment_ids)
        return h, self._normed(h, self.mlp_norm)


class HybridBlock(_Block):
    """h + attention(norm h), + delta rule(norm of that), + SwiGLU(norm of that)."""

    def __init__(self, config: HybridBlockConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.mlp)
        self.mixer = Attention(config.mixer, rngs=rngs)
        self.delta_norm = _norm(config.mlp)
        self.delta = DeltaSublayer(config.delta, rngs=rngs)
        self.mlp = SwiGLU(config.mlp, rngs=rngs)

    def forward(self, h, positions=None, segment_ids=None, embeddings=None):
        """(output, None)."""
        positions = row_positions(h) if positions is None else positions
        h = h + self.mixer(self._normed(h, self.mixer_norm), positions, segment_ids)
        h = h + self.delta(self._normed(h, self.delta_norm), positions, segment_ids)
        return h + self.mlp(self._normed(h, self.mlp_norm)), None

    def start(self, batch_size, max_length):
        """What `extend` finds in front of rows."""
        return BlockState(self.mixer.start(batch_size, max_length), self.delta.start(batch_size))

    def extend(self, h, piece, state, embeddings):
        """(output, the state behind the piece)."""
        mixed, mixer = self.mixer.extend(self._normed(h, self.mixer_norm), piece, state.mixer)
        h = h + mixed
        mixed, delta = self.delta.extend(self._normed(h, self.delta_norm), piece, state.memory)
        h = h + mixed
        return h + self.mlp(self._normed(h, self.mlp_norm)), BlockState(mixer, delta)


type BlockConfig = PlainBlockConfig | IPTTCDBlockConfig | IPTTTBlockConfig | HybridBlockConfig
type Block = PlainBlock | IPTTCDBlock | IPTTTBlock | HybridBlock

_BLOCKS = {
    PlainBlockConfig: PlainBlock,
    IPTTCDBlockConfig: IPTTCDBlock,
    IPTTTBlockConfig: IPTTTBlock,
    HybridBlockConfig: HybridBlock,
}


def build_block(config: BlockConfig, *, rngs: nnx.Rngs) -> Block:
    return _BLOCKS[type(config)](config, rngs=rngs)
