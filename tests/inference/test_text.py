import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ttcd_jax.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_of, train_tokenizer
from ttcd_jax.inference.text import TextStream, typed

TEXT = "def größe(x):\n    return x  # 日本語 👩‍🚀🎉 ends. A \ufffd stays; 日日日日日日日日\n"
FRAME = {"<s>": 0, "</s>": 1}
BYTES = {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}


def _saved(folder, model, decoder, pre_tokenizer=None):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoder
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    return build_tokenizer(tokenizer_of(folder / "tokenizer.json"))


def _byte_fallback(folder):
    """As Llama's: marks before words are blanks, except at the start of the text."""
    vocab = FRAME | BYTES | {"▁": 258, "d": 259, "e": 260, "de": 261, "x": 262, "▁x": 263}
    model = models.BPE(vocab=vocab, merges=[("d", "e"), ("▁", "x")], byte_fallback=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return _saved(folder, model, decoder, pre_tokenizers.Metaspace(prepend_scheme="first"))


def _word_pieces(folder):
    vocab = FRAME | {word: 2 + i for i, word in enumerate(["un", "##do", "##ne", ".", "do", "'"])}
    model = models.WordPiece(vocab, unk_token="'")
    return _saved(folder, model, decoders.WordPiece(cleanup=True))


def _byte_level(folder):
    (folder / "tokenizer.json").write_text(train_tokenizer([TEXT], 290))
    return build_tokenizer(tokenizer_of(folder / "tokenizer.json"))


def _across_characters(folder):
    """Byte-level tokens that all end inside a character: the last byte of one, two of the next."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled = pre_tokenizer.pre_tokenize_str("日")[0][0]  # a character for each of three bytes
    vocab = FRAME | {spelled[:2]: 2, spelled[2:] + spelled[:2]: 3, spelled[2:]: 4}
    return _saved(folder, models.BPE(vocab=vocab, merges=[]), decoders.ByteLevel())


@pytest.fixture(params=[_byte_level, _byte_fallback, None])
def tokenizer(request, tmp_path):
    return ByteTokenizer() if request.param is None else request.param(tmp_path)


def _pieces(tokenizer, ids, *stop, context=()):
    stream = TextStream(tokenizer, stop, context)
    return [*(stream.push(int(token)) for token in ids), stream.finish()]


def test_stop_strings_of_a_shell_may_be_new_lines():
    found = [typed(text) for text in (r"\n\n", r"\r\n", r"\t", r"\newpage", r"a\n", "\n", "")]
    assert found == ["\n\n", "\r\n", "\t", r"\newpage", r"a\n", "\n", ""]


def test_the_pieces_are_the_text_and_never_half_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    for given in itertools.accumulate(pieces):
        assert TEXT.startswith(given)
    ids = tokenizer.encode("dex京")[:-1]
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert set(pieces[-1]) == {"\ufffd"}, "a character that was not finished"


def test_specials_and_ids_without_a_token_have_no_text(tokenizer):
    strange = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size, tokenizer.vocab_size + 99]
    mixed = [part for token in tokenizer.encode("x京x") for part in (*strange, int(token))]
    assert "".join(_pieces(tokenizer, mixed)) == "x京x"


def test_what_is_no_utf8_comes_as_replacements_late_but_all(tmp_path):
    for tokenizer in (ByteTokenizer(), _byte_level(tmp_path)):
        for seed in range(40):
            rng = np.random.default_rng(seed)
            ids = rng.integers(0, tokenizer.vocab_size, 60)
            ids[rng.random(60) < 0.5] = tokenizer.encode("京")[0]
            assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_pieces_depend_on_their_neighbours_and_do_not_wait_for_each_other(tmp_path):
    tokenizer = _word_pieces(tmp_path)
    ids = [2, 3, 4, 6, 5, 2, 3, 5, 5, 6, 6]
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "undone do. undo.. do do"
    assert pieces[:3] == ["un", "do", "ne"]
    pieces = _pieces(_across_characters(tmp_path), [2, *[3] * 100, 4])
    assert pieces == ["", *["日"] * 101, ""]


def test_the_work_for_a_token_is_bounded(tokenizer, monkeypatch):
    sizes, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    never_complete = tokenizer.encode("京")[:1].repeat(200)
    for ids in (tokenizer.encode(TEXT * 5), never_complete):
        _pieces(tokenizer, ids, context=ids)
    assert max(sizes) <= 16
    assert len(sizes) <= 2 * (len(tokenizer.encode(TEXT * 5)) + 200) + 40


def test_the_context_joins_the_text_and_is_not_repeated(tmp_path):
    tokenizer = _byte_fallback(tmp_path)
    assert "".join(_pieces(tokenizer, [263, 261])) == "xde"
    assert "".join(_pieces(tokenizer, [263, 261], context=[261] * 30)) == " xde"
    day = ByteTokenizer().encode("日" * 20)
    for cut in range(40, 44):  # a window of eight bytes begins inside a character
        pieces = _pieces(ByteTokenizer(), day[cut:], context=day[:cut])
        assert "".join(pieces) == "日" * (20 - cut // 3)


class _Chunks(ByteTokenizer):
    """Token i is the i-th piece of a text."""

    def __init__(self, text, size=1):
        self._pieces = [text[i : i + size] for i in range(0, len(text), size)]
        self.vocab_size = len(self._pieces)

    def decode(self, ids):
        return "".join(self._pieces[i] for i in ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two\n\nthree", ["\n\n"], "one two"),
        ("ababac", ["abac"], "ab"),
        ("aaaab", ["aab"], "aa"),
        ("xabcdx", ["abcd", "bc"], "xa"),
        ("xabcdx", ["bcd", "abc", "bc"], "x"),
        ("end<|im_en", ["<|im_end|>"], None),
        ("日本語です", ["語"], "日本"),
        ("stop", ["stop"], ""),
    ],
)
def test_text_ends_before_the_first_stop_string_wherever_tokens_cut_it(text, stop, expected, size):
    tokenizer = _Chunks(text, size)
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(token) for token in range(tokenizer.vocab_size)]
    assert "".join([*pieces, stream.finish()]) == (text if expected is None else expected)
    assert stream.is_stopped == (expected is not None)


def test_what_may_be_the_beginning_of_a_character_or_a_stop_string_is_held_back():
    pieces = _pieces(ByteTokenizer(), "aé日🎉b".encode())
    assert pieces == ["a", "", "é", "", "", "日", "", "", "", "🎉", "b", ""]
    for text, stop, pieces in (
        ("a<b<|c<|d", ("<|e", "|>"), ["a", "", "<b", "", "", "<|c", "", "", "<|d", ""]),
        ("a<|", ("<|e",), ["a", "", "", "<|"]),
        ("abc", ("b",), ["a", "", "", ""]),
    ):
        assert _pieces(_Chunks(text), range(len(text)), *stop) == pieces
