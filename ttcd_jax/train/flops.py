"""FLOPs of a model by its shapes. XLA's own count takes the body of a scan once, so it cannot
serve.

A matrix product of [m, k] and [k, n] counts 2 m k n; everything else is left out, and so are
products with a column or two per head (rates, gates). Training counts three times the forward pass
(recomputation is overhead, not work).
"""

from ttcd_jax.methods.delta_net import DeltaNetConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNetConfig
from ttcd_jax.methods.ideal import IdealConfig
from ttcd_jax.methods.ip_ttt import IPTTTConfig
from ttcd_jax.methods.ipttcd import IPTTCDConfig
from ttcd_jax.methods.lact import LaCTConfig
from ttcd_jax.models.block import BlockConfig, HybridBlockConfig
from ttcd_jax.models.catalog import TransformerConfig, block_configs
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.nn.dual_window import DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.train.hardware import data_sheet


def forward_flops(config: TransformerConfig, length: int) -> float:
    """FLOPs of one forward pass over a row of `length` tokens, head included."""
    blocks = sum(_block_flops(block, length) for block in block_configs(config))
    return blocks + 2 * length * config.dim * config.vocab_size


def training_flops_per_token(config: TransformerConfig, length: int) -> float:
    """Forward and backward, per token of a row of `length`."""
    return 3 * forward_flops(config, length) / length


def visible_pairs(length: int, window: int | None) -> int:
    """(query, key) pairs a causal window shows in a row of `length`."""
    window = length if window is None else min(window, length)
    return window * (window + 1) // 2 + (length - window) * window


def _block_flops(block: BlockConfig, length: int) -> float:
    total = _mixer_flops(block.mixer, length) + _mlp_flops(block.mlp, length)
    if isinstance(block, HybridBlockConfig):
        total += _delta_flops(block.delta, length)
    return total


def _mixer_flops(
    mixer: AttentionConfig | DualWindowConfig | DeltaNetConfig | LaCTConfig, length: int
) -> float:
    match mixer:
        case DualWindowConfig():
            # One more output projection: the student's scores are among the teacher's.
            student = 2 * length * mixer.attention.dim * _width(mixer.attention)
            return _attention_flops(mixer.attention, length) + student
        case DeltaNetConfig():
            return _delta_flops(mixer, length)
        case LaCTConfig():
            return _lact_flops(mixer, length)
        case AttentionConfig():
            return _attention_flops(mixer, length)


def _width(attention: AttentionConfig) -> int:
    return attention.num_heads * attention.head_dim


def _attention_flops(attention: AttentionConfig, length: int) -> float:
    wide, narrow = _width(attention), attention.num_kv_heads * attention.head_dim
    projections = 2 * length * attention.dim * (2 * wide + 2 * narrow)
    return projections + _score_flops(attention, length)


def _score_flops(attention: AttentionConfig, length: int) -> float:
    """q k^T and the weighted values."""
    return 4 * visible_pairs(length, attention.window) * _width(attention)


def _delta_flops(delta: DeltaNetConfig, length: int) -> float:
    N, H, X = delta.num_heads, delta.head_dim, delta.value_head_dim
    chunk = min(delta.rule.chunk_size, length)
    projections = 2 * length * delta.dim * N * (2 * H + 2 * X)
    # Overlaps k k^T and q k^T, the solved system, scores times u; then the inverse by doubling.
    inside = 2 * length * N * chunk * (2 * H + (H + X) + X)
    padded = 1 << (chunk - 1).bit_length()
    inside += length / chunk * N * 2 * padded * (padded**2 - 1) / 3
    state = 3 * 2 * length * N * H * X  # two reads, one write
    if isinstance(delta, GatedDeltaNetConfig):
        projections += 2 * length * delta.dim * N * X
        inside += 2 * length * N * chunk**2  # sums of log decays as a product with ones
    return projections + inside + state


def _lact_flops(lact: LaCTConfig, length: int) -> float:
    attention, unit = lact.attention, 2 * lact.attention.dim * lact.fast_hidden
    projections = 2 * length * attention.dim * 4 * _width(attention)
    written = length - 1 - (length - 1) % lact.memory.chunk_size  # the last chunk writes nothing
    return projections + _score_flops(attention, length) + unit * (3 * length + 6 * written)


def _mlp_flops(mlp: MLPConfig | IPTTCDConfig | IdealConfig | IPTTTConfig, length: int) -> float:
    if isinstance(mlp, MLPConfig):
        return 3 * 2 * length * mlp.dim * mlp.hidden_dim
    unit = 2 * length * mlp.mlp.dim * mlp.mlp.hidden_dim
    proj = 2 * length * mlp.mlp.dim**2
    match mlp:
        case IPTTCDConfig():
            # Student gate and up, error, delta_w, the read of the memory beside that of W_base.
            return (3 + 5) * unit + mlp.memory.has_proj * proj
        case IdealConfig():
            # Student gate and up, both sides of the error, delta_w; W is read instead of W_base.
            return (3 + 5) * unit
        case IPTTTConfig():
            return (3 + 2) * unit + mlp.memory.has_proj * proj  # delta_w, the read of the memory


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a known accelerator, else None."""
    device = data_sheet(device_kind)
    return None if device is None else device.peak_flops
