"""FLOPs of a model by its shapes. XLA's own count takes the body of a scan once, so it cannot
serve.

A matrix product of [m, k] and [k, n] counts 2 m k n; everything else is left out. Training counts
three times the forward pass (recomputation is overhead, not work).
"""

from ttcd_jax.models.block import BlockConfig, IPTTCDBlockConfig
from ttcd_jax.models.catalog import TransformerConfig, block_configs

# Dense bfloat16 peak in FLOP/s by a part of the device's name, from the vendors' data sheets.
_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


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
    if isinstance(block, IPTTCDBlockConfig):
        attention, mlp = block.mixer.attention, block.mlp.mlp
    else:
        attention, mlp = block.mixer, block.mlp
    heads, narrow = attention.num_heads, attention.num_kv_heads
    wide = heads * attention.head_dim
    projections = 2 * length * attention.dim * (wide + 2 * narrow * attention.head_dim + wide)
    scores = 4 * visible_pairs(length, attention.window) * wide  # q k^T and the weighted values
    unit = 2 * length * mlp.dim * mlp.hidden_dim
    total = projections + scores + 3 * unit
    if not isinstance(block, IPTTCDBlockConfig):
        return total
    total += 2 * length * wide * attention.dim  # the student's output projection
    # Student gate and up, error, delta_w and the read of the memory beside the read of W_base.
    total += 5 * unit
    if block.mlp.memory.has_proj:
        total += 2 * length * mlp.dim**2
    return total


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a known accelerator, else None."""
    return next((peak for name, peak in _PEAK.items() if name in device_kind), None)
