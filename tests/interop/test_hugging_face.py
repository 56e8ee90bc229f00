"""Checkpoints of Hugging Face transformers: read as transformers reads them, or refused by name."""

import json
import subprocess
import sys

import commands
import ml_dtypes
import numpy as np
import pytest
from checks import distance, logits_of, refused
from hugging_face.make import CASES, SIZES, STORED, TOKENS, drawn

from ttcd_jax import Precision, load_run
from ttcd_jax.data.tokenizer import special_tokens, train_tokenizer
from ttcd_jax.errors import CheckpointError, DataError
from ttcd_jax.interop.checkpoint import names_on_disk
from ttcd_jax.interop.hugging_face import model_of, open_hugging_face, their_name
from ttcd_jax.interop.weight_files import write_safetensors
from ttcd_jax.nn.rope import YarnConfig
from ttcd_jax.train import layers_on_disk as disk

IMPORT = ("convert", "import", "--format=huggingface")


@pytest.fixture
def write(tmp_path):
    """Writes a case as a checkpoint folder; keys of `config.json` and the dtype changed."""

    def write(case, dtype=np.float32, max_bytes=10**9, tensors=(), **config):
        folder = tmp_path / case
        folder.mkdir()
        params = drawn(json.loads(str(STORED[f"{case}.shapes"]))) | dict(tensors)
        write_safetensors(folder, {x: params[x].astype(dtype) for x in params}, max_bytes)
        source = json.loads(str(STORED[f"{case}.config"])) | config
        (folder / "config.json").write_text(json.dumps(source))
        return folder

    return write


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, write):
    params, config, _ = open_hugging_face(write(case))
    rows = {name: leaf.read() for name, leaf in disk.by_name(params).items()}
    found = logits_of(disk.model_of(config, rows), TOKENS)
    assert distance(found, STORED[f"{case}.logits"]) < 1e-5


def test_both_places_of_rotary_settings_are_the_same():
    """`rope_theta` and `rope_scaling`, as before transformers 5; there `rope_scaling` has
    precedence over `rope_parameters`."""
    for case in CASES:
        source = json.loads(str(STORED[f"{case}.config"]))
        scaling = dict(source["rope_parameters"])
        old = {x: source[x] for x in source if x != "rope_parameters"}
        old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
        scaling["type"] = scaling.pop("rope_type")
        assert model_of(old).rope == model_of(source).rope
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    both["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    rope = model_of({"model_type": "llama", **SIZES} | both).rope
    assert (rope.base, rope.linear_factor) == (10_000.0, 2.0)


def test_absent_keys_have_the_values_of_transformers():
    sizes = {**SIZES, "num_attention_heads": 32, "hidden_size": 64}
    del sizes["num_key_value_heads"]
    llama, mistral = (model_of({"model_type": kind, **sizes}) for kind in ("llama", "mistral"))
    assert (llama.num_kv_heads, mistral.num_kv_heads) == (None, 8)
    assert (llama.window, mistral.window) == (None, 4096)
    own = {"model_type": "qwen3", **SIZES, "rope_theta": 1e6}
    assert model_of(own).head_size == 128
    scaling = {"type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 1.0}
    yarn = model_of(own | {"model_type": "llama", "rope_scaling": scaling}).rope.yarn
    assert yarn.magnitude == pytest.approx((0.05 * np.log(4) + 1) / (0.1 * np.log(4) + 1))
    assert yarn == YarnConfig(factor=4.0, original_length=64, magnitude=yarn.magnitude)


def _scaled(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "factor": 4.0} | settings}


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'|llama, mistral, qwen2"),
        ({"attention_bias": True}, "attention_bias=True|needs a bias of"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types are chunked_attention|needs"),
        ({"model_type": "qwen2", "layer_types": None} | SLIDING, "full_attention, sliding"),
        ({"quantization_config": {"bits": 4}}, "quantised weights|bfloat16"),
        (_scaled("longrope"), "rope_type 'longrope'|default"),
        (_scaled(["yarn"]), "rope_type ['yarn']|default"),
        ({"rope_scaling": [1], "rope_parameters": None}, "rope_scaling=[1]|object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 4}, "num_kv_heads 4|num_heads 6"),
        ({"hidden_size": "24"}, "hidden_size='24'|number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'|true nor false"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5|whole number"),
        ({"layer_types": ["full_attention"]}, "layer_types=|no list of 3, a kind per layer"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "sliding|model_type, sl"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "full_attention: |than"),
        (_scaled("yarn") | {"original_max_position_embeddings": 16}, "=16 is for some|rope_sc"),
        ({"model_type": "qwen3"} | SLIDING | {"max_window_layers": "0"}, "layers='0'|num"),
        ({"rope_parameters": {"full_attention": {"factor": 2.0}}}, "rope_parameters of full_att"),
        (_scaled("yarn", mscale="x"), "mscale='x'|number"),
        (_scaled("yarn", beta_fast=-1), "beta_fast=-1|above 0"),
    ],
)
def test_what_our_models_do_not_have_is_refused_by_name(changes, words, write):
    folder = write("llama", **changes)
    refused(f"config.json: |{words}", open_hugging_face, folder, error=DataError)


def test_weights_of_another_model_and_a_text_that_is_none_are_refused(write):
    norm = "model.layers.1.self_attn.q_norm.weight"
    surplus = write("llama", tensors={norm: np.ones(4, np.float32)})
    narrow = write("qwen3", intermediate_size=64)
    for folder, words in (
        (surplus, f"1 only in the checkpoint: {norm}"),
        (write("qwen2", num_hidden_layers=9000), "9000 layers"),
        (narrow, "up_proj.weight (40, 24) not (64, 24)"),
    ):
        refused(words, open_hugging_face, folder, error=CheckpointError)
    folder, words = write("qwen3_yarn"), "special_tokens_map.json|UTF-8|byte 15"
    (folder / "special_tokens_map.json").write_bytes(b'{"bos_token": "\xf8"}')
    refused(words, open_hugging_face, folder, error=DataError)


@pytest.mark.parametrize(
    ("mlp", "rest", "expected"),
    [
        (ml_dtypes.bfloat16, np.float16, "float32"),
        (ml_dtypes.bfloat16, np.float32, "float32"),
        (np.float16, np.float16, "float16"),
    ],
)
def test_dtypes_of_one_folder_have_one_that_holds_them(write, mlp, rest, expected):
    folder = write("llama")
    params = drawn(json.loads(str(STORED["llama.shapes"])))
    narrow = {x: params[x].astype(mlp if "mlp" in x else rest) for x in params}
    write_safetensors(folder, narrow)
    read, config, _ = open_hugging_face(folder)
    assert config.precision == Precision(param=expected)
    assert {leaf.read().dtype.name for leaf in disk.by_name(read).values()} == {expected}


def test_an_import_is_a_run_in_the_dtype_of_its_files(write, tmp_path):
    """Sharded, in bfloat16, with a tied head besides and a buffer of old versions."""
    head = drawn(json.loads(str(STORED["qwen2.shapes"])))["model.embed_tokens.weight"]
    extra = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}
    folder = write("qwen2", ml_dtypes.bfloat16, 8_000, extra, made_up=1)
    assert len([*folder.glob("*.safetensors")]) > 3
    (folder / "tokenizer.json").write_text(train_tokenizer(["some text"], 260)[:-1] + "}")
    texts = {"generation_config.json": '{"eos_token_id": [7, 1], "bos_token_id": 0}'}
    texts["chat_template.jinja"] = "{{ messages }} \N{SNOWMAN}"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    output = commands.output(*IMPORT, folder, tmp_path / "run", "--tokenizer=none")
    for line in ("qwen2: 15,000 parameters, bfloat16", "1 dropped", "effect: made_up"):
        assert line in output
    assert "stored head: equal to the embedding" in output
    names = ("config.json", "environment.json", "import.json", "checkpoints")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*names}
    facts = json.loads((tmp_path / "run" / "import.json").read_text())
    assert facts["text_files"] == texts
    run = load_run(tmp_path / "run")
    assert run.config.precision.param == run.config.precision.compute == "bfloat16"
    embedding = np.asarray(run.model.embedding[...])
    assert (embedding == head.astype(ml_dtypes.bfloat16)).all()
    assert distance(logits_of(run.model, TOKENS), STORED["qwen2.logits"]) < 0.1
    assert "not an empty folder" in commands.refused(*IMPORT, folder, tmp_path / "run")


def test_special_tokens_are_those_of_the_folder(tmp_path):
    def found(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return special_tokens(tmp_path)

    bos = {"adds_bos": True}
    assert found(config={"eos_token_id": None}) == {}
    assert found(config={"eos_token_id": 5}) == {"bos_id": 5, "eos_id": 5, "stop_ids": ()} | bos
    both = {"bos_token_id": 9, "eos_token_id": [3, 4]}
    assert found(generation_config=both) == {"bos_id": 9, "eos_id": 3, "stop_ids": (4, 5)} | bos
    added = [{"content": "<end>", "id": 4}, {"content": "<go>", "id": 2}]
    names = {"eos_token": {"content": "<end>"}, "bos_token": "<go>"}
    again = found(tokenizer={"added_tokens": added}, tokenizer_config=names)
    assert again == {"bos_id": 2, "eos_id": 4, "stop_ids": (3, 5), "adds_bos": False}
    processor = {"special_tokens": {"<go>": {"id": "<go>", "ids": [2]}}}
    tokenizer = {"added_tokens": added, "post_processor": processor}
    assert found(tokenizer=tokenizer) == again | bos
    for adds in (False, True):
        assert found(tokenizer_config=names | {"add_bos_token": adds})["adds_bos"] == adds
    assert found(tokenizer_config={"bos_token": None})["bos_id"] == 9
    for damaged in (7, {"a": 1}, [7, {"content": ["<go>"], "id": 2}]):
        assert found(tokenizer={"added_tokens": damaged})["bos_id"] == 9


_MEASURED = """
import contextlib, resource, sys
import jax
from pathlib import Path
from ttcd_jax.interop.hugging_face import open_hugging_face
from ttcd_jax.train.checkpoint import StreamedCheckpoints

jax.devices()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params = open_hugging_face(Path(sys.argv[1])).params
with contextlib.closing(StreamedCheckpoints(sys.argv[2])) as checkpoints:
    checkpoints.save(0, {"params": params})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_an_import_holds_a_file_at_most(tmp_path):
    """Llama 3.1 8B at an eighth of its width: 220 MiB in files of 40, with an embedding of 15."""
    source = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1792}
    source |= {"vocab_size": 16032, "num_hidden_layers": 28}
    source |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(source))
    tensors = {
        their_name(name): x.layout.to_theirs(np.ones(x.leaf.shape, ml_dtypes.bfloat16))
        for name, x in names_on_disk(model_of(source)).items()
    }
    files = write_safetensors(tmp_path, tensors, 40 << 20)
    largest = max(file.stat().st_size for file in files)
    line = [sys.executable, "-c", _MEASURED, tmp_path, tmp_path / "out"]
    output = subprocess.check_output(line, env=commands.cpu_environment(), text=True)
    # TensorStore and its threads take about 30 MiB, however large the model.
    assert int(output.split()[-1]) << 10 < 1.3 * largest + (40 << 20)
