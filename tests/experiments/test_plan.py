"""The plan of a step: the changes that make it fit, and its bytes as a process measures them."""

import ctypes
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import environment
from jax.sharding import AbstractMesh, Mesh

from experiments import plan
from experiments.cli import CONFIG_DIR
from ttcd_jax.run import build, layout
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import AXES, MeshConfig
from ttcd_jax.train.hardware import Hardware

PARTS = "RunConfig.accumulation_steps=1"
BATCH = ("RunConfig.batch_size=64", PARTS, "TransformerConfig.remat='dots'")
CONFIG = load_config(RunConfig, "quickstart.gin", BATCH, config_dir=CONFIG_DIR)


def _changes(monkeypatch, room, rest=6400, lasting=640, **mesh):
    """The parameters of the changes that bring a step to `room` bytes per device, and the bytes
    with the last one, on 16 devices with a compiler that takes 100 bytes for a row."""

    def run_mesh(config, _):
        sizes = layout.mesh_config(config, 16).sizes(16)
        return Mesh(np.empty(tuple(sizes.values())), AXES)

    def make_plan(config, mesh):
        sizes = dict(mesh.shape)
        parts = layout.num_parts(config, AbstractMesh(tuple(sizes.values()), AXES))
        shards = sizes["fsdp"] * sizes["seq"]
        at_once = rest // (sizes["data"] * shards * parts)
        at_once //= 5 if config.model.remat == "block" else 1
        return plan.DeviceMemory(lasting // shards, 0, 0, at_once), None

    monkeypatch.setattr(plan, "make_plan", make_plan)
    monkeypatch.setattr(plan, "run_mesh", run_mesh)
    config = CONFIG.replace(mesh=MeshConfig(**mesh))
    first = run_mesh(config, None)
    changes = plan.changes_to_fit(config, first, make_plan(config, first)[0], room)
    return [change.param for change in changes], changes[-1].total if changes else None


def test_all_changes_are_proposed_at_once_the_cheapest_first(monkeypatch):
    assert _changes(monkeypatch, 440) == ([], None), "it fits"
    parts, remat = "RunConfig.accumulation_steps=4", "TransformerConfig.remat='block'"
    assert _changes(monkeypatch, 150) == ([parts], 140)
    assert _changes(monkeypatch, 142) == ([parts, remat], 60), "a margin is left"
    assert _changes(monkeypatch, 70) == ([parts, remat], 60)
    params, total = _changes(monkeypatch, 52)
    assert (params[:2], total) == ([parts, remat], 50)
    mesh = "RunConfig.mesh=@MeshConfig()\nMeshConfig.fsdp=8\nMeshConfig.seq=2"
    assert params[2] == f"RunConfig.accumulation_steps=8\n{mesh}"


def test_parameters_that_do_not_fit_are_sharded_over_all_copies_and_rows_last(monkeypatch):
    params, total = _changes(monkeypatch, 300, lasting=1600, data=4, fsdp=4)
    assert params[0].endswith("MeshConfig.data=1\nMeshConfig.fsdp=16")
    assert (params[1:], total) == (["RunConfig.accumulation_steps=4"], 200)
    params, total = _changes(monkeypatch, 5)  # which no layout fits
    assert total > 5
    assert "MeshConfig.seq=16" in params[-1]  # 512 tokens: a chunk on each device


@pytest.mark.parametrize("name", ["deltanet_340m.gin", "ablation/8_layers.gin"])
def test_a_recipe_fits_a_node_without_data(name):
    result = commands.run("launch", f"--gin={name}", "--dry_run", "--topology=h100x8")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^fits +yes$", result.stdout, re.MULTILINE), result.stdout
    assert "fsdp 8 x seq 1 x tensor 1; parts 2; remat block" in result.stdout
    assert "RECORDS='DIR'" in result.stderr
    assert "experiments.prepare_data --input=" in result.stderr


def test_a_plan_prints_what_it_compares(monkeypatch, capsys):
    used = plan.DeviceMemory(params=2**30, gradients=2**30, optimizer=2**30, rest=2**30)
    monkeypatch.setattr(plan, "make_plan", lambda config, mesh: (used, None))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    plan.print_plan(CONFIG, Hardware("T1", peak_flops=1e12, memory_bytes=10.5 * 2**30))
    there = "4.25 GiB per device: 0.5 (XLA_CLIENT_MEM_FRACTION) of 10.50 GiB, less 1.00 GiB"
    found = capsys.readouterr().out
    assert there in found
    assert re.search("fits +yes", found)
    mesh = layout.run_mesh(CONFIG)  # of a device without a data sheet, which is here
    monkeypatch.setattr(plan, "run_mesh", lambda *_: mesh)
    new = SimpleNamespace(platform="gpu", device_kind="New")
    monkeypatch.setattr(jax, "devices", lambda: [new])
    monkeypatch.setattr(plan, "device_bytes", lambda: 4 * 2**30)
    plan.print_plan(CONFIG, None)
    found = capsys.readouterr().out
    assert "3.00 GiB per device: XLA's 4.00 GiB of New, less 1.00 GiB" in found
    assert re.search("fits +DOES NOT FIT", found)
    assert "peak" not in found


def _resident(key):
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def _measure(*params):
    """Prints the bytes of a plan, and what the process then holds more than before it had a state,
    during the step that was planned."""
    config = load_config(RunConfig, "quickstart.gin", params, config_dir=CONFIG_DIR)
    mesh = layout.run_mesh(config)
    planned, step = plan.make_plan(config, mesh)
    program = build.Program(config, mesh)
    abstract = program.state, program.batch

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
    sizes = ("RunConfig.batch_size=16", "TextConfig.seq_len=1024", PARTS)
    small = ("TransformerConfig.num_layers=2", "TransformerConfig.fast_layers=(0,)")
    # Every large array in its own mapping: freed memory of the compiler is not used again.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    options = {"env": environment(**allocator), "is_forked": False}
    planned, measured = map(int, commands.output(Path(__file__), *small, *sizes, **options).split())
    assert planned > 100e6
    assert abs(measured / planned - 1) < 0.15


if __name__ == "__main__":
    _measure(*sys.argv[1:])
