"""Gradients for forwards that have none of their own: the fused backward of this machine."""

from ttcd_kernels.dual_window import triton_call, xla
from ttcd_kernels.dual_window.cotangents import QKV, Residuals
from ttcd_kernels.windows import Results, Windows


def gradients(windows: Windows, saved: Residuals, cotangents: Results) -> QKV:
    """dq, dk, dv from the cotangents of the four results, whoever computed the results."""
    runs_triton = triton_call.unsupported(saved.q, saved.k, saved.v) is None
    backward = triton_call.gradients if runs_triton else xla.gradients
    return backward(windows, saved, cotangents)
