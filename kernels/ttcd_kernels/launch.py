"""Launches of Triton kernels from JAX, and the checks that this machine can run them."""

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import Array, Shaped

Operand = Shaped[Array | jax.ShapeDtypeStruct, "B ..."]
_OLDEST_GPU = 80
DTYPES = ("bfloat16", "float16", "float32")
LOG2E = 1.4426950408889634
_CAPABILITY: ContextVar[int] = ContextVar("capability")


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Kernels traced and lowered inside are compiled for this GPU (90: Hopper), present or not."""
    token = _CAPABILITY.set(capability)
    try:
        yield
    finally:
        _CAPABILITY.reset(token)


def capability(*arrays: Any) -> int | None:
    """The compute capability of the NVIDIA GPU that kernels are compiled for, e.g. 90; None without
    one (AMD's GPUs have none). The GPU is where the arrays are, of traced ones the default device
    (`jax.default_device`)."""
    chosen = _CAPABILITY.get(None)
    if chosen is not None:
        return chosen
    name = str(getattr(_device(arrays), "compute_capability", ""))
    version = re.fullmatch(r"(\d+)\.(\d+)", name)
    return int(version[1] + version[2]) if version else None


def _device(arrays: Iterable[Any]) -> Any:
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            return next(iter(array.devices()))
    default = jax.config.jax_default_device
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def known_capability(*arrays: Any) -> int:
    """The compute capability of the GPU that `unavailable` found."""
    gpu = capability(*arrays)
    assert gpu is not None
    return gpu


def unavailable(*arrays: Any) -> str | None:
    """The reason why no Triton kernel can run where the arrays are; None if one can."""
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install 'ttcd-kernels[gpu]')"
    gpu = capability(*arrays)
    if gpu is None:
        return f"there is no NVIDIA GPU: the device is {_device(arrays).device_kind}"
    if gpu < _OLDEST_GPU:
        return f"the GPU has compute capability {gpu}, less than {_OLDEST_GPU}"
    return None


def unsupported(
    dtypes: Sequence[str], head_dims: Iterable[int] | None, **arrays: Operand
) -> str | None:
    """The reason why no kernel can take these arrays (by name) on this machine: the first's head
    dimension (None: any will do), dtypes that differ or are not in `dtypes`, no GPU. None if one
    can."""
    head_dim = next(iter(arrays.values())).shape[-1]
    if head_dims is not None and head_dim not in head_dims:
        return f"head dim {head_dim} is not one of {', '.join(map(str, head_dims))}"
    found = [x.dtype.name for x in arrays.values()]
    if len(set(found)) != 1 or found[0] not in dtypes:
        names, got, known = map(", ".join, (arrays, found, dtypes))
        return f"{names} are {got}: they must be of one dtype out of {known}"
    return unavailable(*arrays.values())


def launch(
    kernel: Any,
    *args: Any,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> list[Shaped[Array, "..."]]:
    """Results of `kernel(*args, *results, **constants)` on `grid`. A float argument is np.float32:
    a Python float would be 64 bit in the kernel. Raises `TypeError` for arguments that do not match
    the kernel's parameters."""
    try:
        kernel.signature.bind(*args, *out_shape, **constants)
    except TypeError as error:  # jax-triton would name neither
        raise TypeError(f"{kernel.__name__}: {error}") from None
    import jax_triton

    options: dict[str, Any] = {"kernel": kernel, "name": kernel.__name__, "grid": grid}
    options |= {"num_warps": num_warps, "num_stages": num_stages, "out_shape": [*out_shape]}
    gpu = _CAPABILITY.get(None)
    return jax_triton.triton_call(*args, compute_capability=gpu, **options, **constants)
