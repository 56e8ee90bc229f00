"""Names of the kernels that a program launches on a GPU, without compiling one."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from ttcd_kernels import aot


def launched_kernels(function: Callable[..., Any], *operands: Any, capability: int) -> list[str]:
    """In order, of `function` lowered for a GPU of this capability; kernels are only parsed."""
    library = aot.jax_triton_library()

    def name_only(ttir: Any, *_: Any) -> Any:
        (name,) = re.findall(r"tt\.func public @(\w+)", str(ttir))
        return library.CompilationResult("", name, 0, None, None)

    with mock.patch.object(library, "compile_ttir_inplace", name_only):
        return aot.lower(function, operands, capability)[1]
