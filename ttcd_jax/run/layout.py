"""The layout of a step: how its batch is divided among devices, and into parts computed in turn.

A recipe fixes the batch; the fields of `RunConfig` that it leaves open follow from the devices:

    mesh                 fsdp: gcd(batch_size, number of devices); seq: the remaining factor
    accumulation_steps   the fewest parts of at most `PART_TOKENS` tokens per device, or of one row

The layout changes speed and device memory, not the losses: a run may resume on other devices.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh
from ttcd_jax.sharding.rules import BATCH

PART_TOKENS = 32_768


def mesh_config(config: RunConfig, num_devices: int) -> MeshConfig:
    """The mesh of a run on `num_devices`."""
    if config.mesh is not None:
        return config.mesh
    by_rows = math.gcd(config.batch_size, num_devices)
    return MeshConfig(fsdp=by_rows, seq=num_devices // by_rows)


def run_mesh(config: RunConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run over `devices` (default: all of the job). Raises `UserError` as
    `build_mesh` does."""
    devices = jax.devices() if devices is None else devices
    return build_mesh(mesh_config(config, len(devices)), devices)


def num_parts(config: RunConfig, mesh: Mesh | AbstractMesh) -> int:
    """The number of parts in which a batch is computed, one after another."""
    if config.accumulation_steps is not None:
        return config.accumulation_steps
    rows = config.batch_size // math.prod(mesh.shape[axis] for axis in BATCH)
    at_once = max(PART_TOKENS * mesh.shape["seq"] // config.data.seq_len, 1)
    return next((n for n in range(1, rows) if rows % n == 0 and rows // n <= at_once), max(rows, 1))
