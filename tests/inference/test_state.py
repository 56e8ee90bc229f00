"""The size of the decoding state, which does not grow."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checks import randomize
from devices import environment
from flax import nnx
from small_models import config_of

from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import stream
from ttcd_jax.inference.state import start_state, state_axes, state_bytes
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision

CONFIG = config_of("ipttcd")
B, D, F, W, LENGTH = 3, CONFIG.dim, CONFIG.mlp_dim, 4, 50
HEADS = 2 * 4  # N H, and K H
L, R = 4, 3
RING = 2 * W * HEADS
# Elements per row, by the formulas of `ttcd_jax.inference.state`: (attention, memory, open chunk).
ELEMENTS = {
    "full": (2 * 2 * LENGTH * HEADS, 0, 0),
    "swa": (2 * RING, 0, 0),
    "ipttcd": (2 * RING, F * D, L * (F + D) + (R - 1) * (2 * F + 1)),
    "ipttt": (2 * RING, F * D, L * (F + D + 2) + (R - 1) * (F + D + 2)),  # two half-lives
    "ipttcd_ideal": (2 * RING, F * D, 2 * L * F),
    "deltanet": (0, 2 * 2 * 4 * 6, 2 * (R - 1) * 2 * (2 * 4 + 6)),
    "gated_deltanet": (0, 2 * 2 * 4 * 6, 2 * (R - 1) * 2 * (2 * 4 + 6)),
    "deltanet_hybrid": (2 * RING, 2 * 4 * 6, 0),
    "lact": (2 * RING, 2 * 2 * 3 * 2 * 4 * 4, 2 * L * 2 * (2 * 4 + 4)),
}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_bytes_are_those_of_the_formula_and_of_the_arrays(method, float64):
    config = config_of(method)
    sizes = state_bytes(config, B, LENGTH)
    kinds = ("attention", "memory", "open chunk")
    assert tuple(sizes[kind] for kind in kinds) == tuple(8 * B * n for n in ELEMENTS[method])
    state = start_state(inference_model(randomize(Transformer, config)), B, max_length=LENGTH)
    assert sizes["total"] == sum(x.nbytes for x in jax.tree.leaves(state.layers))


def test_every_array_is_cut_by_rows_and_some_by_heads_or_features():
    config = CONFIG.replace(precision=Precision())
    state = start_state(inference_model(randomize(Transformer, config)), B)
    axes = state_axes(state)
    fast, plain = axes.layers
    assert plain["mixer"].keys == ("batch", None, "kv_heads", None)
    assert fast["mlp"].chunks.memory == ("batch", "mlp", None)
    leaves = jax.tree.leaves(axes, is_leaf=lambda x: type(x) is tuple and "batch" in x)
    assert all(names[0] == "batch" for names in leaves)
    assert len(leaves) == len(jax.tree.leaves(state))


@pytest.mark.slow
def test_a_million_tokens_take_the_memory_of_sixteen_thousand():
    # A separate process, with the code that users run. Its arrays come straight from the system,
    # since the bytes that glibc keeps of freed ones vary by five percent.
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment(XLA_FLAGS="", MALLOC_MMAP_THRESHOLD_="65536"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    short, long = json.loads(done.stdout)
    assert long["arrays"] == short["arrays"]
    assert long["resident"] <= 1.05 * short["resident"]


def _read_short_and_long() -> list[dict[str, int]]:
    config = config_of(
        "ipttcd",
        num_layers=1,
        window=256,
        student_window=128,
        memory=MemoryConfig(chunk_size=1024),
        precision=Precision(),
    )
    model = inference_model(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 11, (1, 1 << 20)).astype(np.int32)
    for _ in range(12):  # until nothing more is compiled or kept
        short = _read(model, tokens[:, : 1 << 14])
    return [short, _read(model, tokens)]


def _read(model, tokens: np.ndarray) -> dict[str, int]:
    """The most bytes of arrays while it read, and the most that the process ever held."""
    in_use = 0
    for _, hidden, state in stream(model, start_state(model, 1), tokens, piece_size=8192):
        assert np.isfinite(np.asarray(hidden)).all()
        in_use = max(in_use, sum(x.nbytes for x in jax.live_arrays()))
        written = float(np.abs(np.asarray(state.layers[0]["mlp"].chunks.memory)).max())
        assert 0 < written < np.inf
    # Not `getrusage`: it goes on counting from the process that started this one.
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return {"arrays": in_use, "resident": 1024 * int(peak)}


if __name__ == "__main__":
    print(json.dumps(_read_short_and_long()))
