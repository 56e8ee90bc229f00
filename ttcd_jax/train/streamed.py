"""Checkpoints whose parameters are read while they are written, one at a time."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.type_handlers import NumpyHandler, create_type_handler_registry

from ttcd_jax.train.checkpoint import Checkpoints


class StreamedLeaf:
    """An array that `read` gives; its shape and dtype are known before."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], np.ndarray]
    ) -> None:
        self.shape, self.dtype, self.read = shape, dtype, read

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _StreamingHandler(NumpyHandler):
    """Writes every leaf as the array that it reads, before it reads the next."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
            for written in await super().serialize([value.read()], [info], arg and [arg]):
                written.result()
        return []


def _handler() -> ocp.PyTreeCheckpointHandler:
    registry = create_type_handler_registry((StreamedLeaf, _StreamingHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class StreamedCheckpoints(Checkpoints):
    """Writes states whose leaves are `StreamedLeaf`s, under their names on disk; `Checkpoints`
    reads them."""

    handler = _handler
    save_args = ocp.args.PyTreeSave
