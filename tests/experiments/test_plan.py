"""The plan of a step: the change that makes it fit, and its bytes as a process measures them."""

import ctypes
import re
import sys
from pathlib import Path

import commands
import jax
import jax.numpy as jnp
from devices import environment

from experiments.cli import CONFIG_DIR
from experiments.gin_loading import load_config
from experiments.plan import DeviceMemory, make_plan, remedy
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import build_mesh
from ttcd_jax.train.hardware import Hardware

BATCH = ("RunConfig.batch_size=64", "RunConfig.accumulation_steps=2")
CONFIG = load_config(RunConfig, "quickstart.gin", BATCH, config_dir=CONFIG_DIR)
DEVICE = Hardware("T1", peak_flops=1e12, memory_bytes=100)


def _change(config=CONFIG, data=4, fsdp=2, seq=2, **memory):
    mesh = {"data": data, "fsdp": fsdp, "seq": seq, "tensor": 1}
    sizes = {"params": 10, "gradients": 10, "optimizer": 20, "rest": 30} | memory
    return remedy(config, mesh, DeviceMemory(**sizes), DEVICE)


def test_what_fits_needs_no_change():
    assert _change() is None
    assert _change(rest=60) is None


def test_parameters_that_do_not_fit_are_cut_along_fsdp_as_far_as_there_are_copies():
    # 120 + 30 of 100: in halves still 90.
    assert "fsdp from 2 to 4 (data from 4 to 2)" in _change(optimizer=100)
    assert "fsdp from 2 to 8 (data from 4 to 1)" in _change(optimizer=220)
    # 1020 on each of 4 parts, 70 of room: 59 devices, whole nodes.
    assert "at least 64 devices" in _change(optimizer=1000)


def test_activations_that_do_not_fit_are_cut_into_more_parts_then_along_the_row():
    # 64 rows on 8 devices in 2 parts: 4 at once. 60 of room.
    assert "accumulation_steps from 2 to 4" in _change(rest=100)
    assert "accumulation_steps from 2 to 8" in _change(rest=200)
    assert "remat = 'block' (now 'none')" in _change(rest=300)
    block = CONFIG.replace(model=CONFIG.model.replace(remat="block"))
    change = _change(block, rest=300)
    assert "seq from 2 to 4 (fsdp from 2 to 1)" in change
    assert "accumulation_steps from 2 to 16" in change
    change = _change(block, rest=900)
    assert "seq from 2 to 8 (data from 4 to 1)" in change
    assert "take 100 times the devices" in _change(block, rest=6000)


def _resident(key):
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def _measure(*params):
    """Prints the bytes of a plan, and what the process then holds more than before it had a state,
    during the step that was planned."""
    config = load_config(RunConfig, "quickstart.gin", params, config_dir=CONFIG_DIR)
    mesh = build_mesh(config.mesh)
    planned, step = make_plan(config, mesh)
    abstract = build.abstract_state(config, mesh), build.abstract_batch(config, mesh)

    def zeros():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    make = jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))
    make = make.lower().compile()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    state, batch = make()
    for _ in range(2):
        state, _ = jax.block_until_ready(step(state, batch))
    print(planned.total, _resident("VmHWM") - before)


def test_a_step_takes_the_bytes_of_its_plan():
    sizes = ("RunConfig.batch_size=8", "TextConfig.seq_len=1024")
    small = ("TransformerConfig.num_layers=2", "TransformerConfig.fast_layers=(0,)")
    # Every large array in its own mapping: freed memory of the compiler is not used again.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    options = {"env": environment(**allocator), "is_forked": False}
    planned, measured = map(int, commands.output(Path(__file__), *small, *sizes, **options).split())
    assert planned > 100e6
    assert abs(measured / planned - 1) < 0.15


if __name__ == "__main__":
    _measure(*sys.argv[1:])
