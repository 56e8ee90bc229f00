"""Transformers without a memory: full attention, and sliding-window attention (SWA)."""

from typing import Any

from ttcd_jax.errors import UserError
from ttcd_jax.methods.registry import (
    ATTENTION_FIXED,
    ATTENTION_KEYS,
    Method,
    ModelConfig,
    Reference,
    Source,
    register,
)
from ttcd_jax.nn.block import BlockConfig


def _full(config: ModelConfig, settings: None) -> BlockConfig:
    if config.window is not None:
        raise UserError(f"method 'full' has no window, got {config.window}; use method 'swa'")
    return config.plain_block()


def _swa(config: ModelConfig, settings: None) -> BlockConfig:
    if config.window is None:
        raise UserError("method 'swa' needs a window; for full attention use method 'full'")
    return config.plain_block()


def _read(source: Source) -> dict[str, Any]:
    return {"method": "full" if source.values.get("window_size") is None else "swa"}


_REFERENCE = Reference(
    ("transformer",), ATTENTION_KEYS, ATTENTION_FIXED | {"rope_scaling": None}, _read
)
FULL = register(Method("full", "full attention", _full, "none", reference=_REFERENCE, twin="swa"))
SWA = register(Method("swa", "SWA", _swa, "none", reference=_REFERENCE, twin="full"))
