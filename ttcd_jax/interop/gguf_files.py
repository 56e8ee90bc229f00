"""Checkpoints in GGUF, the file format of llama.cpp: models of the families Llama, Qwen2 and Qwen3.

A file is a header (numbers, texts and lists by name; then name, shape, type and offset of every
tensor) and the tensors, most of them quantized in blocks. All are little endian. The header is read
here, since the library that dequantizes tensors allocates what a header says before it looks.

What it says becomes what a folder of transformers says: a `config.json`, weights by its names, read
and dequantized one by one, and the files of its tokenizer.
"""

import collections
import json
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ttcd_jax.data.compressed import import_for
from ttcd_jax.data.tokenizer import library_errors
from ttcd_jax.errors import DataError
from ttcd_jax.interop.weight_files import StoredTensor, WeightFiles
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, pair_frequencies

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_MOST = {"fields": 10_000, "tensors": 100_000, "dimensions": 4}
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST = 8, 9  # types of values
_NORMAL, _CONTROL, _USER = 1, 3, 4  # types of tokens

# Parts of names: of a file, and of transformers.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
# Fields of an architecture that change what its layers compute.
_REFUSED = ("expert_count", "attention.sliding_window", "attention.scale", "rope.scale_linear")
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Tensor(NamedTuple):
    """A tensor of a file: `shape` as numpy has it, the number of its type, where its data begin."""

    shape: tuple[int, ...]
    kind: int
    start: int


class _Header:
    """What a file says: `fields` by name, `tensors` by name. Raises `DataError` for a file that is
    truncated or damaged, before anything of the size that it states is allocated."""

    def __init__(self, path: Path, data: mmap.mmap, gguf: ModuleType) -> None:
        self.path, self._data, self._position, self._gguf = path, data, 0, gguf
        if data[:4] != _MAGIC:
            self._fail("it does not begin with GGUF")
        self._position = 4
        if (version := self._number("I")) not in _VERSIONS:
            self._fail(f"version {version} is not one of {_VERSIONS}, little endian")
        num_tensors, num_fields = self._count("tensors"), self._count("fields")
        self.fields = dict(self._field() for _ in range(num_fields))
        described = [self._description() for _ in range(num_tensors)]
        self.tensors = dict(described)
        if len(self.fields) < num_fields or len(self.tensors) < num_tensors:
            self._fail("a name is there twice")
        alignment = self.get("general.alignment", int, _ALIGNMENT)
        if not 0 < alignment <= 2**16:
            self._fail(f"general.alignment is {alignment}")
        first = -(-self._position // alignment) * alignment
        for name, tensor in self.tensors.items():
            start = first + tensor.start
            if start + self.num_bytes(name) > len(data):
                self._fail(f"tensor {name!r} ends at byte {start + self.num_bytes(name):,} of it")
            self.tensors[name] = tensor._replace(start=start)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of this type. Raises `DataError` for one of another, and for one that is missing
        if there is no default."""
        if name not in self.fields:
            if default is None:
                self._fail(f"it has no {name}")
            return default
        value = self.fields[name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            self._fail(f"{name} is {str(value)[:80]!r}, not a {kind.__name__}")
        return value

    def type_name(self, name: str) -> str:
        return self._gguf.GGMLQuantizationType(self.tensors[name].kind).name

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        shape, kind, _ = self.tensors[name]
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        return math.prod(shape) // block * size

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantized."""
        shape, kind, start = self.tensors[name]
        data = np.frombuffer(self._data, np.uint8, self.num_bytes(name), start)
        rows = data.reshape(math.prod(shape[:-1]), -1)
        kind = self._gguf.GGMLQuantizationType(kind)
        return self._gguf.dequantize(rows, kind).astype(np.float32, copy=False).reshape(shape)

    def _fail(self, problem: str) -> NoReturn:
        raise DataError(f"{self.path} is damaged, truncated or no GGUF file: {problem}")

    def _take(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        start, self._position = self._position, self._position + size
        if self._position > len(self._data):
            self._fail(f"its header goes on after its end, byte {len(self._data):,}")
        return start

    def _number(self, code: str) -> Any:
        layout = f"<{code}"
        return struct.unpack_from(layout, self._data, self._take(struct.calcsize(layout)))[0]

    def _count(self, what: str) -> int:
        if (count := self._number("Q" if what != "dimensions" else "I")) > _MOST[what]:
            self._fail(f"it has {count:,} {what}, at most {_MOST[what]:,} are read")
        return count

    def _text(self) -> str:
        size = self._number("Q")
        start = self._take(size)
        try:
            return self._data[start : start + size].decode()
        except UnicodeDecodeError as error:
            self._fail(f"a text at byte {start} is not UTF-8 ({error.reason})")

    def _value(self, kind: int, *, is_inner: bool = False) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST and not is_inner:
            inner, count = self._number("I"), self._number("Q")
            if count > len(self._data) - self._position:  # every entry has a byte or more
                self._fail(f"a list has {count:,} entries")
            if inner in _SCALARS:
                layout = f"<{count}{_SCALARS[inner]}"
                start = self._take(struct.calcsize(layout))
                return [*struct.unpack_from(layout, self._data, start)]
            return [self._value(inner, is_inner=True) for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"type {kind} of a value is not known")
        return self._number(_SCALARS[kind])

    def _name(self) -> str:
        name = self._text()
        if not name.isprintable() or not 0 < len(name) <= 256:
            self._fail(f"{name[:80]!r} is not a name")
        return name

    def _field(self) -> tuple[str, Any]:
        return self._name(), self._value(self._number("I"))

    def _description(self) -> tuple[str, _Tensor]:
        name = self._name()
        shape = tuple(self._number("Q") for _ in range(self._count("dimensions")))[::-1]
        kind, start = self._number("I"), self._number("Q")
        known = {x.value for x in self._gguf.GGMLQuantizationType}
        if kind not in known:
            self._fail(f"tensor {name!r} has the unknown type {kind}")
        block, _ = self._gguf.GGML_QUANT_SIZES[kind]
        if not shape or not 0 < math.prod(shape) < 2**48 or shape[-1] % block:
            self._fail(f"tensor {name!r} has shape {shape} in blocks of {block}")
        return name, _Tensor(shape, kind, start)


class GGUF(NamedTuple):
    """A file as a folder of transformers: the object of its `config.json`, its weights, the types
    of its tensors by count, and the content of its text files by name."""

    config: dict[str, Any]
    weights: WeightFiles
    types: dict[str, int]
    texts: dict[str, str]


def open_gguf(path: Path) -> GGUF:
    """The model in a file; nothing but its header is read yet. Tensors are float32.

    Raises `DataError` for a file that is damaged, and by name for an architecture, an option, a
    type of tensors or a tokenizer that is not supported; `UserError` without the library gguf.
    """
    gguf = import_for(path, "gguf")
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # it is empty
            raise DataError(f"{path} is empty") from error
    header = _Header(path, data, gguf)
    _check_types(header, gguf)
    names, config = _their_names(header), _config(header)
    stored = {
        theirs: StoredTensor(path, np.dtype(np.float32), header.tensors[name].shape)
        for theirs, name in sorted(names.items())
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def read(theirs: str) -> np.ndarray:
        value, part = header.read(names[theirs]), names[theirs].split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            # Rows in pairs, as they are rotated; transformers has the halves of a head.
            pairs = value.reshape(heads[part], -1, 2, *value.shape[1:])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        return value

    counts = collections.Counter(map(header.type_name, header.tensors))
    return GGUF(config, WeightFiles(stored, read, (path,)), dict(counts), _texts(header))


def _check_types(header: _Header, gguf: ModuleType) -> None:
    for kind in {tensor.kind for tensor in header.tensors.values()}:
        size, kind = gguf.GGML_QUANT_SIZES[kind][1], gguf.GGMLQuantizationType(kind)
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError as error:
            raise DataError(
                f"{header.path} has tensors of type {kind.name}, which the library gguf does not "
                "dequantize: take a file of another quantization"
            ) from error


def _their_names(header: _Header) -> dict[str, str]:
    """The name of every tensor in the file, by its name in transformers."""
    found = {}
    for name in header.tensors:
        *layer, part, kind = name.removeprefix("blk.").split(".")
        if name == _ROPE_FACTORS:
            continue
        prefix = f"model.layers.{layer[0]}." if name.startswith("blk.") and layer else ""
        found[f"{prefix}{_NAMES.get(part, part)}.{kind}"] = name
    return found


def _config(header: _Header) -> dict[str, Any]:
    architecture = header.get("general.architecture", str)

    def get(name: str, kind: type, default: Any = None) -> Any:
        return header.get(f"{architecture}.{name}", kind, default)

    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise DataError(f"{header.path} is of architecture {architecture!r}, not of {known}")
    for name in _REFUSED:
        if (value := header.fields.get(f"{architecture}.{name}")) not in (None, 0, 1.0):
            raise DataError(f"{header.path}: {architecture}.{name}={value} is not supported")
    heads, dim = get("attention.head_count", int), get("embedding_length", int)
    head_dim = get("attention.key_length", int, dim // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := get(name, int, head_dim)) != head_dim:
            raise DataError(
                f"{header.path}: {architecture}.{name} is {size} and the size of a head "
                f"{head_dim}: other sizes of values, or heads rotated in part, are not supported"
            )
    embedding = header.tensors.get("token_embd.weight")
    base = get("rope.freq_base", float, 10_000.0)
    return {
        "model_type": architecture,
        "vocab_size": 0 if embedding is None else embedding.shape[0],
        "hidden_size": dim,
        "num_hidden_layers": get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length", int),
        "max_position_embeddings": get("context_length", int),
        "rms_norm_eps": _rounded(get("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _rounded(base),
        "rope_scaling": _scaling(header, get, base, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _rounded(value: float) -> float:
    """The shortest decimal number of the same float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _scaling(
    header: _Header, get: Callable[..., Any], base: float, head_dim: int
) -> dict[str, Any] | None:
    """`rope_scaling`. Files have Llama 3's as divisors of the frequencies [head_dim / 2]: its
    settings are found by trying lengths that are powers of two, else the file is refused."""
    if _ROPE_FACTORS in header.tensors:
        factors = header.read(_ROPE_FACTORS).ravel()
        for length in (2**n for n in range(5, 20)):
            settings = Llama3Config(factor=float(factors.max()), original_length=length)
            ropes = RopeConfig(base=base), RopeConfig(base=base, llama3=settings)
            plain, scaled = (pair_frequencies(rope, head_dim)[0] for rope in ropes)
            expected = plain / scaled
            if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": settings.factor,
                    "original_max_position_embeddings": settings.original_length,
                    "high_freq_factor": settings.fast_turns,
                    "low_freq_factor": settings.slow_turns,
                }
        raise DataError(f"{header.path}: {_ROPE_FACTORS} are not those of Llama 3")
    kind = get("rope.scaling.type", str, "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor", float)}
    if kind == "yarn":
        length = get("rope.scaling.original_context_length", int)
        scaling["original_max_position_embeddings"] = length
    return scaling


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
    tokens, merges = (_strings(header, f"tokenizer.ggml.{x}") for x in ("tokens", "merges"))
    kinds = header.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(kinds) != len(tokens) or len({*tokens}) < len(tokens) or {*map(len, pairs)} - {2}:
        raise DataError(f"{header.path} has a damaged tokenizer: copy the file again")
    texts = {"tokenizer.json": _tokenizer(header, split, tokens, kinds, pairs)}
    ids = {
        role: header.get(f"tokenizer.ggml.{name}_token_id", int, -1)
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot"))
    }
    named = {f"{x}_token": tokens[i] for x, i in ids.items() if 0 <= i < len(tokens)}
    template = header.get("tokenizer.chat_template", str, "")
    settings = {name: named[name] for name in named if name != "eot_token"}
    settings["add_bos_token"] = header.get("tokenizer.ggml.add_bos_token", bool, False)
    if template:
        texts["chat_template.jinja"] = template
    ends = [ids[role] for role in ("eos", "eot") if f"{role}_token" in named]
    texts["tokenizer_config.json"] = json.dumps(settings, indent=1, ensure_ascii=False)
    texts["generation_config.json"] = json.dumps({"eos_token_id": ends}, indent=1)
    return texts


def _strings(header: _Header, name: str) -> list[str]:
    values = header.get(name, list)
    if not all(isinstance(value, str) for value in values):
        raise DataError(f"{header.path}: {name} has an entry that is no text")
    return values


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = tokenizers.Regex(_WORD + digits + _REST)
    parts = [pre_tokenizers.Split(pattern, "isolated"), _byte_level(use_regex=False)]
    return pre_tokenizers.Sequence(parts)


def _byte_level(**options: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


# How texts are divided before pairs are merged, by its name in files.
_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level()]
    ),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def _tokenizer(
    header: _Header, split: str, tokens: list[str], kinds: list[int], merges: list[Any]
) -> str:
    """The `tokenizer.json` of byte-level BPE."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    with library_errors(f"{header.path} describes no tokenizer"):
        model = models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe")
        result = tokenizers.Tokenizer(model)
        result.pre_tokenizer = _SPLITS[split]()
        result.decoder = decoders.ByteLevel()
        if split == "qwen2":
            result.normalizer = normalizers.NFC()
        for kind, add in ((_CONTROL, result.add_special_tokens), (_USER, result.add_tokens)):
            chosen = [token for token, x in zip(tokens, kinds, strict=True) if x == kind]
            is_special = kind == _CONTROL
            add([tokenizers.AddedToken(x, normalized=False, special=is_special) for x in chosen])
        return result.to_str()
