"""Text <-> token ids: the bytes, or the vocabulary of a Hugging Face `tokenizer.json`."""

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from absl import logging
from numpy.typing import ArrayLike
from tokenizers import decoders, models, pre_tokenizers, processors

from ttcd_jax import storage, units
from ttcd_jax.allocation import host_bytes
from ttcd_jax.config import Config, NonNegative, Place
from ttcd_jax.errors import DataError, ResourceError, UserError
from ttcd_jax.files import read_json

# The last of each is DeepSeek's, with fullwidth bars and U+2581 for blanks.
BOS_NAMES = (
    *("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "[BOS]", "<|endoftext|>"),
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
)
EOS_NAMES = (
    *("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_MOST_IDS = 2**24  # a table of bytes has an entry for each
_PIECE_BYTES = 2**18  # of text at once: the library takes 150 bytes of memory for each
_LARGE_PIECES = 64
_ENDS_OF_WORDS = re.compile(rb"[A-Za-z](?=[ \n])"), re.compile(rb"[A-Za-z](?= )")
_KINDS = "aE7'._ \n\ré日。\u0301"  # one of each that patterns of words distinguish
_NO_NORMALIZER = {"type": "Sequence", "normalizers": []}
_QUOTE = "\udc00"  # in no text that is UTF-8
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TokenizerConfig(Config):
    """The `kind` of a tokenizer: bytes, or the `tokenizer.json` at `path`, whose tokens that begin
    and end documents are `bos_id` and `eos_id`, by default those with the usual names. `stop_ids`
    end a generated text as eos does. `adds_bos`: whether a prompt begins with bos, as rows do."""

    kind: Literal["byte", "json"] = "byte"
    path: Place = None
    bos_id: NonNegative | None = None
    eos_id: NonNegative | None = None
    stop_ids: tuple[NonNegative, ...] = ()
    adds_bos: bool = True

    def validate(self) -> None:
        if (self.kind == "json") != (self.path is not None):
            raise UserError(
                f"TokenizerConfig kind={self.kind!r} with path={self.path!r}; "
                "kind 'json' takes the path of a tokenizer.json, kind 'byte' takes none"
            )
        own = self.bos_id, self.eos_id, self.stop_ids, self.adds_bos
        if self.kind == "byte" and own != (None, None, (), True):
            raise UserError(
                "kind 'byte' begins with bos 256 and has eos 257: set no bos_id, eos_id, stop_ids "
                "or adds_bos"
            )


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text; 256 (bos) begins a document and 257 (eos) ends it."""

    bos_id = 256
    eos_id = 257
    stop_ids: tuple[int, ...] = ()
    adds_bos = True
    vocab_size = 258
    digest = "byte"

    def special_id(self, name: str) -> int | None:
        """The special token of this name; bytes have none."""
        return None

    def encode(self, text: bytes | str) -> np.ndarray:
        """Ids [T] int32, without special tokens; a `str` is encoded as UTF-8."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def cuts(self, text: bytes) -> list[int]:
        """Where the text may be cut: 0, ..., its length. Its parts have its ids."""
        return [0, *range(_PIECE_BYTES, len(text), _PIECE_BYTES), len(text)]

    def encode_part(self, text: bytes, start: int, stop: int) -> np.ndarray:
        """The ids of a part between two cuts, of an integer type."""
        return np.frombuffer(text, np.uint8)[start:stop]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [T] without special tokens; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids, np.int32)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def num_bytes(self, ids: ArrayLike) -> np.ndarray:
        """Bytes of text of each token, int32 in the shape of `ids`, 0 for special tokens."""
        return (np.asarray(ids, np.int32) < 256).astype(np.int32)


@functools.cache
def bytes_as_json() -> str:
    """`ByteTokenizer` as a `tokenizer.json`: byte-level BPE without merges, bos before a text."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [x for x in range(256) if x not in visible]
    letters = {chr(x): x for x in visible} | {chr(256 + i): x for i, x in enumerate(hidden)}
    bos, eos = BOS_NAMES[0], EOS_NAMES[0]
    special = {bos: ByteTokenizer.bos_id, eos: ByteTokenizer.eos_id}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters | special, merges=[]))
    tokenizer.add_special_tokens([bos, eos])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _bos_first(special[bos])
    return tokenizer.to_str(pretty=True)


def _bos_first(bos_id: int) -> processors.TemplateProcessing:
    """What makes transformers begin a text with bos, as rows here do."""
    bos = BOS_NAMES[0]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
    )


class JsonTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, with the interface of `ByteTokenizer`.
    Raises `DataError` for a file that is missing or damaged or lacks bos or eos, `encode` for bytes
    not UTF-8."""

    def __init__(self, config: TokenizerConfig) -> None:
        if not (path := storage.copy_of(config.path or "")).is_file():
            raise DataError(f"no tokenizer file at {path}; give the path of a tokenizer.json")
        source = read_json(path)
        if not isinstance(source.get("model"), dict):
            raise DataError(f"{path} describes no tokenizer model; give a tokenizer.json")
        with library_errors(f"{path} describes no tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
        # A file may carry the truncation and padding of its last use; documents here are whole.
        source |= {"truncation": None, "padding": None}
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()
        self.digest = ByteTokenizer.digest if self._is_of_bytes() else digest
        # Text that spells a special token stays text, so only packing marks where documents end.
        self._tokenizer.encode_special_tokens = True
        self._has_plain_text = source.get("normalizer") in (None, {"type": "NFC"}, _NO_NORMALIZER)
        self._is_byte_level = '"ByteLevel"' in json.dumps(source.get("decoder"))
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.bos_id = self._special("bos", config.bos_id, BOS_NAMES, path)
        self.eos_id = self._special("eos", config.eos_id, EOS_NAMES, path)
        self.stop_ids, self.adds_bos = config.stop_ids, config.adds_bos
        if self.vocab_size > _MOST_IDS:
            raise DataError(f"{path} has id {self.vocab_size - 1:,}, ids end at {_MOST_IDS - 1:,}")

    def _is_of_bytes(self) -> bool:
        """Whether it is the file of an export of the byte tokenizer, whose ids these are."""
        if self._tokenizer.get_vocab_size() != ByteTokenizer.vocab_size:
            return False
        return tokenizers.Tokenizer.from_str(bytes_as_json()).to_str() == self._tokenizer.to_str()

    def _special(self, role: str, chosen: int | None, names: tuple[str, ...], path: Path) -> int:
        found = (chosen, *map(self._tokenizer.token_to_id, names))
        token_id = next((x for x in found if x is not None), None)
        if token_id is None:
            raise DataError(
                f"{path} has no {role} token of a usual name ({', '.join(names)}): set "
                f"TokenizerConfig.{role}_id to the id of its own, or add one of these"
            )
        if token_id >= self.vocab_size:
            raise DataError(f"{role}_id {token_id} is none of the {self.vocab_size} ids of {path}")
        return token_id

    def token(self, token_id: int) -> str:
        name = self._tokenizer.id_to_token(token_id)
        assert name is not None, f"{token_id} is no id of the tokenizer"
        return name

    def special_id(self, name: str) -> int | None:
        token_id = self._tokenizer.token_to_id(name)
        return None if token_id is None or self.num_bytes(token_id) else token_id

    def encode(self, text: bytes | str) -> np.ndarray:
        text = _utf8(text)
        return np.concatenate([self.encode_part(text, *x) for x in pairwise(self.cuts(text))])

    def quoted(self, text: str) -> str:
        """The text, in which names of special tokens stay text for `encode_marked`."""
        return self._names.sub(lambda name: _QUOTE.join(name[0]), text)

    @functools.cached_property
    def _names(self) -> re.Pattern[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = sorted((x.content for x in added if x.special), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    def encode_marked(self, text: str) -> np.ndarray:
        """The ids of a prompt in which the name of a special token is that token."""
        if _QUOTE in text:
            parts = enumerate(self._names.split(text))  # every other one is a name
            vocab, encode = self._tokenizer.get_vocab(), self.encode
            ids = [[vocab[x]] if i % 2 else encode(x.replace(_QUOTE, "")) for i, x in parts]
            return np.concatenate(ids, dtype=np.int32)
        text, marked = _utf8(text).decode(), tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        marked.encode_special_tokens = False
        with library_errors("the tokenizer cannot encode the text"):
            return np.array(marked.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_part(self, text: bytes, start: int, stop: int) -> np.ndarray:
        if stop - start > _LARGE_PIECES * _PIECE_BYTES:
            _check_memory(stop - start)
        piece, options = decoded(text, start, stop), {"add_special_tokens": False}
        with library_errors("the tokenizer cannot encode the text"):
            # Of batches, even of one, the library lets other threads run meanwhile.
            (encoding,) = self._tokenizer.encode_batch_fast([piece], **options)
        return np.array(encoding.ids, np.int32)

    def cuts(self, text: bytes) -> list[int]:
        """Only 0 and the length where words may join across blanks."""
        cuts = [0]
        while len(text) - cuts[-1] > _PIECE_BYTES and (pattern := self._end_of_word):
            if (end := pattern.search(text, cuts[-1] + _PIECE_BYTES)) is None:
                break
            cuts.append(end.end())
        return [*cuts, len(text)]

    @functools.cached_property
    def _end_of_word(self) -> re.Pattern[bytes] | None:
        """Where a text may be cut, so that its parts have its ids: after a letter and before a
        blank or a line break, or before a blank alone. Words are probed with up to two characters
        of every kind on either side."""
        words, added = self._tokenizer.pre_tokenizer, self._tokenizer.get_added_tokens_decoder()
        texts = [x for x in added.values() if not x.special]
        if any(x.lstrip or x.rstrip or re.search(r"\s", x.content) for x in texts):
            return None
        if words is None or not self._has_plain_text:
            return None

        def split(text: str) -> list[str]:
            with library_errors("the tokenizer cannot divide text"):
                return [word for word, _ in words.pre_tokenize_str(text)]

        sides = ["".join(x) for n in range(3) for x in itertools.product(_KINDS, repeat=n)]
        heads = {text: split(text) for side in sides for text in (side + "a", side + "E")}
        for pattern, blanks in zip(_ENDS_OF_WORDS, (" \n", " "), strict=True):
            tails = {text: split(text) for side in sides for text in (x + side for x in blanks)}
            if all(split(x + y) == heads[x] + tails[y] for x in heads for y in tails):
                return pattern
        return None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        kept = [int(i) for i in ids if i not in (self.bos_id, self.eos_id)]
        with library_errors("the tokenizer cannot decode"):
            return self._tokenizer.decode(kept, skip_special_tokens=True)

    def num_bytes(self, ids: ArrayLike) -> np.ndarray:
        return self._bytes_by_id[np.asarray(ids, np.int32)]

    @functools.cached_property
    def _bytes_by_id(self) -> np.ndarray:
        table = np.zeros(self.vocab_size, np.int32)
        for piece, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if self._is_byte_level:
                table[token_id] = len(piece)  # its alphabet spells every byte with one character
            else:
                is_byte = BYTE_TOKEN.fullmatch(piece)
                table[token_id] = 1 if is_byte else len(piece.replace("▁", " ").encode())
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            table[token_id] = 0 if added.special else len(added.content.encode())
        table[[self.bos_id, self.eos_id]] = 0
        return table


Tokenizer = ByteTokenizer | JsonTokenizer


def _check_memory(num_bytes: int) -> None:
    needed, there = 150 * num_bytes, host_bytes()
    line = f"{units.size(num_bytes)} of text without a place to cut take {units.size(needed)}"
    if needed > there:
        raise ResourceError(
            f"{line} of memory, and there are {units.size(there)}: divide the document, or take a "
            "tokenizer that divides it at blanks"
        )
    logging.warning("%s of memory", line)


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Errors of the library as `DataError`. It raises `Exception` itself; subclasses pass. A panic
    of its code is a `BaseException` that no module exports."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = str(error)[:200]
        raise DataError(f"{problem} ({reason}); copy it again") from error


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    return ByteTokenizer() if config.path is None else JsonTokenizer(config)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """A `tokenizer.json` of byte-level BPE: every byte, the most frequent pairs of `texts`, a bos
    and an eos, `vocab_size` tokens in all (fewer, where the texts have fewer pairs). One text is in
    memory at a time. Raises `UserError` for fewer than 258 tokens or more than 2^24."""
    if vocab_size < (least := ByteTokenizer.vocab_size):
        raise UserError(
            f"a vocabulary of {vocab_size} does not hold all 256 bytes, bos and eos: take {least} "
            "or more"
        )
    if vocab_size > _MOST_IDS:
        raise UserError(f"a vocabulary of {vocab_size} is too large: take {_MOST_IDS} or less")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    options = {"show_progress": False, "special_tokens": [BOS_NAMES[0], EOS_NAMES[0]]}
    tokenizer.train_from_iterator(texts, vocab_size, min_frequency=0, **options)
    tokenizer.post_processor = _bos_first(tokenizer.token_to_id(BOS_NAMES[0]))
    return tokenizer.to_str(pretty=True)


def _utf8(text: bytes | str) -> bytes:
    """Raises `DataError` for what is no character of Unicode: half of a pair of surrogates, as
    which a shell's bytes arrive too where they are not UTF-8."""
    try:
        return text.encode() if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise DataError(f"a text is not Unicode ({error}): type it as UTF-8") from error


def decoded(text: bytes, start: int = 0, stop: int | None = None, name: str = "") -> str:
    """A part of a text. Raises `DataError`, which begins with `name`, unless it is UTF-8."""
    try:
        return text[start:stop].decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}text is not UTF-8 at byte {start + error.start} of {len(text)}; convert it "
            "(iconv -f LATIN1 -t UTF-8), leave the file out, or use the byte tokenizer"
        ) from error


# Files about texts in a checkpoint of transformers, besides its tokenizer.
_TOKENIZER, _GENERATION = "tokenizer_config.json", "generation_config.json"
TEXT_FILES = (_TOKENIZER, _GENERATION, "special_tokens_map.json", "chat_template.jinja")


def tokenizer_of(file: Path) -> TokenizerConfig:
    return TokenizerConfig(kind="json", path=str(file), **special_tokens(file.parent))


def special_tokens(folder: Path) -> dict[str, Any]:
    """Fields of `TokenizerConfig`: `bos_id`, `eos_id`, `stop_ids` and `adds_bos`, {} where nothing
    is said. The tokens that `tokenizer_config.json` names come first, then the ids of
    `generation_config.json` and of `config.json`; a model without bos, as Qwen3, separates
    documents by eos."""
    tokenizer = _optional(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    tokens = [x for x in added if isinstance(x, dict)] if isinstance(added, list) else []
    ids = {str(token.get("content")): token.get("id") for token in tokens}
    names = _optional(folder / _TOKENIZER)
    others = [_optional(folder / name) for name in (_GENERATION, "config.json")]
    found: dict[str, list[int]] = {}
    for role in ("bos", "eos"):
        named = names.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        values = [ids.get(named)] if isinstance(named, str) else []
        for source in others:
            value = source.get(f"{role}_token_id")
            values += value if isinstance(value, list) else [value]
        found[role] = [x for x in values if type(x) is int and x >= 0]
    if not found["eos"]:
        return {}
    eos = tuple(dict.fromkeys(found["eos"]))
    ends = {"bos_id": (found["bos"] or eos)[0], "eos_id": eos[0], "stop_ids": eos[1:]}
    adds = names.get("add_bos_token")
    if not isinstance(adds, bool):  # then the file's own processor decides
        bos = next((name for name, x in ids.items() if x == ends["bos_id"]), None)
        adds = bos is None or json.dumps(bos) in json.dumps(tokenizer.get("post_processor"))
    return ends | {"adds_bos": adds}


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if storage.fetch(file).is_file() else {}
