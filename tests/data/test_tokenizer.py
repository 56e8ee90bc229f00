import itertools
import json

import numpy as np
import pytest
import tokenizers
from checks import refused
from tokenizers import decoders, models, pre_tokenizers

from ttcd_jax.data import tokenizer as module
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError, ResourceError
from ttcd_jax.tokens import check_tokens

TEXT = "def größe(x):\n    return '<|endoftext|>' * x  # 日本\n"


def _byte_level_file(tmp_path, special: str) -> str:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    options = {"show_progress": False, "special_tokens": [special]}
    tokenizer.train_from_iterator([TEXT * 3], 280, **options)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def _opened(path):
    return module.build_tokenizer(TokenizerConfig(kind="json", path=str(path)))


@pytest.mark.parametrize("kind", ["byte", "json"])
def test_decode_inverts_encode_and_specials_are_never_in_text(kind, tmp_path):
    path = None if kind == "byte" else _byte_level_file(tmp_path, "<|endoftext|>")
    tokenizer = module.build_tokenizer(TokenizerConfig(kind=kind, path=path))
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, tokenizer.encode(TEXT.encode()))
    assert not np.isin([tokenizer.bos_id, tokenizer.eos_id], ids).any()
    framed = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]])
    check_tokens(framed, tokenizer.vocab_size)
    assert tokenizer.decode(ids) == tokenizer.decode(framed) == TEXT
    assert (tokenizer.encode("").shape, tokenizer.decode([])) == ((0,), "")
    num_bytes = tokenizer.num_bytes(framed)
    assert num_bytes.shape == framed.shape
    assert num_bytes[0] == num_bytes[-1] == 0
    assert num_bytes.sum() == len(TEXT.encode())


def test_text_that_is_not_unicode_is_refused(tmp_path):
    """As from a shell whose bytes are not UTF-8, or from JSON with half of a pair."""
    tokenizer = _opened(_byte_level_file(tmp_path, "<|endoftext|>"))
    for encode in (ByteTokenizer().encode, tokenizer.encode, tokenizer.encode_marked):
        for text in ("Gr\udcfc\udcdfe", "\ud83d"):
            refused("is not Unicode|surrogates not allowed", encode, text, error=DataError)


def test_byte_ids_are_the_bytes():
    assert ByteTokenizer().encode(b"\x00\xffA").tolist() == [0, 255, 65]
    assert ByteTokenizer().decode([0xFF, 65]) == "\ufffdA"


def test_num_bytes_of_sentencepiece_pieces(tmp_path):
    vocab = {"<s>": 0, "</s>": 1, "<0x0A>": 2, "▁né": 3, "a": 4}
    source = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    source.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = _opened(tmp_path / "tokenizer.json")
    assert tokenizer.num_bytes([[0, 1], [2, 3]]).tolist() == [[0, 0], [1, 4]]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 5)


HUGE = '{"<s>": 0, "</s>": 4294967295}'
UNIGRAM = '[["<s>", 0.0], ["</s>", 0.0], ["a", -1.0]]'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no tokenizer file at |absent.json"),
        ("{", "absent.json is not JSON"),
        ('{"model": "gpt"}', "no tokenizer model"),
        ('{"model": {}}', "describes no tokenizer (data did not match |; copy it again"),
        ('{"model":' * 50_000, "nested too deeply"),
        (
            f'{{"model": {{"type": "WordLevel", "vocab": {HUGE}, "unk_token": "<s>"}}}}',
            "id 4,294,967,295, ids end at 16,777,215",
        ),
        ("<unusual>", "no bos token of a usual name (<s>, |: set TokenizerConfig.bos_id"),
        ("<|endoftext|>", "not UTF-8 at byte 2 of 3"),
        (
            f'{{"model": {{"type": "Unigram", "vocab": {UNIGRAM}}}}}',
            "cannot encode the text (|unk_id| is missing)",
        ),
    ],
)
def test_what_is_no_tokenizer_or_no_text_of_it(tmp_path, content, words):
    path = tmp_path / "absent.json"
    if content and content[0] == "{":
        path.write_text(content)
    elif content:
        path = _byte_level_file(tmp_path, content)
    text = b"ab\xff" if "UTF-8" in words else "abc"
    refused(words, lambda: _opened(path).encode(text), error=DataError)


def test_the_first_token_outside_the_vocabulary_is_named():
    check_tokens(np.arange(258), 258)
    check_tokens([], 258)
    words = "258 at position 1 is outside the vocabulary of 258"
    refused(words, check_tokens, [3, 258, 999], 258, error=DataError)
    refused("token -1 at position 1, 1 is outside", check_tokens, [[0, 1], [2, -1]], 258)


CONTEXT = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
)
LONG = b"We've 1234 words... at\n  12 o'clock, \xe6\x97\xa5\xe6\x9c\xac  (and so on)\r\n\n" * 40


def _byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | options)


def _split(pattern):
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


NO_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
JOINED = [{"id": 258, "content": "\n  ", "special": False} | NO_FLAGS]


@pytest.mark.parametrize(
    ("words", "change", "is_divisible"),
    [
        (_byte_level(), {}, True),
        (pre_tokenizers.Sequence([_split(CONTEXT), _byte_level(use_regex=False)]), {}, True),
        (_byte_level(add_prefix_space=True), {}, True),
        (_byte_level(use_regex=False), {}, False),
        (_split(r"\n"), {}, False),
        (_byte_level(), {"normalizer": {"type": "Lowercase"}}, False),
        (_byte_level(), {"pre_tokenizer": None}, False),
        (_byte_level(), {"added_tokens": JOINED}, False),
    ],
)
def test_a_long_text_is_encoded_in_pieces_where_words_end(
    words, change, is_divisible, tmp_path, monkeypatch
):
    path = tmp_path / "tokenizer.json"
    path.write_text(module.train_tokenizer([LONG.decode()], 400))
    source = json.loads(path.read_text())
    added = {"added_tokens": source["added_tokens"] + change.get("added_tokens", [])}
    source |= {"pre_tokenizer": json.loads(words.__getstate__())} | change | added
    path.write_text(json.dumps(source))
    whole = _opened(path).encode(LONG)
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    tokenizer = _opened(path)
    pieces = [tokenizer.encode_part(LONG, *x) for x in itertools.pairwise(tokenizer.cuts(LONG))]
    assert (len(pieces) > 20, len(pieces) == 1) == (is_divisible, not is_divisible)
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(3))  # threads
    texts = [LONG, b"", LONG[:70], LONG[7:]]
    (ids,) = encode_documents([Document("a", x) for x in texts], tokenizer).shards
    framed = [[tokenizer.bos_id, *tokenizer.encode(x), tokenizer.eos_id] for x in texts]
    assert ids.tolist() == list(itertools.chain(*framed))
    documents = [Document("a", LONG), Document("b:2", LONG + b"\xff")]
    refused("b:2: text is not UTF-8", encode_documents, documents, tokenizer, error=DataError)
    words = f"not UTF-8 at byte {len(LONG)} of {len(LONG) + 1}"
    refused(words, _opened(path).encode, LONG + b"\xff", error=DataError)
    if not is_divisible:
        monkeypatch.setattr(module, "_LARGE_PIECES", 1)
        monkeypatch.setattr("os.sysconf", lambda name: 100)
        words = "of memory, and there are |: divide the document"
        refused(words, _opened(path).encode, LONG, error=ResourceError)
