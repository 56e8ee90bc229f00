"""Kernels of ttcd_jax, a leaf library on jax and numpy that imports no layer and no model.

A folder per attention: `api` (the call and its contract), `xla`, `triton_call` and
`triton_kernels` (implementations), `tuning`; `lse` is attention out of two stock calls. The
convolutions are `short_conv`, by Triton `short_conv_call` and `short_conv_kernels`. Shared:
`dispatch`, `launch`, `columns`, `partitioning`, `windows`, `normalize`, `verified`, and for
benchmarks `measure`, `table`. They are checked, timed and tuned by experiments/studies/kernels.
"""

from pathlib import Path

from ttcd_kernels.decode.api import decode_attention, decode_attention_with_lse
from ttcd_kernels.dual_window.api import (
    dual_window_attention,
    dual_window_attention_with_lse,
    window_attention,
)
from ttcd_kernels.short_conv import short_conv_residual

__all__ = [
    "decode_attention",
    "decode_attention_with_lse",
    "dual_window_attention",
    "dual_window_attention_with_lse",
    "short_conv_residual",
    "window_attention",
]

# In a checkout `python -m ttcd_kernels.check` is that of experiments/studies/kernels.
__path__.append(str(Path(__file__).parents[2] / "experiments/studies/kernels"))
