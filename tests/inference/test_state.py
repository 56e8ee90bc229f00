"""The decoding state: its size, which does not grow, and its files."""

import functools
import json
import re
import shutil
from pathlib import Path

import commands
import jax
import numpy as np
import pytest
from checks import assert_same, randomize, refused
from devices import environment
from flax import nnx
from small_models import config_of

from ttcd_jax import MemoryConfig, Precision, Transformer
from ttcd_jax.errors import CheckpointError
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill, stream
from ttcd_jax.inference.saved_state import load_state, save_state
from ttcd_jax.inference.state import start_state, state_bytes
from ttcd_jax.methods import METHODS
from ttcd_jax.train import digest

NARROW = config_of(
    "ipttcd", vocab_size=16, num_layers=1, window=8, precision=Precision(compute="bfloat16")
)
TOKENS = np.arange(16).reshape(2, 8)


def _model(config=NARROW, std=0.5):
    return inference_model(randomize(Transformer, config, std=std))


@pytest.fixture(scope="module")
def model():
    return _model()


@pytest.fixture(scope="module")
def state(model):
    return prefill(model, start_state(model, 2), TOKENS, np.array([8, 6]))[1]


@pytest.fixture(scope="module")
def folder(model, state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "deep" / "state"
    save_state(folder, model, state)
    return folder


def test_a_state_comes_back_bit_for_bit(model, state, folder, tmp_path):
    loaded = load_state(folder, model)
    assert_same(loaded, state)
    assert [x.dtype for x in jax.tree.leaves(loaded)] == [x.dtype for x in jax.tree.leaves(state)]
    assert {str(x.dtype) for x in jax.tree.leaves(loaded)} >= {"bfloat16", "float32", "int32"}
    assert {path.name for path in folder.iterdir()} == {
        *("state.safetensors", "state.json", "DIGEST.json")
    }
    assert json.loads((folder / "state.json").read_text())["tokens_read"] == [8, 6]
    assert list(folder.parent.iterdir()) == [folder]
    full = _model(NARROW.replace(method="full", window=None, fast_layers=(), memory=None))
    _, state = prefill(full, start_state(full, 2, max_length=21), TOKENS)
    save_state(tmp_path / "state", full, state)
    assert_same(load_state(tmp_path / "state", full), state)


_refused = functools.partial(refused, error=CheckpointError)


def test_another_model_is_refused_by_what_differs(folder):
    _refused("window: 8 -> 6;", load_state, folder, _model(NARROW.replace(window=6)))
    other = NARROW.replace(memory=NARROW.memory.replace(eta=0.5))
    _refused("memory.eta: | -> 0.5;", load_state, folder, _model(other))
    _refused("other parameters of the same", load_state, folder, _model(std=0.25))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "DIGEST.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named(model, copy, name, damage):
    data = (path := copy / name).read_bytes()
    path.unlink()
    if damage != "remove":
        flipped = bytes([data[len(data) // 2] ^ 0x80]) + data[len(data) // 2 + 1 :]
        path.write_bytes(data[: len(data) // 2] + (flipped if damage == "flip" else b""))
    _refused(name, load_state, copy, model)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("state.safetensors", (2**62).to_bytes(8, "little") + b"{}", ""),
        *(("tokens_read", x, "") for x in ([0] * 3_000_000, 5, [])),
        ("max_length", 2**40, ""),
        # A digest names files of its folder alone.
        *((x, None, f"{x}: missing") for x in ("/dev/zero", "../../../../etc/passwd", "../x.json")),
    ],
)
def test_a_sealed_state_of_nonsense_is_refused(model, copy, name, content, words):
    if content is None:
        entries = json.loads((copy / "DIGEST.json").read_text()) | {name: [0, "0"]}
        (copy / "DIGEST.json").write_text(json.dumps(entries))
    else:
        if not isinstance(content, bytes):
            record = json.loads((copy / "state.json").read_text()) | {name: content}
            name, content = "state.json", json.dumps(record).encode()
        (copy / name).write_bytes(content)
        digest.seal(copy)
    _refused(f"{copy.parent}|{words}", load_state, copy, model)


def test_a_folder_without_a_state_or_with_one_is_refused(model, state, folder, tmp_path):
    for other in (tmp_path, tmp_path / "absent"):
        _refused(f"{other} is no saved state", load_state, other, model)
    _refused(f"cannot be saved as {folder}", save_state, folder, model, state)
    assert_same(load_state(folder, model), state)


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
    # The rings of two streams, then of the student alone, whose window is half as long.
    "ipttcd_stream": (2 * RING, F * D, 0),
    "deltanet": (0, 2 * 2 * 4 * 6, 2 * (R - 1) * 2 * (2 * 4 + 6)),
    "gated_deltanet": (0, 2 * 2 * 4 * 6, 2 * (R - 1) * 2 * (2 * 4 + 6)),
    "deltanet_hybrid": (2 * RING, 2 * 4 * 6, 0),
    "gated_deltanet_hybrid": (2 * RING, 2 * 4 * 6, (R - 1) * 2 * (2 * 4 + 6)),
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


@pytest.mark.slow
def test_a_million_tokens_take_the_memory_of_sixteen_thousand():
    # A separate process, with the code that users run. Its arrays come straight from the system,
    # since the bytes that glibc keeps of freed ones vary by five percent.
    options = {"env": environment(XLA_FLAGS="", MALLOC_MMAP_THRESHOLD_="65536")}
    short, long = json.loads(commands.output(Path(__file__), is_forked=False, **options))
    assert long["arrays"] == short["arrays"]
    assert long["resident"] <= 1.05 * short["resident"]


def _read_short_and_long() -> list[dict[str, int]]:
    sizes = {"num_layers": 1, "window": 256, "student_window": 128, "precision": Precision()}
    config = config_of("ipttcd", memory=MemoryConfig(chunk_size=1024), **sizes)
    model = inference_model(Transformer(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 11, (1, 1 << 20)).astype(np.int32)
    for _ in range(12):  # until nothing more is compiled or kept
        short = _most_held(model, tokens[:, : 1 << 14])
    return [short, _most_held(model, tokens)]


def _most_held(model, tokens: np.ndarray) -> dict[str, int]:
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
