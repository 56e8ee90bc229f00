"""The plan of a step: whether it fits, and its bytes as a process measures them."""

import ctypes
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import commands
import jax
import jax.numpy as jnp
import pytest
from devices import environment
from small_models import recipe

from ttcd_jax import files
from ttcd_jax.commands import plan
from ttcd_jax.run import build, layout
from ttcd_jax.run.described import compiled, missing_compiler
from ttcd_jax.sharding.collectives import Collective
from ttcd_jax.train import loss, step
from ttcd_jax.train.hardware import Hardware

CONFIG = recipe(
    "quickstart.gin", "TransformerConfig.num_layers=1", "TransformerConfig.fast_layers=(0,)"
)
T1 = Hardware("T1", 1e12, 10.5 * 2**30, node_rate=100e9, network_rate=10e9)


def test_a_step_is_what_its_links_and_flops_take_beside_or_after_each_other():
    gather = Collective("all-gather", "fsdp", "", 8, 1, 8e9, 0.0, True, 2)
    reduce = Collective("all-reduce", "data", "", 4, 4, 1e9, 1.0, False)
    ring = Collective("reduce-scatter", "fsdp x seq", "", 16, 2, 8e9, 1 / 8, True)
    times = plan.times_of(0.4e12, [gather, reduce, ring], T1)
    hops = 2 * 7 * 1.9e-6, 2 * 2 * 4e-6, 15 * (4e-6 + 7 * 1.9e-6) / 8
    took = [x / 0.8 + y for x, y in zip((0.16, 0.1, 0.1), hops, strict=True)]
    assert times.links == {
        ("fsdp", "NVLink"): (16e9, pytest.approx(took[0])),
        ("data", "network"): (1e9, pytest.approx(took[1])),
        ("fsdp x seq", "network"): (1e9, pytest.approx(took[2])),
        ("fsdp x seq", "NVLink"): (7e9, 0),
    }
    # A second of FLOPs; the all-reduce alone has nothing beside it.
    assert times[-2:] == pytest.approx((1 + took[1], 1 + sum(took)))
    times = plan.times_of(0.04e12, [gather, reduce, ring], T1)
    assert times[-2:] == pytest.approx((sum(took), 0.1 + sum(took)))


def test_what_was_not_counted_has_no_time(capsys):
    lines = plan._time(CONFIG, 8, T1, 1e12, "a loop of unknown length")
    assert "not counted (a loop of unknown length)" in lines["sent"]
    assert "step" not in lines


def test_programs_of_described_devices_are_kept_by_nobody_but_the_plan(monkeypatch):
    updates = mock.Mock()
    monkeypatch.setattr(plan, "missing_compiler", lambda: None)
    monkeypatch.setattr(plan, "described_devices", lambda hardware, count: [count])
    monkeypatch.setattr(plan, "jax", SimpleNamespace(config=SimpleNamespace(update=updates)))
    assert plan.use_topology("h100x8").devices == [8]
    assert mock.call("jax_enable_compilation_cache", False) in updates.mock_calls


def test_a_recipe_fits_two_nodes_without_data_and_writes_nothing(tmp_path):
    line = ("launch", "--gin=swa_340m.gin", f"--run_dir={tmp_path / 'run'}", "--dry_run")
    small = ("--param=TransformerConfig.num_layers=1", "--param=TransformerConfig.dim=128")
    result = commands.run(*line, *small, "--topology=h100x16")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^fits +yes$", result.stdout, re.MULTILINE), result.stdout
    assert "data 2 x fsdp 8 x seq 1 x tensor 1; parts 1; remat block" in result.stdout
    for name in ("sent: data, network", "sent: fsdp, NVLink", "step"):
        assert re.search(rf"^{name} +\d", result.stdout, re.MULTILINE), result.stdout
    compiler = "a CPU's program" if missing_compiler() else "the program of 16 described H100s"
    assert f"per device, by {compiler}" in result.stdout
    assert "RECORDS='DIR'" in result.stderr
    assert "ttcd prepare --input=" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plan_prints_what_it_compares(monkeypatch, capsys, tmp_path):
    mesh = layout.run_mesh(CONFIG)
    used = dict.fromkeys(("parameters", "gradients", "optimizer", "activations and all else"))
    made = dict.fromkeys(used, 2**30), SimpleNamespace(as_text=lambda: "ENTRY %main () -> x {\n}")
    monkeypatch.setattr(plan, "make_plan", lambda *_: made)
    monkeypatch.setattr(plan, "run_mesh", lambda *_, **__: mesh)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = plan.Target(T1, [*mesh.devices.flat])
    plan.print_plan(CONFIG, target)
    there = "4.25 GiB per device: 0.5 (XLA_CLIENT_MEM_FRACTION) of 10.50 GiB, less 1.00 GiB"
    found, said = capsys.readouterr()
    assert there in found
    assert re.search("fits +yes", found)
    assert re.search("step +.* in all: what is sent takes 0.00 ms", found)
    assert said.startswith("compiling the step for")
    plan.print_plan(CONFIG, target)  # from the cache
    assert capsys.readouterr() == (found, "")
    with monkeypatch.context() as context:  # of another program, by a module of the user's, say
        context.setattr(step, "summed_loss", lambda *xs: 2 * loss.summed_loss(*xs))
        plan.print_plan(CONFIG, target)
    assert capsys.readouterr().err == said
    with monkeypatch.context() as context:  # nor can a file be
        context.setattr(files, "_flush", lambda *_: os.stat(tmp_path / "absent"))
        context.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        plan.print_plan(CONFIG, target)
    assert capsys.readouterr() == (found, said)
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)  # no folder
    plan.print_plan(CONFIG, None)  # of a CPU
    assert "fits" not in capsys.readouterr().out
    # Of a device without a data sheet, which is here.
    new = SimpleNamespace(platform="gpu", device_kind="New")
    planned = plan.plan_of(CONFIG, None)
    monkeypatch.setattr(plan, "plan_of", lambda *_: planned)
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
    config = recipe("quickstart.gin", *params)
    mesh = layout.run_mesh(config)
    program = build.Program(config, mesh)
    with jax.set_mesh(mesh):
        planned, run = plan.make_plan(program, program.step())
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
        state, _ = jax.block_until_ready(run(state, batch))
    print(sum(planned.values()), _resident("VmHWM") - before)


def test_a_product_that_is_tuned_on_a_gpu_alone_is_compiled_without_triton():
    """A step on 512 described H100s had one; no device here is described."""
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=["described"]))
    problem, calls = ["INTERNAL: No supported config found for HLO: %gemm_fusion"], []

    def compile(options):
        calls.append(options)
        if "xla_gpu_enable_triton_gemm" not in options:
            raise jax.errors.JaxRuntimeError(problem[0])
        return "compiled"

    assert compiled(SimpleNamespace(compile=compile), mesh) == "compiled"
    assert calls[1] == calls[0] | {"xla_gpu_enable_triton_gemm": False}
    problem[0] = "INTERNAL: out of memory"
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        compiled(SimpleNamespace(compile=compile), mesh)


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
