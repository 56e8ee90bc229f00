"""Transformers without a memory: full attention, and sliding-window attention (SWA)."""

from typing import Any

from ttcd_jax.errors import UserError
from ttcd_jax.methods import registry
from ttcd_jax.nn.block import BlockConfig


def _full(config: registry.ModelConfig, settings: None) -> BlockConfig:
    if config.window is not None:
        raise UserError(f"method 'full' has no window, got {config.window}; use method 'swa'")
    return config.plain_block()


def _swa(config: registry.ModelConfig, settings: None) -> BlockConfig:
    if config.window is None:
        raise UserError("method 'swa' needs a window; for full attention use method 'full'")
    return config.plain_block()


def _read(source: registry.Source) -> dict[str, Any]:
    return {"method": "full" if source.values.get("window_size") is None else "swa"}


_REFERENCE = registry.Reference(
    ("transformer",),
    registry.ATTENTION_KEYS,
    registry.ATTENTION_FIXED | {"rope_scaling": None},
    _read,
)
registry.register(
    registry.Method("full", "full attention", _full, "none", reference=_REFERENCE, twin="swa")
)
registry.register(registry.Method("swa", "SWA", _swa, "none", reference=_REFERENCE, twin="full"))
