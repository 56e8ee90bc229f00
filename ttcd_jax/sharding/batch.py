"""Batches on a mesh: the rows that a process makes, and the global array of all processes."""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ttcd_jax.sharding.rules import shardings


class Placement:
    """Fields [batch_size, length] of a batch, sharded along rows and positions of `mesh`. Raises
    `UserError` when rows or positions do not divide among the devices."""

    def __init__(self, mesh: Mesh | AbstractMesh, *, batch_size: int, length: int) -> None:
        self._shape = (batch_size, length)
        fields = {"fields [batch_size, seq_len]": jax.ShapeDtypeStruct(self._shape, np.int32)}
        axes = dict.fromkeys(fields, ("batch", "length"))
        (self._sharding,) = shardings(mesh, axes, fields).values()

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows with a part on this process's devices, which it supplies, in ascending order."""
        shards = self._sharding.addressable_devices_indices_map(self._shape).values()
        indices = (range(self._shape[0])[index[0]] for index in shards if index is not None)
        return tuple(sorted({row for rows in indices for row in rows}))

    def abstract(self, kinds: Mapping[str, str]) -> dict[str, jax.ShapeDtypeStruct]:
        shape, where = self._shape, self._sharding
        return {x: jax.ShapeDtypeStruct(shape, kinds[x], sharding=where) for x in kinds}

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The global arrays of a batch whose fields hold this process's `rows`."""

        def array(field: np.ndarray) -> jax.Array:
            whole = np.empty(self._shape, field.dtype)  # other rows are those of no device here
            whole[list(self.rows)] = field
            return jax.make_array_from_callback(self._shape, self._sharding, whole.__getitem__)

        return {name: array(field) for name, field in batch.items()}


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
