import os
import subprocess
import sys
from pathlib import Path

from jax.sharding import AbstractMesh

from experiments import plan
from experiments.gin_loading import load_config
from ttcd_jax.run import layout
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.train.hardware import Hardware

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "experiments" / "configs"
QUICK = load_config(RunConfig, "quickstart.gin", ["RunConfig.batch_size=64"], config_dir=CONFIGS)


def _changes(monkeypatch, room, config=QUICK, rest=6400, lasting=640, **mesh):
    """The parameters of the changes that bring a step to `room` bytes per device, the last one's
    bytes, on 16 devices with a compiler that knows 100 bytes per row at once."""

    def make_plan(config, sizes):
        parts = layout.num_parts(config, AbstractMesh(tuple(sizes.values()), tuple(sizes)))
        shards = sizes["fsdp"] * sizes["seq"]
        at_once = rest // (sizes["data"] * shards * parts)
        at_once //= 5 if config.model.remat == "block" else 1
        return plan.Plan(sizes, plan.Memory(lasting // shards, 0, 0, at_once), None)

    monkeypatch.setattr(plan, "make_plan", make_plan)
    monkeypatch.setattr(
        plan, "run_mesh", lambda config, _: layout.mesh_config(config, 16).sizes(16)
    )
    monkeypatch.setattr(plan.jax, "devices", lambda: range(16))
    config = config.replace(mesh=MeshConfig(**mesh), accumulation_steps=1)
    first = make_plan(config, config.mesh.sizes(16))
    changes = plan.changes_to_fit(config, first, Hardware("T1", 1e12, memory_bytes=room))
    return [change.param for change in changes], changes[-1].total if changes else None


def test_what_fits_needs_no_change(monkeypatch):
    assert _changes(monkeypatch, 440) == ([], None)


def test_all_changes_are_proposed_at_once_the_cheapest_first(monkeypatch):
    parts, remat = "RunConfig.accumulation_steps=4", "TransformerConfig.remat='block'"
    assert _changes(monkeypatch, 150) == ([parts], 140)
    assert _changes(monkeypatch, 70) == ([parts, remat], 60)
    params, total = _changes(monkeypatch, 50)
    assert (params[:2], total) == ([parts, remat], 50)
    assert params[2].startswith("RunConfig.accumulation_steps=8 RunConfig.mesh=@MeshConfig()")
    assert "MeshConfig.fsdp=8" in params[2]
    assert "MeshConfig.seq=2" in params[2]


def test_parameters_that_do_not_fit_are_sharded_over_all_copies(monkeypatch):
    params, total = _changes(monkeypatch, 300, lasting=1600, data=4, fsdp=4)
    assert "MeshConfig.data=1 MeshConfig.fsdp=16" in params[0]
    assert (params[1:], total) == (["RunConfig.accumulation_steps=4"], 200)


def test_a_model_that_no_layout_fits_ends_with_the_last_change(monkeypatch):
    params, total = _changes(monkeypatch, 5)
    assert total > 5
    assert "MeshConfig.seq=16" in params[-1]  # 512 tokens: a chunk on each device


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
from ttcd_jax.run.layout import run_mesh

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

config = load_config(
    RunConfig, "quickstart.gin", sys.argv[1:], config_dir=Path("experiments/configs")
)
mesh = run_mesh(config)
planned = plan.make_plan(config, mesh)
state = build.abstract_state(config, mesh)
init = jax.jit(lambda: zeros(state)).lower().compile()
batch = build.abstract_batch(config, mesh)
ctypes.CDLL("libc.so.6").malloc_trim(0)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
state = jax.device_put(init(), jax.tree.map(lambda x: x.sharding, state))
batch = {name: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for name, x in batch.items()}
for _ in range(2):
    state, _ = jax.block_until_ready(planned.compiled(state, batch))
print(planned.memory.total, resident("VmHWM") - before)
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
