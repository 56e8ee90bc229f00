"""Names of the kernels that a program launches on a GPU, without compiling one."""

import contextlib
import importlib
import re
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from ttcd_kernels import launch, verified


def launched_kernels(function: Callable[..., Any], *operands: Any, capability: int) -> list[str]:
    """In order, of `function` lowered for a GPU of this capability; kernels are only parsed."""
    checked = mock.patch.object(verified, "VERIFIED", {capability})
    with launch.compiling_for(capability), _without_gpu(), checked:
        traced = jax.jit(function).trace(*operands)
        module: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    return _launched(module.operation)


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """jax-triton lowers launches without JAX's CUDA plugin; each is serialized as its kernel's
    name."""
    plugin: Any = importlib.import_module("jaxlib.gpu_triton")
    for name in ("get_compute_capability", "get_serialized_metadata"):
        if not hasattr(plugin, name):  # jax-triton looks for them when it is imported
            setattr(plugin, name, None)
    from jax_triton import triton_lib as library

    def name_only(ttir: Any, *_: Any) -> Any:
        (name,) = re.findall(r"tt\.func public @(\w+)", str(ttir))
        return library.CompilationResult("", name, 0, None, None)

    plugin = types.SimpleNamespace(
        TritonKernel=lambda name, *_: name,
        TritonKernelCall=lambda name, *_: types.SimpleNamespace(to_proto=lambda *_: name.encode()),
        create_array_parameter=lambda *_: None,
        create_scalar_parameter=lambda *_: None,
    )
    replaced = {"compile_ttir_inplace": name_only, "triton_kernel_call_lib": plugin}
    library._COMPILED_KERNEL_CACHE.clear()
    with mock.patch.multiple(library, **replaced):
        yield
    library._COMPILED_KERNEL_CACHE.clear()


def _launched(operation: Any) -> list[str]:
    names = []
    for block in (block for region in operation.regions for block in region):
        for inner in (inner.operation for inner in block):
            attributes = inner.attributes
            if "call_target_name" in attributes and "triton" in str(attributes["call_target_name"]):
                names.append(zlib.decompress(attributes["backend_config"].value_bytes).decode())
            names += _launched(inner)
    return names
