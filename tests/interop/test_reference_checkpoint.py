"""Checkpoints of the reference implementation, made of the reference values: read, evaluated, and
written again bit for bit."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import assert_same, distance

from tests.parity.golden import Golden, bound
from tests.parity.models import model_from_reference, model_type, stacked_params
from ttcd_jax.errors import CheckpointError, DataError, UserError
from ttcd_jax.interop.reference_config import export_reference, open_reference, transformer_config
from ttcd_jax.interop.weight_files import INDEX, SINGLE, open_weights, write_safetensors
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.train.layers_on_disk import by_name
from ttcd_jax.train.state import with_params

FOLDER = Path(__file__).parents[1] / "golden"
MODELS = sorted(FOLDER.glob("*_model*.npz"))
UNTIED, TIED = FOLDER / "ipttcd_model_vis2.npz", FOLDER / "ipttcd_model_swa_gqa_tied.npz"
EMBEDDING, HEAD = "model.embeddings.weight", "lm_head.weight"


@pytest.fixture
def write(tmp_path):
    """Writes a reference file as a checkpoint folder, its tensors or configuration changed."""

    def write(path, tensors=None, max_bytes=10**9, **config):
        golden = Golden(path)
        source = golden.config | {"model_type": model_type(golden)} | config
        write_safetensors(tmp_path, tensors or golden.group("param."), max_bytes)
        text = json.dumps(source, indent=3).replace("\n", "\r\n")
        (tmp_path / "config.json").write_bytes(text.encode())
        return tmp_path, golden

    return write


def import_reference(folder):
    """The model with its parameters as arrays."""
    opened = open_reference(folder)
    rows = {name: jnp.asarray(leaf.read()) for name, leaf in by_name(opened.params).items()}
    return opened._replace(params=stacked_params(rows, opened.config))


def _assert_exported(folder, imported):
    """Exporting gives what the folder holds."""
    given = dict(open_weights(folder))
    tensors, text = export_reference(*imported)
    assert text.encode() == (folder / "config.json").read_bytes()
    assert tensors.keys() == given.keys()
    for name, value in given.items():
        assert tensors[name].dtype == value.dtype
        assert tensors[name].shape == value.shape
        assert tensors[name].tobytes() == value.tobytes()


def test_an_imported_model_gives_the_references_logits(write):
    """One of them: tests of parity evaluate all, read by the same two functions."""
    folder, golden = write(FOLDER / "ipttcd_model_qknorm_full_tied.npz")
    params, config, _ = import_reference(folder)
    tokens = jnp.asarray(golden.arrays["in.input_ids"])
    logits = jax.jit(lambda params: with_params(config, params)(tokens))(params)
    assert distance(logits, golden.arrays["out.logits"]) < bound(golden, "float32", "out.logits")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_an_export_equals_its_import(path, write):
    folder, golden = write(path)
    imported = import_reference(folder)
    _assert_exported(folder, imported)
    tensors = golden.group("param.")
    source = golden.config | {"model_type": model_type(golden)}
    assert imported.config == transformer_config(source)
    assert_same(imported.params, model_from_reference(tensors, imported.config))
    assert imported.facts["num_parameters"] == sum(value.size for value in tensors.values())
    assert imported.facts["ignored_keys"] == imported.facts["dropped"] == []


@pytest.mark.parametrize("max_bytes", [10**9, 20_000])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_exports_of_narrow_and_sharded_checkpoints_equal_their_imports(write, dtype, max_bytes):
    tensors = {n: v.astype(dtype) for n, v in Golden(TIED).group("param.").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    folder, _ = write(TIED, tensors, max_bytes)
    assert (folder / INDEX).exists() == (max_bytes < 10**9)
    imported = import_reference(folder)
    assert imported.params["embedding"].dtype == jnp.float32
    _assert_exported(folder, imported)
    assert set(imported.facts["files"]) > {"config.json"}
    wide, text = export_reference(*imported, dtype="float32")
    assert {value.dtype.name for value in wide.values()} == {"float32"}
    assert json.loads(text)["torch_dtype"] == "float32"


def test_a_second_prefix_and_old_buffers_are_removed(write):
    tensors = {f"model.{n}": v for n, v in Golden(UNTIED).group("param.").items()}
    buffers = {
        "model.model.layers.0.mlp.ttt_lr": np.ones(1, np.float32),
        "model.model.layers.0.attn.rotary.inv_freq": np.ones(4, np.float32),
    }
    folder, golden = write(UNTIED, tensors | buffers)
    imported = import_reference(folder)
    names = sorted(name.removeprefix("model.") for name in buffers)
    assert imported.facts["dropped"] == names
    exported, _ = export_reference(*imported)
    assert exported.keys() == golden.group("param.").keys()
    write(UNTIED, tensors | {HEAD: tensors["model." + HEAD]})
    with pytest.raises(DataError, match="are the same tensor"):
        import_reference(folder)


def test_a_stored_tied_head_is_exported(write):
    tensors = Golden(TIED).group("param.")
    folder, _ = write(TIED, tensors | {HEAD: tensors[EMBEDDING]})
    imported = import_reference(folder)
    assert imported.facts["tied_head"] == "equal to the embedding"
    assert "head" not in imported.params
    _assert_exported(folder, imported)


def test_of_a_tied_head_that_differs_the_embedding_counts(write, caplog):
    tensors = Golden(TIED).group("param.")
    folder, _ = write(TIED, tensors | {HEAD: tensors[EMBEDDING] + 1})
    imported = import_reference(folder)
    assert "lm_head.weight differs from the embedding" in caplog.text
    np.testing.assert_array_equal(imported.params["embedding"], tensors[EMBEDDING])


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (UNTIED, {HEAD: None}, ["1 only in the model: lm_head.weight"]),
        (UNTIED, {"model.layers.1.mlp.b_proj": [1.0]}, ["1 only in the checkpoint"]),
        (UNTIED, {"model.layers.9.mlp_norm.weight": [1.0]}, ["only in the checkpoint", "layers.9"]),
        (UNTIED, {"model.layers.x.mlp_norm.weight": [1.0]}, ["only in the checkpoint"]),
        (UNTIED, {"model.layers.-1.mlp_norm.weight": [1.0]}, ["only in the checkpoint"]),
        (UNTIED, {"model.layers.": [1.0]}, ["only in the checkpoint"]),
        (UNTIED, {f"x{i}": [1.0] for i in range(9)}, ["9 only in", "and 5 more"]),
        (UNTIED, {"model.norm.weight": [1.0]}, ["shape: model.norm.weight (1,) not (32,)"]),
        (TIED, {EMBEDDING: None, "x": [2.0]}, [f"only in the model: {EMBEDDING};", "t: x"]),
    ],
)
def test_another_model_is_refused_with_the_differences(write, path, change, words):
    tensors = Golden(path).group("param.")
    tensors |= {name: np.asarray(v, np.float32) for name, v in change.items() if v is not None}
    folder, _ = write(path, {n: v for n, v in tensors.items() if change.get(n, v) is not None})
    with pytest.raises(CheckpointError) as caught:
        import_reference(folder)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"num_hidden_layers": 10**9}, CheckpointError, "1000000000 layers"),
        ({"hidden_size": 2**40}, CheckpointError, "another shape"),
        ({"vocab_size": 98}, CheckpointError, r"\(97, 32\) not \(98, 32\)"),
        ({"num_hidden_layers": True}, DataError, r"config\.json"),
        ({"num_heads": "4"}, DataError, r"config\.json.*num_heads"),
        ({"ttt_layers": [7]}, DataError, r"config\.json.*7"),
        ({"model_type": "llama"}, DataError, "llama"),
    ],
)
def test_a_configuration_of_another_model_is_refused(write, config, error, message):
    folder, _ = write(UNTIED, **config)
    with pytest.raises(error, match=message):
        import_reference(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1, "a": 2}', "[" * 100_000, "\x00"])
def test_a_configuration_that_is_no_json_is_refused(write, text):
    folder, _ = write(UNTIED)
    (folder / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json"):
        import_reference(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"config\.json"):
        import_reference(folder / SINGLE)


def test_a_model_of_our_own_comes_out_and_in_again(write, tmp_path):
    folder, _ = write(UNTIED)
    params, config, _ = import_reference(folder)
    tensors, text = export_reference(params, config)
    assert json.loads(text)["torch_dtype"] == "float32"
    again = tmp_path / "again"
    again.mkdir()
    write_safetensors(again, tensors)
    (again / "config.json").write_text(text)
    imported = import_reference(again)
    assert imported.config == config
    assert_same(imported.params, params)


def test_what_the_reference_cannot_express_or_a_dtype_not_hold_is_not_written(write):
    folder, _ = write(UNTIED)
    params, config, _ = import_reference(folder)
    other = config.replace(rope=config.rope.replace(base=1.5))
    assert json.loads(export_reference(params, other)[1])["rope_theta"] == 1.5
    wide = config.replace(method="deltanet_hybrid", memory=DeltaRuleConfig(value_expansion=2))
    with pytest.raises(UserError, match=r"cannot express layer 0\.delta\.rule\.value_expansion 2"):
        export_reference(params, wide)
    params["final_norm"] = params["final_norm"] * 1e6
    with pytest.raises(UserError, match=r"model\.norm\.weight.*float16 cannot hold"):
        export_reference(params, config, dtype="float16")
