"""Processes with fake devices, kernels in Triton's interpreter, and the names of the kernels that a
program launches on a GPU. As a program: what a function of a test file returns, pickled."""

import base64
import contextlib
import importlib
import inspect
import json
import os
import pickle
import re
import runpy
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import commands
import jax
from ttcd_kernels import launch, verified


def fake_devices(count: int) -> str:
    """XLA_FLAGS of a process that has `count` devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def environment(count: int = 1, **variables: str) -> dict[str, str]:
    """The environment of a process with `count` devices that imports the modules of the tests."""
    # The root as well: tests/experiments must not hide the commands.
    folder = Path(__file__).parent
    paths = [str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    own = {"XLA_FLAGS": fake_devices(count), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return commands.cpu_environment(**own | variables)


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def printed(script: str, *arguments: str, count: int = 4, **variables: str) -> str:
    """Standard output of a test file run as a program with `count` devices."""
    return commands.output(Path(script), *arguments, env=environment(count, **variables))


def elsewhere(
    function: Callable[..., Any],
    *arguments: Any,
    count: int = 8,
    is_wide: bool = False,
    **variables: str,
) -> Any:
    """What a function of a test file returns, for JSON's arguments, in a process of its own with
    `count` devices, which has float64 if it `is_wide`."""
    call = json.dumps([inspect.getfile(function), function.__name__, is_wide, arguments])
    last = printed(__file__, call, count=count, **variables).splitlines()[-1]
    return pickle.loads(base64.b64decode(last))


def launched_kernels(function: Callable[..., Any], *operands: Any, capability: int) -> list[str]:
    """In order, of `function` lowered for a GPU of this capability; kernels are only parsed."""
    checked = mock.patch.object(verified, "VERIFIED", {capability})
    with launch.compiling_for(capability), _without_gpu(), checked:
        traced = jax.jit(function).trace(*operands)
        module: Any = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    return _launched(module.operation)


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """jax-triton lowers launches without JAX's CUDA plugin; each becomes its kernel's name."""
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


if __name__ == "__main__":
    path, name, is_wide, arguments = json.loads(sys.argv[1])
    jax.config.update("jax_enable_x64", is_wide)
    print(base64.b64encode(pickle.dumps(runpy.run_path(path)[name](*arguments))).decode())
