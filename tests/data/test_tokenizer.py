import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ttcd_jax.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    TokenizerConfig,
    build_tokenizer,
    train_tokenizer,
)
from ttcd_jax.errors import DataError, ResourceError, UserError
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


@pytest.fixture(params=["byte", "json"])
def tokenizer(request, tmp_path):
    if request.param == "byte":
        return build_tokenizer(TokenizerConfig())
    path = _byte_level_file(tmp_path, "<|endoftext|>")
    return build_tokenizer(TokenizerConfig(kind="json", path=path))


def test_decode_inverts_encode(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, tokenizer.encode(TEXT.encode()))
    assert tokenizer.decode(ids) == TEXT
    check_tokens(ids, tokenizer.vocab_size)
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([]) == ""


def test_specials_are_in_the_vocabulary_and_never_in_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert not np.isin([tokenizer.bos_id, tokenizer.eos_id], ids).any()
    framed = np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]])
    check_tokens(framed, tokenizer.vocab_size)
    assert tokenizer.decode(framed) == TEXT


def test_num_bytes_sums_to_the_text(tokenizer):
    framed = np.concatenate([[tokenizer.bos_id], tokenizer.encode(TEXT), [tokenizer.eos_id]])
    num_bytes = tokenizer.num_bytes(framed)
    assert num_bytes.shape == framed.shape
    assert num_bytes[0] == num_bytes[-1] == 0
    assert num_bytes.sum() == len(TEXT.encode())


def test_byte_ids_are_the_bytes():
    assert ByteTokenizer().encode(b"\x00\xffA").tolist() == [0, 255, 65]
    assert ByteTokenizer().decode([0xFF, 65]) == "\ufffdA"


def test_num_bytes_of_sentencepiece_pieces(tmp_path):
    vocab = {"<s>": 0, "</s>": 1, "<0x0A>": 2, "▁né": 3, "a": 4}
    source = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    source.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.num_bytes([[0, 1], [2, 3]]).tolist() == [[0, 0], [1, 4]]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 5)


def test_json_tokenizer_errors(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"model": "gpt"}')
    (tmp_path / "empty.json").write_text('{"model": {}}')
    (tmp_path / "deep.json").write_text('{"model":' * 50_000)
    vocab = '{"<s>": 0, "</s>": 4294967295}'
    model = f'{{"type": "WordLevel", "vocab": {vocab}, "unk_token": "<s>"}}'
    (tmp_path / "huge.json").write_text(f'{{"model": {model}}}')
    _byte_level_file(tmp_path, "<unusual>")
    for name, message in [
        ("absent.json", r"no tokenizer file at .*absent\.json"),
        ("broken.json", r"broken\.json is not JSON"),
        ("other.json", "no tokenizer model"),
        ("empty.json", r"describes no tokenizer \(data did not match .*; copy it again"),
        ("deep.json", "nested too deeply"),
        ("huge.json", "id 4,294,967,295, ids end at 16,777,215"),
        ("tokenizer.json", r"no bos token of a usual name \(<s>, .*: set TokenizerConfig.bos_id"),
    ]:
        with pytest.raises(DataError, match=message):
            JsonTokenizer(str(tmp_path / name))


def test_a_word_that_a_vocabulary_lacks_is_one_line(tmp_path):
    vocabulary = '[["<s>", 0.0], ["</s>", 0.0], ["a", -1.0]]'
    path = tmp_path / "tokenizer.json"
    path.write_text(f'{{"model": {{"type": "Unigram", "vocab": {vocabulary}}}}}')
    with pytest.raises(DataError, match=r"cannot encode the text \(.*unk_id.*is missing\)"):
        JsonTokenizer(str(path)).encode("abc")


def test_json_tokenizer_refuses_bytes_that_are_not_utf8(tmp_path):
    tokenizer = JsonTokenizer(_byte_level_file(tmp_path, "<|endoftext|>"))
    with pytest.raises(DataError, match="not UTF-8 at byte 2 of 3"):
        tokenizer.encode(b"ab\xff")


@pytest.mark.parametrize("fields", [{"kind": "json"}, {"kind": "byte", "path": "x.json"}])
def test_config_needs_a_path_exactly_for_json(fields):
    with pytest.raises(UserError, match="kind 'json' takes the path"):
        TokenizerConfig(**fields)


def test_the_first_token_outside_the_vocabulary_is_named():
    check_tokens(np.arange(258), 258)
    check_tokens([], 258)
    with pytest.raises(DataError, match="258 at position 1 is outside the vocabulary of 258"):
        check_tokens([3, 258, 999], 258)
    with pytest.raises(DataError, match="token -1 at position 1, 1 is outside"):
        check_tokens([[0, 1], [2, -1]], 258)


CONTEXT = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
)
LONG = b"We've 1234 words... at\n  12 o'clock, \xe6\x97\xa5\xe6\x9c\xac  (and so on)\r\n\n" * 40


@pytest.mark.parametrize(
    ("words", "is_divisible"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), True),
        (
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(tokenizers.Regex(CONTEXT), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
            True,
        ),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), True),
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), False),
        (pre_tokenizers.Split(tokenizers.Regex(r"\n"), "isolated"), False),
    ],
)
def test_a_long_text_is_encoded_in_pieces_where_words_end(
    words, is_divisible, tmp_path, monkeypatch
):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer([LONG], 400))
    source = json.loads(path.read_text()) | {"pre_tokenizer": json.loads(words.__getstate__())}
    path.write_text(json.dumps(source))
    whole = JsonTokenizer(str(path)).encode(LONG)
    monkeypatch.setattr("ttcd_jax.data.tokenizer._PIECE_BYTES", 100)
    pieces = list(JsonTokenizer(str(path)).encode_pieces(LONG))
    assert (len(pieces) > 20) == is_divisible
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    with pytest.raises(DataError, match=f"not UTF-8 at byte {len(LONG)} of {len(LONG) + 1}"):
        JsonTokenizer(str(path)).encode(LONG + b"\xff")


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"added_tokens": [{"id": 258, "content": "\n  ", "special": False}]},
    ],
)
def test_a_tokenizer_that_joins_words_gets_the_whole_text(change, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer([LONG], 400))
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    source = json.loads(path.read_text())
    added = [token | options for token in change.get("added_tokens", [])]
    path.write_text(json.dumps(source | change | {"added_tokens": source["added_tokens"] + added}))
    monkeypatch.setattr("ttcd_jax.data.tokenizer._PIECE_BYTES", 100)
    assert len(list(JsonTokenizer(str(path)).encode_pieces(LONG))) == 1
    monkeypatch.setattr("ttcd_jax.data.tokenizer._LARGE_PIECES", 1)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    with pytest.raises(ResourceError, match=r"of memory, and there are .*: divide the document"):
        JsonTokenizer(str(path)).encode(LONG)
