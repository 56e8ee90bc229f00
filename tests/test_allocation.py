"""Freed memory stays with a process that computes narrow models on the CPU, unless its user says
otherwise."""

import json
import os

import pytest

from tests.commands import cpu_environment, output
from ttcd_jax import allocation
from ttcd_jax.errors import UserError

PAGES = 64 * 2**20 // 4096
# The page faults of a program with 64 MiB of temporaries, after it has run six times.
PROGRAM = """
import resource
import jax
from flax import nnx
from ttcd_jax import Transformer, TransformerConfig

sizes = {"vocab_size": 8, "dim": {dim}, "num_layers": 1, "num_heads": 1, "mlp_dim": 8}
config = TransformerConfig(method="full", **sizes)
nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
outer_sum = jax.jit(lambda x: jax.lax.optimization_barrier(x[:, None] * x).sum())

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    outer_sum(jax.numpy.ones(4096)).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print([faults() for _ in range(12)][6:])
"""


@pytest.mark.parametrize(
    ("variables", "dim"), [({}, 64), ({}, 512), ({"MALLOC_ARENA_MAX": "2"}, 64)]
)
def test_temporaries_of_narrow_models_are_not_mapped_again(variables, dim, tmp_path):
    environment, program = cpu_environment(**variables), tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{dim}", str(dim)))
    faults = json.loads(output(program, is_forked=False, env=environment))
    if variables or dim == 512:
        assert min(faults) > PAGES // 2
    else:
        assert min(faults) < PAGES // 100


@pytest.mark.parametrize(
    ("platforms", "device", "expected"),
    [("cpu", "nvidiactl", True), ("cuda", "", False), ("", "", True), ("", "nvidiactl", False)],
)
def test_whether_jax_computes_on_the_cpu_alone(platforms, device, expected, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(allocation.Path, "exists", lambda path: path.name == device)
    assert allocation.is_cpu_alone() == expected


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, 0.92),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_CLIENT_MEM_FRACTION": ""}, 0.92),  # JAX takes it as not set
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".8"}, 0.8),
        ({"XLA_CLIENT_MEM_FRACTION": "4"}, 1.0),  # with the host's memory
    ],
)
def test_plans_count_on_the_share_that_xla_is_told_to_take(variables, share, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocation.os, "environ", os.environ | variables)
    allocation.take_device_memory()
    assert allocation.memory_share() == share
    told = {name: os.environ[name] for name in os.environ if name.endswith("MEM_FRACTION")}
    assert told == ({x: y for x, y in variables.items() if y} or {allocation.SHARE: "0.92"})


@pytest.mark.parametrize("share", ["abc", "nan", "0", "-1", "inf", "1 twice"])
def test_a_share_that_is_none_is_refused(share, monkeypatch):
    monkeypatch.setenv(allocation.SHARE, share.split()[0])
    if share.endswith("twice"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(UserError, match="set XLA_CLIENT_MEM_FRACTION alone, to a share such as"):
        allocation.take_device_memory()


def test_the_memory_of_a_host_is_that_of_the_cgroup(tmp_path, monkeypatch):
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("1000000\n")
    (tmp_path / "job" / "step" / "memory.max").write_text("max\n")
    assert allocation.host_bytes() > 1_000_000
    monkeypatch.setattr(allocation, "_GROUPS", tmp_path)
    monkeypatch.setattr(allocation, "_OWN_GROUP", tmp_path / "own")
    (tmp_path / "own").write_text("1:x:/other\n0::/job/step\n")
    assert allocation.host_bytes() == 1_000_000
