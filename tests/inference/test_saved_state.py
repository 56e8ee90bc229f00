import json
import shutil

import jax
import numpy as np
import pytest
from checks import assert_same, randomize, refused
from small_models import config_of

from ttcd_jax.errors import CheckpointError
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.saved_state import load_state, save_state
from ttcd_jax.inference.state import start_state
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision
from ttcd_jax.train import digest

CONFIG = config_of(
    "ipttcd", vocab_size=16, num_layers=1, window=8, precision=Precision(compute="bfloat16")
)
TOKENS = np.arange(16).reshape(2, 8)


def _model(config=CONFIG, std=0.5):
    return inference_model(randomize(Transformer, config, std=std))


def _read(model, **options):
    start = start_state(model, 2, **options)
    return prefill(model, start, TOKENS, np.array([8, 6]))[1]


@pytest.fixture(scope="module")
def model():
    return _model()


@pytest.fixture(scope="module")
def state(model):
    return _read(model)


@pytest.fixture(scope="module")
def folder(model, state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states") / "deep" / "state"
    save_state(folder, model, state)
    return folder


def test_a_state_comes_back_bit_for_bit(model, state, folder):
    loaded = load_state(folder, model)
    assert_same(loaded, state)
    assert [x.dtype for x in jax.tree.leaves(loaded)] == [x.dtype for x in jax.tree.leaves(state)]
    assert {str(x.dtype) for x in jax.tree.leaves(loaded)} >= {"bfloat16", "float32", "int32"}
    assert loaded.position.tolist() == [8, 6]
    assert {path.name for path in folder.iterdir()} == {
        *("state.safetensors", "state.json", "DIGEST.json")
    }
    assert json.loads((folder / "state.json").read_text())["tokens_read"] == [8, 6]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_text_goes_on_from_a_loaded_state_as_from_the_state(model, state, folder):
    kept = jax.tree.map(lambda x: x.copy(), state)
    tokens = np.array([3, 5])
    assert_same(decode(model, load_state(folder, model), tokens), decode(model, kept, tokens))


def test_full_attention_keeps_its_room(tmp_path):
    model = _model(CONFIG.replace(method="full", window=None, fast_layers=(), memory=None))
    state = _read(model, max_length=21)
    save_state(tmp_path / "state", model, state)
    assert_same(load_state(tmp_path / "state", model), state)


def _refused(words, *args):
    refused(words, *args, error=CheckpointError)


def test_another_model_is_refused_by_what_differs(folder):
    _refused("window: 8 -> 6;", load_state, folder, _model(CONFIG.replace(window=6)))
    other = CONFIG.replace(memory=CONFIG.memory.replace(eta=0.5))
    _refused("memory.eta: | -> 0.5;", load_state, folder, _model(other))
    _refused("other parameters of the same", load_state, folder, _model(std=0.25))


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "DIGEST.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named(model, copy, name, damage):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 0x80
    if damage == "remove":
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(data if damage == "flip" else data[: len(data) // 2])
    _refused(name, load_state, copy, model)


@pytest.mark.parametrize("name", ["/dev/zero", "../../../../../../etc/passwd", "../state.json"])
def test_a_digest_names_the_files_of_its_folder_alone(model, copy, name):
    entries = json.loads((copy / "DIGEST.json").read_text()) | {name: [0, "0"]}
    (copy / "DIGEST.json").write_text(json.dumps(entries))
    _refused(f"{name}: missing", load_state, copy, model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("state.json", x) for x in (b"null", b"[" * 100_000, b'{"tokens_read": 5}')),
        ("state.safetensors", b"nonsense"),
        ("state.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
        *(("rows", x) for x in ([0] * 3_000_000, 5, [])),
    ],
)
def test_a_sealed_state_of_nonsense_is_refused(model, copy, name, content):
    if name == "rows":
        name, record = "state.json", json.loads((copy / "state.json").read_text())
        content = json.dumps(record | {"tokens_read": content}).encode()
    (copy / name).write_bytes(content)
    digest.seal(copy)
    _refused(str(copy.parent), load_state, copy, model)


def test_a_folder_without_a_state_or_with_one_is_refused(model, state, folder, tmp_path):
    for other in (tmp_path, tmp_path / "absent"):
        _refused(f"{other} is no saved state", load_state, other, model)
    _refused(f"cannot be saved as {folder}", save_state, folder, model, state)
    assert_same(load_state(folder, model), state)
