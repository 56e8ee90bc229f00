import os
import subprocess
import sys
from pathlib import Path

from experiments.gin_loading import load_config
from experiments.plan import DeviceMemory, remedy
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.hardware import Hardware

ROOT = Path(__file__).parents[2]
CONFIG = load_config(
    RunConfig,
    "quickstart.gin",
    ["RunConfig.batch_size=64", "RunConfig.accumulation_steps=2"],
    config_dir=ROOT / "experiments" / "configs",
)
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


# The plan of a step, then that step: what the process holds more than before it had a state.
MEASURE = """
import ctypes
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.run import build
from experiments import plan
from experiments.gin_loading import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import build_mesh

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

config = load_config(
    RunConfig, "quickstart.gin", sys.argv[1:], config_dir=Path("experiments/configs")
)
mesh = build_mesh(config.mesh)
memory, step = plan.make_plan(config, mesh)
state = build.abstract_state(config, mesh)
init = jax.jit(lambda: zeros(state)).lower().compile()
batch = build.abstract_batch(config, mesh)
ctypes.CDLL("libc.so.6").malloc_trim(0)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
state = jax.device_put(init(), jax.tree.map(lambda x: x.sharding, state))
batch = {name: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for name, x in batch.items()}
for _ in range(2):
    state, _ = jax.block_until_ready(step(state, batch))
print(memory.total, resident("VmHWM") - before)
"""


def test_a_step_takes_the_bytes_of_its_plan():
    sizes = ("RunConfig.batch_size=8", "TextConfig.seq_len=1024", "RunConfig.accumulation_steps=1")
    small = ("TransformerConfig.num_layers=2", "TransformerConfig.fast_layers=(0,)")
    # Every large array in its own mapping: freed memory of the compiler is not used again.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *small, *sizes],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | allocator,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    planned, measured = map(int, result.stdout.split())
    assert planned > 100e6
    assert abs(measured / planned - 1) < 0.15
