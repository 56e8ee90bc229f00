"""The layout of a step: how its batch is divided among devices, and into parts computed in turn.

A recipe fixes the batch; the fields of `RunConfig` that it leaves open follow from the devices:

    mesh                 rows along data x fsdp: gcd(batch_size, number of devices); seq: the rest.
                         data: as many of the nodes as divide the rows, fewer where a copy of the
                         model would take more than `STATE_SHARE` of its devices' memory and
                         fewer copies divide their parameters among their devices
    accumulation_steps   the fewest parts of at most `PART_TOKENS` tokens per device, or of one row
    model.remat          "dots"
    model.scans_layers   True

On CPUs the parts are those nearest to `CPU_PART_TOKENS` tokens. Up to `CPU_KEPT_TOKENS` in a part
and `CPU_LAYERS` layers, nothing is recomputed and layers are unrolled: XLA copies the arrays that a
scan keeps.

So what crosses the network is a copy's gradients, not the parameters of every layer. The layout
changes speed and device memory, not the losses: a run may resume on other devices.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ttcd_jax.errors import UserError
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh, num_nodes
from ttcd_jax.sharding.rules import BATCH
from ttcd_jax.train.hardware import DEVICES_PER_NODE, SMALLEST, Hardware, data_sheet
from ttcd_jax.train.state import num_params

PART_TOKENS = 32_768
CPU_PART_TOKENS = 1_024
CPU_KEPT_TOKENS = 4_096
CPU_LAYERS = 8
STATE_BYTES = 12  # of a parameter with its two moments
STATE_SHARE = 1 / 8  # gradients and activations take the rest


def mesh_config(
    config: RunConfig, num_devices: int, nodes: int = 1, memory_bytes: float = SMALLEST
) -> MeshConfig:
    """The mesh of a run on `num_devices`, of `memory_bytes` each, in so many nodes. Raises
    `UserError` if no mesh divides the batch."""
    if config.mesh is not None:
        return config.mesh

    def by_tokens(devices: int) -> int:
        return devices // math.gcd(config.batch_size, devices)

    if config.data.seq_len % by_tokens(num_devices):
        node = DEVICES_PER_NODE
        counts = (n for n in range(num_devices, 0, -1) if n < node or n % node == 0)
        usable = next(n for n in counts if config.data.seq_len % by_tokens(n) == 0)
        raise UserError(
            f"a batch of {config.batch_size} rows of {config.data.seq_len} tokens does not divide "
            f"among {num_devices} devices: use {usable} of them, or set RunConfig.batch_size to a "
            f"multiple of {num_devices}"
        )
    seq, copies = by_tokens(num_devices), math.gcd(nodes, config.batch_size, num_devices)
    if copies > 1:
        most = STATE_SHARE * memory_bytes * num_devices / (STATE_BYTES * num_params(config.model))
        counts = [n for n in range(1, copies + 1) if copies % n == 0]
        dim = config.model.dim  # which the devices of a copy divide
        counts = [n for n in counts if dim % (num_devices // n) == 0] or counts
        copies = max((n for n in counts if n <= most), default=counts[0])
    return MeshConfig(data=copies, fsdp=num_devices // seq // copies, seq=seq, slices=copies)


def run_mesh(
    config: RunConfig, devices: Sequence[Any] | None = None, hardware: Hardware | None = None
) -> Mesh:
    """The mesh of a run over `devices` (default: all of the job). With `hardware` they stand for
    its, in nodes of `DEVICES_PER_NODE`. `UserError` as `build_mesh`."""
    devices = jax.devices() if devices is None else devices
    nodes = max(len(devices) // DEVICES_PER_NODE, 1) if hardware else None
    sheet = hardware or data_sheet(devices[0].device_kind)
    memory = sheet.memory_bytes if sheet else SMALLEST
    chosen = mesh_config(config, len(devices), nodes or num_nodes(devices), memory)
    return build_mesh(chosen, devices, nodes=nodes)


def num_parts(config: RunConfig, mesh: Mesh | AbstractMesh) -> int:
    """The number of parts in which a batch is computed, one after another."""
    if config.accumulation_steps is not None:
        return config.accumulation_steps
    rows = max(config.batch_size // _row_devices(mesh), 1)
    part_tokens = CPU_PART_TOKENS if _is_on_cpus(mesh) else PART_TOKENS
    at_once = max(part_tokens * mesh.shape["seq"] // config.data.seq_len, 1)
    parts = [n for n in range(1, rows + 1) if rows % n == 0]
    if _is_on_cpus(mesh):
        return rows // min(parts, key=lambda n: max(n / at_once, at_once / n))
    return rows // max(n for n in parts if n <= at_once)


def laid_out(config: RunConfig, mesh: Mesh | AbstractMesh) -> RunConfig:
    """`config` with its parts, and `remat` and `scans_layers` where its model leaves them open. An
    abstract mesh is one of accelerators. `UserError` for parts that devices cannot divide."""
    parts, model = num_parts(config, mesh), config.model
    rows, devices = config.batch_size // parts, _row_devices(mesh)
    if rows % devices:
        raise UserError(
            f"batch_size {config.batch_size} in accumulation_steps {parts} makes parts of {rows} "
            f"rows, which do not divide among the {devices} devices of mesh axes "
            f"{' x '.join(BATCH)}: lower accumulation_steps or change MeshConfig"
        )
    tokens = rows * config.data.seq_len // mesh.size
    is_kept = _is_on_cpus(mesh) and tokens <= CPU_KEPT_TOKENS and model.num_layers <= CPU_LAYERS
    model = model.replace(
        remat=model.remat or ("none" if is_kept else "dots"),
        scans_layers=not is_kept if model.scans_layers is None else model.scans_layers,
    )
    return config.replace(accumulation_steps=parts, model=model)


def _row_devices(mesh: Mesh | AbstractMesh) -> int:
    """Devices among which the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def _is_on_cpus(mesh: Mesh | AbstractMesh) -> bool:
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
