"""Checkpoints in GGUF, the file format of llama.cpp: models of the families Llama, Qwen2 and Qwen3.

A file is a header (numbers, texts and lists by name; then name, shape, type and offset of every
tensor) and the tensors, most of them quantized in blocks, little endian. The header is read here,
since the library that dequantizes tensors allocates what a header says before it looks. What it
says becomes what a folder of transformers says.
"""

import collections
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ttcd_jax.data.compressed import import_for
from ttcd_jax.data.tokenizer import library_errors
from ttcd_jax.errors import DataError
from ttcd_jax.interop.checkpoint import CONFIG, ImportedModel, as_json, open_checkpoint
from ttcd_jax.interop.hugging_face import FAMILIES, HUGGING_FACE, ROPES
from ttcd_jax.interop.weight_files import StoredTensor, WeightFiles
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, pair_frequencies

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
# Types of values.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_SHORT, _LONG, _TEXT, _LIST = 4, 10, 8, 9
_NORMAL, _CONTROL, _USER = 1, 3, 4  # types of tokens
# Names in files, of a layer or not, and those in transformers.
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"attn_{x}": f"self_attn.{x[0]}_proj" for x in ("q", "k", "v", "output")},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
# Fields of an architecture without effect here, and those that have none with another value than 0.
_SILENT = {"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"}
_NEUTRAL = {f"rope.scaling.{x}_factor": 1 for x in ("attn", "yarn_attn", "yarn_ext")}
_NEUTRAL |= {"attention.causal": True, "split.count": 1}


class _Tensor(NamedTuple):
    """The shape that numpy has, the type, where its data begin after the header, their bytes."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    size: int


class _Header:
    """What a file says: `fields` by name, `tensors` by name. Raises `DataError` for a file that is
    truncated or damaged, before anything of the size that it states is allocated, and for a type of
    tensors that the library does not dequantize."""

    def __init__(self, path: Path) -> None:
        self.path, self._gguf = path, import_for(path, "gguf")
        if not path.stat().st_size:
            raise DataError(f"{path} is empty")
        self._data = np.asarray(np.memmap(path, np.uint8, "r"))
        if self._data[:4].tobytes() != _MAGIC:
            self._fail("it does not begin with GGUF")
        self._position = 4
        if (version := self._value(_SHORT)) not in _VERSIONS:
            self._fail(f"version {version} is not one of {_VERSIONS}, little endian")
        num_tensors, num_fields = self._values(_LONG, 2)
        fields = [(self._name(), self._value(self._value(_SHORT))) for _ in range(num_fields)]
        tensors = [(self._name(), self._tensor()) for _ in range(num_tensors)]
        self.fields, self.tensors = dict(fields), dict(tensors)
        self._used: set[str] = set()
        if len(self.fields) < num_fields or len(self.tensors) < num_tensors:
            self._fail("a name is there twice")
        self.architecture = self.get("general.architecture", str)
        alignment = self.get("general.alignment", int, _ALIGNMENT)
        if not 0 < alignment <= 2**16:
            self._fail(f"general.alignment is {alignment}")
        self._first = -(-self._position // alignment) * alignment
        for name, tensor in tensors:
            end = self._first + tensor.start + tensor.size
            if end > len(self._data):
                self._fail(f"tensor {name!r} ends at byte {end:,} of it")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of this type. Raises `DataError` for one of another, and for one that is missing
        if there is no default."""
        self._used.add(name)
        if (value := self.fields.get(name, default)) is None:
            self._fail(f"it has no {name}")
        is_number = type(value) in (int, float) and abs(value) < 3e38
        if not (is_number if kind is float else type(value) is kind):
            self._fail(f"{name} is {str(value)[:80]!r}, not a {kind.__name__}")
        # The shortest decimal number of the same float32: 1e-5, not 9.99999974e-06.
        return float(str(np.float32(value))) if kind is float else value

    def setting(self, name: str, kind: type, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{name}", kind, default)

    def check_all_used(self) -> None:
        """Raises `DataError` for what a field of the architecture asks for and nothing has read."""
        for name, value in self.fields.items():
            own = name.removeprefix(f"{self.architecture}.")
            if (own == name != "split.count") or name in self._used or own in _SILENT:
                continue
            if value != _NEUTRAL.get(own, 0):
                raise DataError(f"{self.path}: {name}={str(value)[:80]} is not supported")

    def read(self, name: str) -> np.ndarray:
        shape, kind, start, size = self.tensors[name]
        rows = self._data[self._first + start :][:size].reshape(math.prod(shape[:-1]), -1)
        return self._gguf.dequantize(rows, kind).astype(np.float32, copy=False).reshape(shape)

    def their_names(self) -> dict[str, str]:
        """The name of every tensor, by its name in transformers."""
        found = {}
        for name in self.tensors.keys() - {_ROPE_FACTORS}:
            stem, _, kind = name.rpartition(".")
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer and (part := _IN_LAYER.get(stem[layer.end() :])):
                stem = f"model.layers.{layer[1]}.{part}"
            found[f"{_NAMES.get(stem, stem)}.{kind}"] = name
        return found

    def _fail(self, problem: str) -> NoReturn:
        raise DataError(f"{self.path} is damaged, truncated or no GGUF file: {problem}")

    def _take(self, size: int) -> np.ndarray:
        if size > len(self._data) - self._position:
            self._fail(f"its header goes on after its end, byte {len(self._data):,}")
        self._position += size
        return self._data[self._position - size : self._position]

    def _value(self, kind: int) -> Any:
        if kind == _LIST:
            return self._values(self._value(_SHORT), self._value(_LONG))
        return self._values(kind, 1)[0]

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"type {kind} of a value is not known")
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        return self._take(count * dtype.itemsize).view(dtype).tolist()

    def _text(self) -> str:
        text = self._take(self._value(_LONG)).tobytes()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            self._fail(f"a text before byte {self._position} is not UTF-8 ({error.reason})")

    def _name(self) -> str:
        name = self._text()
        if not name.isprintable() or not 0 < len(name) <= 256:
            self._fail(f"{name[:80]!r} is not a name")
        return name

    def _tensor(self) -> _Tensor:
        shape = tuple(self._values(_LONG, self._value(_SHORT)))[::-1]
        number, start = self._value(_SHORT), self._value(_LONG)
        try:
            kind = self._gguf.GGMLQuantizationType(number)
            block, size = self._gguf.GGML_QUANT_SIZES[kind]
            self._gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except ValueError:
            self._fail(f"a tensor has the unknown type {number}")
        except NotImplementedError as error:
            raise DataError(
                f"{self.path} has tensors of type {kind.name}, which the library gguf does not "
                "dequantize: take a file of another quantization"
            ) from error
        if not 0 < len(shape) <= 4 or not 0 < math.prod(shape) < 2**48 or shape[-1] % block:
            self._fail(f"a tensor has shape {shape[:5]} in blocks of {block}")
        return _Tensor(shape, kind, start, math.prod(shape) // block * size)


def open_gguf(path: Path, folder: Path) -> ImportedModel:
    """The model in a file, whose tensors are dequantized to float32 as they are read. Writes into
    `folder` the small files that a folder of transformers would have.

    Raises `DataError` for a file that is damaged, and by name for what is not supported;
    `UserError` without the library gguf; and as `open_checkpoint` does.
    """
    header = _Header(path)
    config, names = _config(header), header.their_names()
    header.check_all_used()
    shapes = {theirs: header.tensors[names[theirs]].shape for theirs in sorted(names)}
    stored = {x: StoredTensor(path, np.dtype(np.float32), y) for x, y in shapes.items()}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def read(theirs: str) -> np.ndarray:
        value, part = header.read(names[theirs]), theirs.split(".")[-2]
        if header.architecture == "llama" and part in heads:
            # Rows in pairs, as they are rotated; transformers has the halves of a head.
            pairs = value.reshape(heads[part], -1, 2, *value.shape[1:])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        return value

    for name, text in (_texts(header) | {CONFIG: as_json(config)}).items():
        (folder / name).write_text(text)
    model = open_checkpoint(path, HUGGING_FACE, folder, WeightFiles(stored, read, (path,)))
    types = dict(collections.Counter(x.kind.name for x in header.tensors.values()))
    return model._replace(metadata=model.metadata | {"dequantized": types})


def _config(header: _Header) -> dict[str, Any]:
    path, architecture, setting = header.path, header.architecture, header.setting
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise DataError(f"{path} is of architecture {architecture!r}, not of {known}")
    heads, dim = setting("attention.head_count", int), setting("embedding_length", int)
    head_dim = setting("attention.key_length", int, dim // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := setting(name, int, head_dim)) != head_dim:
            raise DataError(
                f"{path}: {architecture}.{name} is {size} and the size of a head {head_dim}: other "
                "sizes of values, or heads rotated in part, are not supported"
            )
    embedding = header.tensors.get("token_embd.weight")
    base = setting("rope.freq_base", float, 10_000.0)
    return {
        "architectures": [FAMILIES[architecture].architecture],
        "torch_dtype": "float32",
        "model_type": architecture,
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "hidden_size": dim,
        "num_hidden_layers": setting("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": setting("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "intermediate_size": setting("feed_forward_length", int),
        "max_position_embeddings": setting("context_length", int),
        "rms_norm_eps": setting("attention.layer_norm_rms_epsilon", float),
        "rope_theta": base,
        "rope_scaling": _scaling(header, base, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _scaling(header: _Header, base: float, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling`, as llama.cpp reads a file: a factor alone is linear. Files have Llama 3's as
    divisors of the frequencies [head_dim / 2]: its settings are found by trying lengths that are
    powers of two, else the file is refused."""
    setting = header.setting
    kind, length = setting("rope.scaling.type", str, "linear"), setting("context_length", int)
    length = setting("rope.scaling.original_context_length", int, length)
    scaling = {"rope_type": kind, "factor": setting("rope.scaling.factor", float, 1)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = length
        for name, default in (("beta_fast", 32), ("beta_slow", 1)):
            scaling[name] = setting(f"rope.scaling.yarn_{name}", float, default)
    is_scaled = kind != "none" and (kind, scaling["factor"]) != ("linear", 1)
    if _ROPE_FACTORS not in header.tensors:
        return scaling if is_scaled else None
    factors, keys = header.read(_ROPE_FACTORS).ravel(), ROPES["llama3"][1]
    for length in (2**n for n in range(5, 20)):
        settings = Llama3Config(factor=float(factors.max()), original_length=length)
        ropes = RopeConfig(base=base), RopeConfig(base=base, llama3=settings)
        plain, scaled = (pair_frequencies(rope, head_dim)[0] for rope in ropes)
        is_theirs = factors.shape == plain.shape and not is_scaled
        if is_theirs and np.allclose(factors, plain / scaled, rtol=1e-4):
            values = {theirs: getattr(settings, ours) for theirs, ours in keys.items()}
            return {"rope_type": "llama3"} | values
    raise DataError(f"{header.path}: {_ROPE_FACTORS} are not those of Llama 3 alone")


def _texts(header: _Header) -> dict[str, str]:
    """The files of a tokenizer; none for a file without one."""
    if "tokenizer.ggml.model" not in header.fields:
        return {}
    kind = header.get("tokenizer.ggml.model", str)
    split = header.get("tokenizer.ggml.pre", str, "default")
    if kind != "gpt2" or split not in _SPLITS:
        raise DataError(
            f"{header.path} has a tokenizer of kind {kind}, {split}, not gpt2 with "
            f"{', '.join(_SPLITS)}: convert its transformers folder"
        )
    tokens, merges = (header.get(f"tokenizer.ggml.{x}", list) for x in ("tokens", "merges"))
    kinds = header.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    pairs = [tuple(str(merge).split(" ")) for merge in merges]
    is_whole = len(kinds) == len(tokens) == len({*tokens}) and {*map(type, tokens)} == {str}
    if not is_whole or {*map(len, pairs)} - {2}:
        raise DataError(f"{header.path} has a damaged tokenizer: copy the file again")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "eot": "eot", "eom": "eom"}
    ids = {x: header.get(f"tokenizer.ggml.{name}_token_id", int, -1) for x, name in names.items()}
    ids = {role: token for role, token in ids.items() if 0 <= token < len(tokens)}
    ends = {"eos_token_id": [ids[x] for x in ("eos", "eot", "eom") if x in ids]}
    ends |= {"bos_token_id": ids["bos"]} if "bos" in ids else {}
    named = [x for x in ("bos", "eos", "pad") if x in ids]
    settings: dict[str, Any] = {f"{x}_token": tokens[ids[x]] for x in named}
    begins = split == "llama-bpe"  # what llama.cpp does unless a file says otherwise
    settings["add_bos_token"] = header.get("tokenizer.ggml.add_bos_token", bool, begins)
    texts = {"tokenizer.json": _tokenizer(header.path, split, tokens, kinds, pairs)}
    if template := header.get("tokenizer.chat_template", str, ""):
        texts["chat_template.jinja"] = template
    texts["tokenizer_config.json"] = json.dumps(settings, indent=1, ensure_ascii=False)
    texts["generation_config.json"] = json.dumps(ends, indent=1)
    return texts


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, plain])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# How texts are divided before pairs are merged, by its name in files.
_SPLITS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}


def _tokenizer(path: Path, split: str, tokens: list[str], kinds: list[int], pairs: list) -> str:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    with library_errors(f"{path} describes no tokenizer"):
        model = models.BPE(vocabulary, pairs, ignore_merges=split == "llama-bpe")
        result = tokenizers.Tokenizer(model)
        result.pre_tokenizer = _SPLITS[split]
        result.decoder = decoders.ByteLevel()
        if split == "qwen2":
            result.normalizer = normalizers.NFC()
        for kind, add in ((_CONTROL, result.add_special_tokens), (_USER, result.add_tokens)):
            chosen = [token for token, x in zip(tokens, kinds, strict=True) if x == kind]
            is_special = kind == _CONTROL
            add([tokenizers.AddedToken(x, normalized=False, special=is_special) for x in chosen])
        return result.to_str()
