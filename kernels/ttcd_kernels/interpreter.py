"""Triton kernels on a CPU, numerically: Triton's interpreter behind a JAX callback.

With TRITON_INTERPRET=1 in the environment *before* triton is imported, kernels run on NumPy arrays,
program after program: what the tests do. Such a process can neither compile nor launch them.
"""

import functools
import os
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np

_TYPES = {
    np.dtype(np.float32): "fp32",
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.int32): "i32",
}

# The interpreter keeps the running program's position in the grid in a global; devices are threads.
_ONE_AT_A_TIME = threading.Lock()


def is_on() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(
    kernel: Any, *args: Any, out_shape: Any, grid: tuple[int, int, int], **constants: Any
) -> Any:
    """As `launch.launch`. Results start as NaN: what no program writes shows."""
    is_array = [isinstance(arg, jax.Array) for arg in args]

    def run(*arrays: Any) -> list[np.ndarray]:
        given = iter(arrays)
        whole = [
            np.array(next(given)) if known else arg
            for known, arg in zip(is_array, args, strict=True)
        ]
        results = [np.full(x.shape, np.nan, x.dtype) for x in out_shape]
        _patch()
        operands = [_operand(x) for x in (*whole, *results)]
        with _ONE_AT_A_TIME:
            kernel[grid](*operands, **constants)
        return results

    arrays = [arg for known, arg in zip(is_array, args, strict=True) if known]
    return jax.pure_callback(run, list(out_shape), *arrays, vmap_method="sequential")


def _operand(x: Any) -> Any:
    if np.ndim(x):
        return _HostTensor(x)
    return float(x) if type(x) is np.float32 else x


class _HostTensor:
    """The part of a tensor's interface that the interpreter asks for, in place on an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, _TYPES[array.dtype]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_HostTensor":
        return self

    def cpu(self) -> "_HostTensor":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_HostTensor":
        return _HostTensor(self.array)

    def set_(self, *_: Any) -> None:
        """The copy is the original already."""

    def copy_(self, *_: Any) -> None:
        """Results were written in place."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


@functools.cache
def _patch() -> None:
    """Two things the interpreter of triton 3.6 gets wrong: it multiplies bfloat16 as the integers
    that hold them, and since NumPy 2.4 an array of one element is no loop bound."""
    import triton.language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    create_dot, patch_tensor = module.InterpreterBuilder.create_dot, module._patch_lang_tensor

    def widened(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return module.TensorHandle(wide, tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    module.InterpreterBuilder.create_dot = dot
    module._patch_lang_tensor = patched
