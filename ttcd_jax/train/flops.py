"""FLOPs of a model, computed from shapes because XLA counts the body of a scan only once.

A matrix product of [m, k] and [k, n] counts 2 m k n (`SublayerConfig.flops` of every layer).
Training counts three times the forward pass: recomputation is not counted.
"""

from ttcd_jax.models.config import TransformerConfig, block_configs


def forward_flops(config: TransformerConfig, length: int) -> int | float:
    """FLOPs of one forward pass over a row of `length` tokens, head included."""
    blocks = sum(block.flops(length) for block in block_configs(config))
    return blocks + 2 * length * config.dim * config.vocab_size


def training_flops_per_token(config: TransformerConfig, length: int) -> int | float:
    """FLOPs of the forward and the backward pass per token, for rows of `length` tokens."""
    return 3 * forward_flops(config, length) / length
