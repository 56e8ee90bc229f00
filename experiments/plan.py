"""The dry run: the cost of a configuration before anything is allocated."""

import jax
from jax.sharding import Mesh

from ttcd_jax.allocation import RESERVE_BYTES, SHARE, memory_share
from ttcd_jax.errors import UserError
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.run.build import Program, shard_bytes
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import laid_out, run_mesh
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import Hardware, data_sheet, device_bytes, parse_topology
from ttcd_jax.train.state import num_params
from ttcd_jax.units import size as size_text

PEAK_SHARE = 0.4  # of the data sheet's peak FLOP/s, for the time of the FLOPs


def use_topology(topology: str) -> Hardware:
    """Gives this process as many CPU devices as `topology` has. Call it before the first array."""
    hardware, count = parse_topology(topology)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return hardware


def make_plan(config: RunConfig, mesh: Mesh) -> tuple[dict[str, int], jax.stages.Compiled]:
    """(bytes of a step on one device of `mesh` by what they hold, the compiled training step)."""
    program = Program(config, mesh)
    with jax.set_mesh(mesh):
        compiled = program.step().compile()
    params, optimizer = (shard_bytes(program.state[x]) for x in ("params", "opt_state"))
    # Gradients are as large as the parameters, and part of the temporary arrays.
    sizes = compiled.memory_analysis()
    assert sizes is not None, "the compiler reports the bytes of its program"
    rest = max(sizes.temp_size_in_bytes + shard_bytes(program.batch) - params, 0)
    used = {"parameters": params, "gradients": params, "optimizer": optimizer}
    return used | {"activations and all else": rest}, compiled


def print_plan(config: RunConfig, hardware: Hardware | None) -> None:
    """Prints parameters, memory per device, FLOPs and, on accelerators, whether the step fits, and
    by a data sheet the time of its FLOPs at a share of the peak. Compiles the real step for this
    process's devices. Raises `UserError` for a mesh that does not fit them or the batch."""
    mesh = run_mesh(config)
    # The devices of a topology are CPUs that stand for accelerators.
    config = laid_out(config, mesh if hardware is None else mesh.abstract_mesh)
    used, _ = make_plan(config, mesh)
    total, length = sum(used.values()), config.data.seq_len
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    tokens, flops = config.batch_size * length, training_flops_per_token(config.model, length)
    lines = {
        "parameters": f"{num_params(config.model):,}",
        "tokens per step": f"{tokens:,} ({config.batch_size} rows of {length:,})",
        "tokens in all": f"{tokens * config.steps:,} in {config.steps:,} steps",
        "training FLOPs per token": f"{flops:.4g}",
        "training FLOPs per step": f"{flops * tokens:.4g}",
        **{f"memory: {name}": _per_device(size) for name, size in used.items()},
        "memory: in all": _per_device(total),
        "decoding state": _decoding_state(config),
        "layout": f"{axes}; parts {config.accumulation_steps}; remat {config.model.remat}",
    }
    lines["memory: activations and all else"] += ", as compiled here"
    if hardware is not None:
        share, whole = memory_share(), hardware.memory_bytes
        lines |= _fit(total, share * whole, f"{share:.4g} ({SHARE}) of {size_text(whole)}")
    elif (device := jax.devices()[0]).platform != "cpu":
        hardware, whole = data_sheet(device.device_kind), device_bytes()
        lines |= _fit(total, whole, f"XLA's {size_text(whole)} of {device.device_kind}")
    if hardware is not None:
        lines |= _time(config, mesh, hardware, flops * tokens)
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def _decoding_state(config: RunConfig) -> str:
    length = config.data.seq_len
    try:
        sizes = state_bytes(config.model, 1, max_length=length)
    except UserError as error:
        return f"none: {error}"
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sizes.items() if size)
    is_bounded = config.model.window is not None or not sizes.get("attention")
    extent = "any length" if is_bounded else f"{length:,} tokens"
    return f"per row: {kinds}, for {extent}"


def _fit(total: int, whole: float, origin: str) -> dict[str, str]:
    """Whether a step of `total` bytes fits into the `whole` memory of a device less the reserve."""
    room = whole - RESERVE_BYTES
    # An estimate: compiled for CPUs, some bfloat16 products are in float32, attention is in XLA.
    remedies = (
        f"DOES NOT FIT: {_per_device(total)}, there is {size_text(room)}: raise "
        "RunConfig.accumulation_steps, set TransformerConfig.remat='block', or take more devices "
        "or shorter rows"
    )
    reserve = f"less {size_text(RESERVE_BYTES)} for programs and gaps"
    return {
        "memory: there is": f"{_per_device(room)}: {origin}, {reserve}",
        "fits": "yes" if total <= room else remedies,
    }


def _time(config: RunConfig, mesh: Mesh, hardware: Hardware, flops: float) -> dict[str, str]:
    seconds = flops / (mesh.size * PEAK_SHARE * hardware.peak_flops)
    step = f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
    return {
        "devices": f"{mesh.size} x {hardware.name}",
        f"FLOPs at {PEAK_SHARE:.0%} of peak": (
            f"{step} per step, {seconds * config.steps / 3600:,.1f} hours in all "
            f"(arithmetic, no prediction; peak {hardware.peak_flops / 1e12:,.0f} TFLOP/s)"
        ),
    }


def _per_device(size: float) -> str:
    return f"{size_text(size)} per device"
