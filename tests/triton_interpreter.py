"""Triton kernels on a CPU, numerically: Triton's interpreter in a JAX callback.

With TRITON_INTERPRET=1 in the environment *before* triton is imported kernels run on NumPy arrays,
one program after another. That process can neither compile nor launch them.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from ttcd_kernels import launch as kernel_launch

from experiments.studies.kernels import programs

module: Any = interpreter

_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32"}

# The interpreter keeps the running program's position in the grid in a global; devices are threads.
_ONE_AT_A_TIME = threading.Lock()


def launch(
    kernel: Any,
    *args: Any,
    out_shape: Any,
    grid: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> Any:
    """As `launch.launch`. Results start as NaN, so that one that no program writes shows."""

    def run(*operands: Any) -> list[np.ndarray]:
        results = [np.full(x.shape, np.nan, x.dtype) for x in out_shape]
        given = [_host_tensor(np.array(x)) if np.ndim(x) else x.item() for x in operands]
        with _ONE_AT_A_TIME:
            kernel[grid](*given, *map(_host_tensor, results), **constants)
        return results

    return jax.pure_callback(run, list(out_shape), *args, vmap_method="sequential")


def _host_tensor(array: np.ndarray) -> types.SimpleNamespace:
    """A tensor's interface that the interpreter needs, on an array: its copy is the original."""
    tensor = types.SimpleNamespace(
        dtype=_TYPES[array.dtype.name],
        data_ptr=lambda: array.ctypes.data,
        size=lambda: array.shape,
        stride=lambda: array.strides,
        storage_offset=lambda: 0,
        set_=lambda *_: None,
        copy_=lambda *_: None,
    )
    tensor.cpu = tensor.untyped_storage = lambda: tensor
    tensor.new_empty = lambda *_, **__: _host_tensor(array)
    return tensor


def install() -> None:
    """Every launch of this process runs here, with three errors of the interpreter of triton 3.6
    fixed: it multiplies bfloat16 as the integers that hold them and rounds to it towards zero, and
    since NumPy 2.4 an array of one element is no loop bound."""
    kernel_launch.launch = launch
    create_dot, patch_tensor = module.InterpreterBuilder.create_dot, module._patch_lang_tensor
    convert = module._convert_float

    def converted(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (x.astype(np.uint32) << 16).view(np.float32)
        if (source, target) == (tl.float32, tl.bfloat16):
            return x.astype(jnp.bfloat16).view(np.uint16)
        return convert(x, source, target, rounding)

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

    module.InterpreterBuilder.create_dot, module._convert_float = dot, converted
    module._patch_lang_tensor = patched
    _patch_the_language_once()


def _patch_the_language_once() -> None:
    """Triton's interpreter puts itself into its language before every call of a device function and
    takes itself out after a launch. Here it may stay: once for each module of kernels is enough."""
    patch, patched = module._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return module._LangPatchScope()

    module._patch_lang = patch_once
    tl.block_type.to_ir = lambda self, _: self  # an equal one would be built at every operation
    # Every call would build a table of all types.
    plain, by_element = module._get_np_dtype, functools.cache(module._get_np_dtype)
    module._get_np_dtype = lambda dtype: (
        plain(dtype) if dtype.scalar.is_ptr() else by_element(dtype.scalar)
    )


def note(op: Any, case: Any, tile: Any = None, change: Callable[..., Any] = lambda run: run) -> str:
    """Of the row of `check` of a case, which runs here once, operation by operation: "" if it
    passes. A tile instead of the table's; `change` makes another function of the call."""
    patched = [(programs, {"ready": _once, "operands": _drawn})]
    if tile is not None:
        tuning = op.tuning.Tuning(*[tile] * len(op.tuning.Tuning._fields))
        patched.append((op.triton_call, {"tuning_for": lambda *_: tuning}))
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernel_launch.compiling_for(90))
        run = change(op.implementations(case)["triton"])
        patched.append((op, {"implementations": lambda _: {"triton": run}}))
        for where, what in patched:
            stack.enter_context(mock.patch.multiple(where, **what))
        (row,) = programs.compare(op, case)
    return row["note"]


def _once(functions: Any, shapes: Any) -> tuple[Any, Any]:
    """As `programs.ready`; nothing is compiled as a whole, and the second run is the first."""
    arrays = _drawn(shapes)
    calls = {x: functools.cache(functools.partial(run, *arrays)) for x, run in functions.items()}
    return dict.fromkeys(functions, (0, "")), calls


def _drawn(shapes: Any) -> list[jax.Array]:
    """As `programs.operands`, compiled for no shape."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in shapes]
