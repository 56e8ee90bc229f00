"""The plan of a step: whether it fits, and its bytes as a process measures them."""

import ctypes
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import commands
import jax
import jax.numpy as jnp
import pytest
from devices import environment

from experiments import plan
from experiments.cli import CONFIG_DIR
from ttcd_jax.run import build, layout
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.hardware import Hardware

CONFIG = load_config(RunConfig, "quickstart.gin", config_dir=CONFIG_DIR)


@pytest.mark.parametrize("name", ["deltanet_340m.gin", "ablation/8_layers.gin"])
def test_a_recipe_fits_a_node_without_data_and_writes_nothing(name, tmp_path):
    line = ("launch", f"--gin={name}", f"--run_dir={tmp_path / 'run'}", "--dry_run")
    result = commands.run(*line, "--topology=h100x8")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^fits +yes$", result.stdout, re.MULTILINE), result.stdout
    assert "fsdp 8 x seq 1 x tensor 1; parts 2; remat block" in result.stdout
    assert "RECORDS='DIR'" in result.stderr
    assert "experiments.prepare_data --input=" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plan_prints_what_it_compares(monkeypatch, capsys):
    mesh = layout.run_mesh(CONFIG)
    used = dict.fromkeys(("parameters", "gradients", "optimizer", "activations and all else"))
    monkeypatch.setattr(plan, "make_plan", lambda *_: (dict.fromkeys(used, 2**30), None))
    monkeypatch.setattr(plan, "run_mesh", lambda _: mesh)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    plan.print_plan(CONFIG, Hardware("T1", peak_flops=1e12, memory_bytes=10.5 * 2**30))
    there = "4.25 GiB per device: 0.5 (XLA_CLIENT_MEM_FRACTION) of 10.50 GiB, less 1.00 GiB"
    found = capsys.readouterr().out
    assert there in found
    assert re.search("fits +yes", found)
    plan.print_plan(CONFIG, None)  # of a CPU
    assert "fits" not in capsys.readouterr().out
    # Of a device without a data sheet, which is here.
    new = SimpleNamespace(platform="gpu", device_kind="New")
    monkeypatch.setattr(jax, "devices", lambda: [new])
    monkeypatch.setattr(plan, "device_bytes", lambda: 4 * 2**30)
    plan.print_plan(CONFIG, None)
    found = capsys.readouterr().out
    assert "3.00 GiB per device: XLA's 4.00 GiB of New, less 1.00 GiB" in found
    numbers = "4.00 GiB per device, there is 3.00 GiB: raise RunConfig.accumulation_steps"
    assert re.search(f"fits +DOES NOT FIT: {numbers}", found)
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
    print(sum(planned.values()), _resident("VmHWM") - before)


def test_a_step_takes_the_bytes_of_its_plan():
    sizes = ("RunConfig.batch_size=8", "TextConfig.seq_len=1024", "RunConfig.accumulation_steps=1")
    small = ("TransformerConfig.num_layers=2", "TransformerConfig.fast_layers=(0,)")
    # Every large array in its own mapping: freed memory of the compiler is not used again.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    options = {"env": environment(**allocator), "is_forked": False}
    planned, measured = map(int, commands.output(Path(__file__), *small, *sizes, **options).split())
    assert planned > 100e6
    assert abs(measured / planned - 1) < 0.15


if __name__ == "__main__":
    _measure(*sys.argv[1:])
