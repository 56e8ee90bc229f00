"""GGUF files: models as transformers reads them, tokenizers, refusals; written by the library."""

import contextlib
import json
import random

import gguf
import numpy as np
import pytest
import tokenizers
from checks import distance, logits_of, refused
from hugging_face.make import FILE, TOKENS, drawn
from tokenizers import pre_tokenizers

from ttcd_jax.data.tokenizer import special_tokens
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.interop import gguf_files
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, YarnConfig, pair_frequencies
from ttcd_jax.train.layers_on_disk import by_name, model_of

TEXT = "It's 1234 dogs,  \n\n a café — and 42 quick foxes' tails.\t"
Q = gguf.GGMLQuantizationType


def _write(path, params, config, quantization=None, fields=(), factors=None):
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads := config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    for add, *values in fields:
        getattr(writer, add)(*values)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    rows = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}
    for theirs, value in params.items():
        name, value = names.get_name(theirs, (".weight", ".bias")), value.astype(np.float32)
        if kind == "llama" and (count := rows.get(theirs.split(".")[-2])):  # as it rotates them
            halves = value.reshape(count, 2, -1, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        quantized = quantization if value.ndim == 2 else None
        value = value if quantized is None else gguf.quantize(value, quantized)
        writer.add_tensor(name, value, raw_dtype=quantized)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


@pytest.fixture(scope="module")
def stored():
    with np.load(FILE) as file:
        return dict(file)


def open_gguf(path):
    """(the model, its small files by name)."""
    folder = path.with_suffix(".files")
    folder.mkdir(exist_ok=True)
    model = gguf_files.open_gguf(path, folder)
    return model, {file.name: file.read_text() for file in folder.iterdir()}


def _case(stored, case):
    shapes, config = (json.loads(str(stored[f"{case}.{x}"])) for x in ("shapes", "config"))
    return drawn(shapes), config


def _model(path):
    (params, config, facts), _ = open_gguf(path)
    rows = {name: leaf.read() for name, leaf in by_name(params).items()}
    return model_of(config, rows), facts


@pytest.mark.parametrize("case", ["llama", "llama_llama3", "qwen2", "qwen3", "llama_tied_linear"])
def test_logits_are_those_of_transformers(case, stored, tmp_path):
    params, config = _case(stored, case)
    rope, factors, fields = config["rope_parameters"], None, []
    if rope["rope_type"] == "linear":
        fields = [("add_rope_scaling_factor", rope["factor"])]
    elif rope["rope_type"] == "llama3":
        settings = Llama3Config(factor=rope["factor"], original_length=32)
        ropes = (RopeConfig(base=rope["rope_theta"], llama3=x) for x in (None, settings))
        plain, scaled = (pair_frequencies(x, config["head_dim"])[0] for x in ropes)
        factors = plain / scaled
    model, facts = _model(_write(tmp_path / "model.gguf", params, config, None, fields, factors))
    assert distance(logits_of(model, TOKENS), stored[f"{case}.logits"]) < 1e-5
    assert facts["dequantized"] == {"F32": len(params) + (factors is not None)}


def test_yarn_has_the_corners_of_the_file(stored, tmp_path):
    params, config = _case(stored, "llama")
    fields = [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]
    names = ("factor", 8.0), ("yarn_beta_fast", 16.0), ("yarn_beta_slow", 2.0)
    fields += [(f"add_rope_scaling_{name}", value) for name, value in names]
    (_, found, _), _ = open_gguf(_write(tmp_path / "model.gguf", params, config, None, fields))
    corners = {"fast_turns": 16.0, "slow_turns": 2.0}
    assert found.rope.yarn == YarnConfig(factor=8.0, original_length=64, **corners)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1, Q.Q5_0])
def test_quantized_tensors_are_dequantized_by_the_library(kind, stored, tmp_path):
    params, config = _case(stored, "llama")
    config |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 61, "head_dim": 32}
    rng = np.random.default_rng(0)
    shapes = {"up_proj": (512, 256), "gate_proj": (512, 256), "down_proj": (256, 512)}
    shapes |= {"q_proj": (192, 256), "k_proj": (64, 256), "v_proj": (64, 256)}
    shapes |= {"o_proj": (256, 192), "embed_tokens": (61, 256), "lm_head": (61, 256)}
    params = {
        name: rng.standard_normal(shapes.get(name.split(".")[-2], (256,)), np.float32)
        for name in params
    }
    rounded = {
        name: gguf.dequantize(gguf.quantize(x, kind), kind) if x.ndim == 2 else x
        for name, x in params.items()
    }
    (found, _, facts), _ = open_gguf(_write(tmp_path / "quantized.gguf", params, config, kind))
    (plain, _, _), _ = open_gguf(_write(tmp_path / "plain.gguf", rounded, config))
    assert facts["dequantized"].keys() == {"F32", kind.name}
    for name, leaf in by_name(plain).items():
        np.testing.assert_array_equal(by_name(found)[name].read(), leaf.read())


def _vocabulary():
    """Bytes, two merges, and special tokens in their middle."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters[:9], "<|end|>", "<|user|>", *letters[9:], "Ġa", "12", "Ġan"], ["Ġ a", "Ġa n"]


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_tokenizer_is_that_of_its_tokens_and_merges(split, stored, tmp_path):
    params, config = _case(stored, "llama")
    tokens, merges = _vocabulary()
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    fields = [("add_tokenizer_model", "gpt2"), ("add_tokenizer_pre", split)]
    fields += [("add_token_list", tokens), ("add_token_types", kinds), ("add_token_merges", merges)]
    fields += [("add_bos_token_id", 0), ("add_eos_token_id", 10), ("add_chat_template", "{{ x }}")]
    _, texts = open_gguf(_write(tmp_path / "m.gguf", params, config, None, fields))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tokenizer = tokenizers.Tokenizer.from_str(texts["tokenizer.json"])
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(tokens)}
    assert tokenizer.encode(" and<|user|>").tokens == ["Ġan", "d", "<|user|>"]
    ends = {"stop_ids": (), "adds_bos": split == "llama-bpe"}
    assert special_tokens(tmp_path) == {"bos_id": 0, "eos_id": 10} | ends
    assert texts["chat_template.jinja"] == "{{ x }}"
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234 a\n\nb")]
    digits = {"smollm": ["1", "2", "3", "4"], "llama-bpe": ["123", "4"], "gpt-2": ["Ġ1234"]}
    expected = digits.get(split, ["1", "2", "3", "4"])
    assert [word for word in words if any(x.isdigit() for x in word)] == expected


@pytest.mark.parametrize(
    ("field", "changes", "words"),
    [
        (("add_expert_count", 8), {}, "llama.expert_count=8 is not supported"),
        (("add_sliding_window", 64), {}, "llama.attention.sliding_window=64 is not supported"),
        (("add_attn_logit_softcapping", 50.0), {}, "attn_logit_softcapping=50.0 is not supported"),
        (("add_attention_scale", 1.0), {}, "llama.attention.scale=1.0 is not supported"),
        (("add_causal_attention", False), {}, "llama.attention.causal=False is not supported"),
        (("add_uint16", "split.count", 2), {}, "split.count=2 is not supported"),
        (("add_rope_scaling_yarn_attn_factor", 2.0), {}, "yarn_attn_factor=2.0 is not supported"),
        (("add_value_length", 8), {}, "llama.attention.value_length is 8 and the size of a head 4"),
        (("add_rope_dimension_count", 2), {}, "dimension_count is 2 and the size of a head 4"),
        (("add_tokenizer_model", "llama"), {}, "tokenizer of kind llama, default, not gpt2 with"),
        (("add_tokenizer_model", "gpt2"), {}, "kind gpt2, default, not gpt2 with gpt-2, smollm"),
        (None, {"model_type": "gemma"}, "of architecture 'gemma', not of llama, qwen2, qwen3"),
        (None, {"rms_norm_eps": float("nan")}, "layer_norm_rms_epsilon is 'nan', not a float"),
    ],
)
def test_what_is_not_supported_is_named(field, changes, words, stored, tmp_path):
    params, config = _case(stored, "llama")
    fields = [] if field is None else [field]
    path = _write(tmp_path / "model.gguf", params, config | changes, None, fields)
    refused(words, open_gguf, path, error=DataError)


def test_damaged_files_are_refused_before_they_take_memory(stored, tmp_path):
    """Every number of the header at its largest, cuts, and random bytes."""
    tokens, merges = _vocabulary()
    fields = [("add_tokenizer_model", "gpt2"), ("add_tokenizer_pre", "gpt-2")]
    fields += [("add_token_list", tokens), ("add_token_merges", merges)]
    path = _write(tmp_path / "model.gguf", *_case(stored, "llama"), None, fields)
    whole = path.read_bytes()
    end = whole.index(b"token_embd.weight") + 400
    draw = random.Random(0)
    for number in range(400):
        data = bytearray(whole)
        kind, at = number % 3, draw.randrange(end)
        if kind == 0:
            data[at : at + 8] = b"\xff" * 7 + b"\x7f"
        elif kind == 1:
            del data[at:]
        else:
            data[at] = draw.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            (params, _, _), _ = open_gguf(path)
            for leaf in by_name(params).values():
                leaf.read()
