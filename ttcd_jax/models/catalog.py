"""The list of methods: which block each layer of a transformer is. Nothing else knows a method by
name."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ttcd_kernels.dual_window.api import Implementation

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.methods.delta_net import DeltaNetConfig, DeltaRuleConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNetConfig
from ttcd_jax.methods.ideal import IdealConfig, IdealMemoryConfig
from ttcd_jax.methods.ip_ttt import IPTTTConfig, TargetMemoryConfig
from ttcd_jax.methods.ipttcd import IPTTCDConfig, MemoryConfig
from ttcd_jax.methods.lact import LaCTConfig, LaCTMemoryConfig
from ttcd_jax.models.block import (
    BlockConfig,
    HybridBlockConfig,
    IPTTCDBlockConfig,
    IPTTTBlockConfig,
    PlainBlockConfig,
)
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.nn.dual_window import DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.rope import RopeConfig
from ttcd_jax.precision import Precision

Remat = Literal["none", "block", "dots", "offload"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """A language model: embedding, blocks by method, final norm, head.

    `window` is the attention window of every layer that has attention (the teacher's on fast
    layers), `None` full attention. `fast_layers` are the layers in which ipttcd, ipttcd_ideal,
    ipttt and deltanet_hybrid differ from a plain transformer. A method reads the switches that
    belong to it and no others: `student_window` and `memory` ipttcd, `ideal_memory` ipttcd_ideal
    (with `student_window`), `target_memory` ipttt, `delta` the three with a delta rule, `lact`
    LaCT. `num_kv_heads=None` stands for `num_heads`, `head_dim=None` for dim / num_heads. `remat`:
    what the backward recomputes: nothing, whole blocks, or all but matrix products.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    method: Literal[
        "full",
        "swa",
        "ipttcd",
        "ipttcd_ideal",
        "ipttt",
        "deltanet",
        "gated_deltanet",
        "deltanet_hybrid",
        "lact",
    ] = "ipttcd"
    window: int | None = None
    student_window: int = 1024
    fast_layers: tuple[int, ...] = ()
    memory: MemoryConfig = MemoryConfig()
    ideal_memory: IdealMemoryConfig = IdealMemoryConfig()
    target_memory: TargetMemoryConfig = TargetMemoryConfig()
    delta: DeltaRuleConfig = DeltaRuleConfig()
    lact: LaCTMemoryConfig = LaCTMemoryConfig()
    rope: RopeConfig = RopeConfig()
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    qk_norm_eps: float = 1e-6
    norm_eps: float = 1e-6
    has_tied_head: bool = True
    init_std: float = 0.02
    attention_implementation: Implementation = "auto"
    remat: Remat = "none"
    scans_layers: bool = True  # False: unrolled, for debugging; same parameters
    precision: Precision = Precision()

    def validate(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"TransformerConfig.{name} {getattr(self, name)} must be at least 1"
                )
        if self.head_dim is None and self.dim % self.num_heads:
            raise UserError(
                f"num_heads {self.num_heads} does not divide dim {self.dim}; set head_dim"
            )
        outside = [layer for layer in self.fast_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise UserError(f"fast_layers {outside} outside 0 .. {self.num_layers - 1}")
        if len(set(self.fast_layers)) != len(self.fast_layers):
            raise UserError(f"fast_layers {self.fast_layers} names a layer twice")
        if self.method == "full" and self.window is not None:
            raise UserError(f"method 'full' has no window, got {self.window}; use method 'swa'")
        if self.method == "swa" and self.window is None:
            raise UserError("method 'swa' needs a window; for full attention use method 'full'")
        block_configs(self)


def block_configs(config: TransformerConfig) -> tuple[BlockConfig, ...]:
    """One block configuration per layer."""
    block = METHODS[config.method].block
    return tuple(block(config, layer) for layer in range(config.num_layers))


def memory_chunk(config: TransformerConfig) -> int | None:
    """Tokens per chunk of the model's memories, all alike; None where nothing is written chunk by
    chunk."""
    for block in block_configs(config):
        if isinstance(block, IPTTCDBlockConfig | IPTTTBlockConfig):
            return block.mlp.memory.chunk_size
        if isinstance(block.mixer, LaCTConfig):
            return block.mixer.memory.chunk_size
    return None


def has_in_place_memory(config: TransformerConfig) -> bool:
    """Whether some layer writes into its own down projection."""
    blocks = block_configs(config)
    return any(isinstance(block, IPTTCDBlockConfig | IPTTTBlockConfig) for block in blocks)


def without_memory(config: TransformerConfig) -> dict[str, Any] | None:
    """Changes to the configuration that switch its fast weights off (eta = 0) and leave the
    parameters as they are; None for a method whose memory has no rate."""
    field = METHODS[config.method].memory_field
    if field is None:
        return None
    return {field: getattr(config, field).replace(eta=0.0)}


def _attention(config: TransformerConfig) -> AttentionConfig:
    return AttentionConfig(
        dim=config.dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads if config.num_kv_heads is None else config.num_kv_heads,
        head_dim=config.dim // config.num_heads if config.head_dim is None else config.head_dim,
        window=config.window,
        rope=config.rope,
        has_qk_norm=config.has_qk_norm,
        has_qkv_bias=config.has_qkv_bias,
        qk_norm_eps=config.qk_norm_eps,
        init_std=config.init_std,
        implementation=config.attention_implementation,
        precision=config.precision,
    )


def _mlp(config: TransformerConfig) -> MLPConfig:
    return MLPConfig(
        dim=config.dim,
        hidden_dim=config.mlp_dim,
        init_std=config.init_std,
        precision=config.precision,
    )


def _delta(config: TransformerConfig, cls: type[DeltaNetConfig] = DeltaNetConfig) -> DeltaNetConfig:
    return cls(
        dim=config.dim,
        num_heads=config.num_heads,
        head_dim=config.dim // config.num_heads if config.head_dim is None else config.head_dim,
        rule=config.delta,
        norm_eps=config.norm_eps,
        init_std=config.init_std,
        precision=config.precision,
    )


def _plain(config: TransformerConfig, layer: int) -> BlockConfig:
    return PlainBlockConfig(mixer=_attention(config), mlp=_mlp(config), norm_eps=config.norm_eps)


def _dual_window(config: TransformerConfig, mlp: IPTTCDConfig | IdealConfig) -> BlockConfig:
    mixer = DualWindowConfig(attention=_attention(config), student_window=config.student_window)
    return IPTTCDBlockConfig(mixer=mixer, mlp=mlp, norm_eps=config.norm_eps)


def _ipttcd(config: TransformerConfig, layer: int) -> BlockConfig:
    if layer not in config.fast_layers:
        return _plain(config, layer)
    return _dual_window(config, IPTTCDConfig(mlp=_mlp(config), memory=config.memory))


def _ipttcd_ideal(config: TransformerConfig, layer: int) -> BlockConfig:
    if layer not in config.fast_layers:
        return _plain(config, layer)
    return _dual_window(config, IdealConfig(mlp=_mlp(config), memory=config.ideal_memory))


def _ipttt(config: TransformerConfig, layer: int) -> BlockConfig:
    if layer not in config.fast_layers:
        return _plain(config, layer)
    mlp = IPTTTConfig(mlp=_mlp(config), memory=config.target_memory)
    return IPTTTBlockConfig(mixer=_attention(config), mlp=mlp, norm_eps=config.norm_eps)


def _deltanet(config: TransformerConfig, layer: int) -> BlockConfig:
    return PlainBlockConfig(mixer=_delta(config), mlp=_mlp(config), norm_eps=config.norm_eps)


def _gated_deltanet(config: TransformerConfig, layer: int) -> BlockConfig:
    mixer = _delta(config, GatedDeltaNetConfig)
    return PlainBlockConfig(mixer=mixer, mlp=_mlp(config), norm_eps=config.norm_eps)


def _deltanet_hybrid(config: TransformerConfig, layer: int) -> BlockConfig:
    if layer not in config.fast_layers:
        return _plain(config, layer)
    return HybridBlockConfig(
        mixer=_attention(config),
        delta=_delta(config),
        mlp=_mlp(config),
        norm_eps=config.norm_eps,
    )


def _lact(config: TransformerConfig, layer: int) -> BlockConfig:
    mixer = LaCTConfig(attention=_attention(config), memory=config.lact)
    return PlainBlockConfig(mixer=mixer, mlp=_mlp(config), norm_eps=config.norm_eps)


class Method(NamedTuple):
    """A method's name in tables, its block in layer i, and the field of `TransformerConfig` whose
    `eta` is the rate of its memory."""

    label: str
    block: Callable[[TransformerConfig, int], BlockConfig]
    memory_field: str | None = None


METHODS: dict[str, Method] = {
    "full": Method("full attention", _plain),
    "swa": Method("SWA", _plain),
    "ipttcd": Method("IP-TTCD", _ipttcd, "memory"),
    "ipttcd_ideal": Method("ideal IP-TTCD", _ipttcd_ideal, "ideal_memory"),
    "ipttt": Method("IP-TTT", _ipttt, "target_memory"),
    "deltanet": Method("DeltaNet", _deltanet),
    "gated_deltanet": Method("Gated DeltaNet", _gated_deltanet),
    "deltanet_hybrid": Method("SWA + DeltaNet", _deltanet_hybrid),
    "lact": Method("LaCT", _lact),
}
