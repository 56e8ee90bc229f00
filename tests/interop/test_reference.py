"""Checkpoints of the reference implementation, made of the reference values: their configurations
both ways, and what is read, evaluated, and written again bit for bit."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checks import assert_same, bits, refused

from tests.parity.checks import model_from_reference, model_type, stacked_params
from tests.parity.golden import Golden
from ttcd_jax.errors import CheckpointError, DataError
from ttcd_jax.interop.reference_config import (
    export_reference,
    families,
    open_reference,
    reference_config,
    transformer_config,
    unread_keys,
)
from ttcd_jax.interop.weight_files import INDEX, SINGLE, open_weights, write_safetensors
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.train.layers_on_disk import by_name

FOLDER = Path(__file__).parents[1] / "golden"
MODELS = sorted(FOLDER.glob("*_model*.npz"))
UNTIED, TIED = FOLDER / "ipttcd_model_vis2.npz", FOLDER / "ipttcd_model_swa_gqa_tied.npz"
EMBEDDING, HEAD = "model.embeddings.weight", "lm_head.weight"


def _source(golden) -> dict:
    return golden.config | {"model_type": model_type(golden)}


@pytest.fixture
def write(tmp_path):
    """Writes a reference file as a checkpoint folder, its tensors or configuration changed."""

    def write(path, tensors=None, max_bytes=10**9, **config):
        golden = Golden(path)
        source = _source(golden) | config
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
    """Exporting gives what the folder holds, bit for bit."""
    tensors, text = export_reference(*imported)
    assert text.encode() == (folder / "config.json").read_bytes()
    given = bits(open_weights(folder))
    assert bits(tensors) == {x: given[x] for x in given if x not in imported.metadata["dropped"]}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_an_export_equals_its_import_and_a_configuration_survives_the_way_out_and_back(path, write):
    folder, golden = write(path)
    imported = import_reference(folder)
    _assert_exported(folder, imported)
    tensors = golden.group("param.")
    again = reference_config(imported.config)
    assert transformer_config(again) == imported.config == transformer_config(_source(golden))
    assert unread_keys(again) == []
    assert_same(imported.params, model_from_reference(tensors, imported.config))
    assert imported.metadata["num_parameters"] == sum(value.size for value in tensors.values())
    assert imported.metadata["ignored_keys"] == imported.metadata["dropped"] == []


BUFFERS = ("model.layers.0.attn.rotary.inv_freq", "model.layers.0.mlp.ttt_lr")  # of old runs


@pytest.mark.parametrize("max_bytes", [10**9, 20_000])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_exports_of_narrow_and_sharded_checkpoints_equal_their_imports(write, dtype, max_bytes):
    tensors = {n: v.astype(dtype) for n, v in Golden(TIED).group("param.").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    tensors |= {name: np.ones(4, np.float32) for name in BUFFERS}
    folder, _ = write(TIED, tensors, max_bytes)
    assert (folder / INDEX).exists() == (max_bytes < 10**9)
    imported = import_reference(folder)
    assert imported.params["embedding"].dtype == jnp.float32
    assert imported.metadata["dropped"] == [*BUFFERS]
    _assert_exported(folder, imported)
    assert set(imported.metadata["files"]) > {"config.json"}
    wide, text = export_reference(*imported, dtype="float32")
    assert {value.dtype.name for value in wide.values()} == {"float32"}
    assert json.loads(text)["torch_dtype"] == "float32"


def test_a_second_prefix_is_removed(write):
    tensors = {f"model.{n}": v for n, v in Golden(UNTIED).group("param.").items()}
    folder, golden = write(UNTIED, tensors)
    exported, _ = export_reference(*import_reference(folder))
    assert bits(exported) == bits(golden.group("param."))
    write(UNTIED, tensors | {HEAD: tensors["model." + HEAD]})
    refused("lm_head.weight' is there with a", import_reference, folder, error=DataError)


def test_a_stored_tied_head_is_exported_or_the_embedding_counts(write, caplog):
    tensors = Golden(TIED).group("param.")
    folder, _ = write(TIED, tensors | {HEAD: tensors[EMBEDDING]})
    imported = import_reference(folder)
    assert imported.metadata["tied_head"] == "equal to the embedding"
    assert "head" not in imported.params
    _assert_exported(folder, imported)
    folder, _ = write(TIED, tensors | {HEAD: tensors[EMBEDDING] + 1})
    imported = import_reference(folder)
    assert "lm_head.weight differs from the embedding" in caplog.text
    np.testing.assert_array_equal(imported.params["embedding"], tensors[EMBEDDING])


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (UNTIED, {HEAD: None}, "1 only in the model: lm_head.weight"),
        (UNTIED, {"model.layers.9.mlp_norm.weight": [1.0]}, "1 only in the checkpoint|layers.9"),
        (UNTIED, {"model.layers.": [1.0]}, "only in the checkpoint"),
        (UNTIED, {f"x{i}": [1.0] for i in range(9)}, "9 only in|and 5 more"),
        (UNTIED, {"model.norm.weight": [1.0]}, "shape: model.norm.weight (1,) not (32,)"),
        (TIED, {EMBEDDING: None, "x": [2.0]}, f"only in the model: {EMBEDDING};|t: x"),
    ],
)
def test_another_model_is_refused_with_the_differences(write, path, change, words):
    tensors = Golden(path).group("param.") | change
    tensors = {n: np.asarray(x, np.float32) for n, x in tensors.items() if x is not None}
    folder, _ = write(path, tensors)
    refused(words, import_reference, folder, error=CheckpointError)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"num_hidden_layers": 10**9}, CheckpointError, "1000000000 layers"),
        ({"hidden_size": 2**40}, CheckpointError, "another shape"),
        ({"vocab_size": 98}, CheckpointError, "(97, 32) not (98, 32)"),
        ({"num_hidden_layers": True}, DataError, "config.json"),
        ({"num_heads": "4"}, DataError, "config.json|num_heads"),
        ({"ttt_layers": [7]}, DataError, "config.json|7"),
        ({"model_type": "llama"}, DataError, "llama"),
        *((text, DataError, "config.json") for text in ("[]", '{"a": 1, "a": 2}', "[" * 100_000)),
        (None, DataError, "config.json"),
    ],
)
def test_a_configuration_of_another_model_or_none_is_refused(write, config, error, words):
    folder, _ = write(UNTIED, **(config if isinstance(config, dict) else {}))
    if isinstance(config, str):
        (folder / "config.json").write_text(config)
    if config is None:
        (folder / "config.json").unlink()
        folder /= SINGLE
    refused(words, import_reference, folder, error=error)


def test_a_model_of_our_own_comes_out_and_in_again_or_is_not_written(write):
    folder, golden = write(UNTIED)
    params, config, _ = import_reference(folder)
    tensors, text = export_reference(params, config)
    assert json.loads(text)["torch_dtype"] == "float32"
    assert transformer_config(json.loads(text)) == config
    assert_same(tensors, golden.group("param."))
    other = config.replace(rope=config.rope.replace(base=1.5))
    assert json.loads(export_reference(params, other)[1])["rope_theta"] == 1.5
    wide = config.replace(method="deltanet_hybrid", memory=DeltaRuleConfig(value_expansion=2))
    refused("layer 0.delta.rule.value_expansion 2", export_reference, params, wide)
    params["final_norm"] = params["final_norm"] * 1e6
    refused("model.norm.weight|float16", export_reference, params, config, dtype="float16")


SMALLEST = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2}
ABSENT = {
    "ipttcd": {
        **{"chunk_size": 8192, "eta": 0.3, "num_taps": 5, "student_window": 8192},
        **{"teacher_conv_init": "zeros", "student_conv_init": "zeros", "output": "teacher"},
        **{"renorm_chunks": None, "normalizes_keys": True},
    },
    "ipttt": {"is_conv_causal": False, "target": "hidden", "proj_init": "gaussian_diagonal"},
    "gated_deltanet": {"head_dim": 256, "value_expansion": 2},
    "deltanet": {"head_dim": 4, "value_expansion": 1},
    "lact": {"low_rank": None, "has_momentum": False},
}


@pytest.mark.parametrize("name", families())
def test_absent_keys_take_the_class_defaults(name):
    extra = {"ttt_layers": [0], "num_attn_heads": 2, "num_lact_heads": 2}
    config = transformer_config(SMALLEST | extra | {"model_type": name, "window_size": 8192})
    assert (config.qk_norm_eps, config.norm_eps, config.has_tied_head) == (1e-5, 1e-6, False)
    assert config.mlp_dim == 256
    for field, value in ABSENT.get(config.method, {}).items():
        assert getattr(config if hasattr(config, field) else config.memory, field) == value, field


def test_aliases_and_switches():
    source = SMALLEST | {"model_type": "ipttt", "ttt_layers": [0], "ttt_target": "input_embeds"}
    assert transformer_config(source).memory.target == "embedding"
    off = transformer_config(source | {"ttt_mode": False})
    assert off.method == "full"
    raw = SMALLEST | {"model_type": "ipttcdv8", "ttt_layers": [0], "ttt_weight_renorm": True}
    memory = transformer_config(raw | {"ttt_output_use_teacher_conv": False}).memory
    assert (memory.output, memory.renorm_chunks) == ("teacher_raw", 4)
    assert unread_keys(source | {"ttt_magic": 1, "_comment": ""}) == ["ttt_magic"]
    refused("vocab_size", transformer_config, {"model_type": "transformer"}, error=DataError)


IPTTCD = SMALLEST | {"model_type": "ipttcdv9", "ttt_layers": [0]}
GPT, PLAIN, DELTA = ({"model_type": name} for name in ("gpt2", "transformer", "delta_net"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (GPT, "gpt2|ipttcdv9"),
        ({"model_type": ["ipttcdv9"]}, "model_type"),
        ({"ttt_output_source": "techer"}, "'techer'|'student'"),
        ({"use_output_gate": True}, "use_output_gate|True"),
        ({"hidden_act": "gelu"}, "hidden_act|gelu"),
        ({"ttt_proj_init": "sparse"}, "ttt_proj_init|sparse|diagonal"),
        ({"ttt_proj_init": ["zero"]}, "ttt_proj_init"),
        ({"ttt_chunk": None}, "ttt_chunk"),
        ({"ttt_visible_chunks": "1"}, "ttt_visible_chunks"),
        ({"ttt_mode": "no"}, "ttt_mode"),
        ({"norm_eps": 10**400}, "norm_eps"),
        (DELTA | {"expand_k": 0}, "expand_k"),
        (DELTA | {"use_gate": True}, "use_gate"),
        (PLAIN | {"rope_scaling": {"a": 1}}, "rope_scaling"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(changes, words):
    refused(words, transformer_config, IPTTCD | changes, error=DataError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "ipttcd_ideal", "memory": None}, "ipttcd_ideal"),
        ({"student_window": 8000}, "student window"),
        ({"has_qk_norm": True, "qk_norm_eps": 1e-6}, "eps"),
    ],
)
def test_what_the_reference_has_not_is_refused(changes, words):
    refused(words, reference_config, transformer_config(IPTTCD).replace(**changes))
