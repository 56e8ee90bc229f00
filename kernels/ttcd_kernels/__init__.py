"""Attention kernels of ttcd_jax as a leaf library: needs jax and numpy, knows no layer and no
model."""

from ttcd_kernels.dual_window.api import (
    dual_window_attention,
    dual_window_attention_with_lse,
    window_attention,
)

__all__ = ["dual_window_attention", "dual_window_attention_with_lse", "window_attention"]
