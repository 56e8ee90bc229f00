"""RULER's generator: the published samples, sizes by other tokenizers, sources, files, score."""

import collections
import gzip
import hashlib
import json
import random
import re
from pathlib import Path

import pytest

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.tasks.ruler import NIAH, TASKS, make_samples
from ttcd_jax.tasks.ruler.documents import Sources, prose_of, read_essay
from ttcd_jax.tasks.ruler.niah import NOISE, Pairs
from ttcd_jax.tasks.ruler.samples import read_samples, score
from ttcd_jax.tasks.ruler.search import Cell, Prompt

DATA = Path(__file__).parent / "data/ruler"
# Of three prompts of 4,096 words, seed 7, joined by zero bytes: made by a second program, which
# follows the description of the published scripts with Python's global generators.
DIGESTS = {
    "niah_single_1": "096661999d7f7a55",
    "niah_single_2": "75f954978bd11f06",
    "niah_single_3": "01afa12d31c22fd9",
    "niah_multikey_1": "1703aa7eef98f3da",
    "niah_multikey_2": "8af7387d520b6b15",
    "niah_multikey_3": "a5a00a344dec725f",
    "niah_multivalue": "394e771f744d6975",
    "niah_multiquery": "051b393d16f00cc1",
    "vt": "c42cde3e08299481",
    "cwe": "82293c499ee968d8",
    "fwe": "4cf7952fcbc16a9e",
    "qa_1": "ebdd05702451fd6c",
    "qa_2": "f4de27958844c6e2",
}
MODEL_FIELDS = {"task", "max_seq_length", "length_w_model_temp"}


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    """Fifty questions of HotpotQA's layout, with two documents each."""
    draw = random.Random(0)
    pages = [(f"Title {i}", [f"Fact {i} is {draw.random()}.", " And so on."]) for i in range(60)]
    entries = [
        {"question": f"Question {i}?", "answer": f"answer {i}", "context": draw.sample(pages, 2)}
        for i in range(50)
    ]
    path = tmp_path_factory.mktemp("hotpot") / "hotpot.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture(scope="module")
def sources(hotpot):
    return Sources(
        lambda: read_essay(str(DATA / "essay.txt")), str(DATA / "squad.json"), str(hotpot)
    )


@pytest.fixture(scope="module")
def published():
    found = collections.defaultdict(list)
    for line in gzip.decompress((DATA / "samples.jsonl.gz").read_bytes()).splitlines():
        record = json.loads(line)
        found[record["task"]].append(record)
    return found


def _words(text):
    return len(text.split())


def _fours(text):
    return -(-len(text) // 4)


def _bytes(text):
    return len(text.encode())


def _made(task, sources, length=1024, count=_words, num_samples=3, **options):
    options |= {"num_samples": num_samples, "sources": sources}
    return make_samples(task, length=length, count=count, **options)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "qa_2"])
def test_published_samples_are_reproduced_field_by_field(task, sources, published):
    assert len(published) == 12
    for sample, record in zip(_made(task, sources), published[task], strict=True):
        fields = {name: value for name, value in sample._asdict().items() if value is not None}
        fields["outputs"] = list(sample.outputs)
        assert fields == {name: record[name] for name in record.keys() - MODEL_FIELDS}


@pytest.mark.parametrize("task", TASKS)
def test_long_samples_are_those_of_a_second_program(task, sources):
    texts = "\0".join(sample.prompt for sample in _made(task, sources, 4096, seed=7))
    assert hashlib.sha256(texts.encode()).hexdigest().startswith(DIGESTS[task])


@pytest.mark.parametrize(("count", "length"), [(_fours, 4096), (_fours, 2048), (_words, 4096)])
def test_texts_fit_under_any_tokenizer_and_hold_their_answers(count, length, sources):
    for task, ruler in TASKS.items():
        samples = _made(task, sources, length, count)
        for sample in samples:
            assert sample.length == count(sample.prompt) + ruler.num_new <= length
            assert sample.answer_prefix.startswith(ruler.prefix)
            if task != "qa_2":
                assert all(answer in sample.input for answer in sample.outputs)
        if count is _words and task[:2] != "qa":
            assert max(sample.length for sample in samples) > 0.95 * length


def test_what_the_published_generator_has_no_sample_for_is_refused(sources):
    shorter = "ask for longer contexts or a tokenizer of longer tokens, or leave it out"
    for task, length, count, message in [
        ("niah_single_1", 150, _words, rf"niah_single_1 takes \d+ tokens .* has 150: {shorter}"),
        ("vt", 700, _bytes, rf"vt takes \d+ tokens at its smallest and has 700: {shorter}"),
        ("qa_2", 150, _words, rf"qa_2 takes \d+ tokens at its smallest and has 150: {shorter}"),
        ("fwe", 140, _words, "fwe takes 150 tokens or more and has 140"),
        ("cwe", 80_000, _words, r"tries lists of \d+ words and wonderwords has 8\d+: .* --data of"),
    ]:
        with pytest.raises(UserError, match=message):
            _made(task, sources, length, count, num_samples=1)


@pytest.mark.parametrize(
    ("task", "length", "seed", "digest"),
    [
        ("vt", 1024, 1501, "1a8c62cbb0c728c8"),  # two names of the example were equal
        ("fwe", 200, 1, "1cecd32368b3638f"),  # two answers, of three words
    ],
)
def test_rare_draws_are_those_of_a_second_program(task, length, seed, digest, sources):
    (sample,) = _made(task, sources, length, seed=seed, num_samples=1)
    assert hashlib.sha256(sample.prompt.encode()).hexdigest().startswith(digest)


def test_a_seed_determines_the_samples(sources):
    for task in ("niah_multiquery", "vt", "fwe", "qa_1"):
        few, many = _made(task, sources, num_samples=2, seed=7), _made(task, sources, seed=7)
        state = random.getstate()
        assert many[:2] == few
        assert _made(task, sources, seed=8) != many
        assert random.getstate() == state


def test_essays_that_are_too_short_begin_again(published):
    sources = Sources(lambda: "One  sentence of\nsix words. ")
    (sample,) = _made("niah_single_2", sources, num_samples=1)
    context = sample.input.split("\n")[1]
    assert context.count("One sentence of six words.") > 150
    assert published["niah_single_2"][0]["outputs"] == list(sample.outputs)


def test_questions_have_their_documents_and_others(sources, hotpot):
    entries = json.loads(hotpot.read_text())
    for entry, sample in zip(entries, _made("qa_2", sources, 400), strict=False):
        documents = re.split(r"\n\n(?:Document \d+:\n|Answer the)", sample.input)[1:-1]
        own = {f"{title}\n{''.join(lines)}" for title, lines in entry["context"]}
        assert own < set(documents)
        assert len(documents) == len(set(documents)) > 10
        assert sample.input.endswith(entry["question"])
        assert sample.outputs == (entry["answer"],)
    whole = _made("qa_2", sources, 4096, num_samples=1)[0]
    assert whole.input.count("Title 7\n") > 1  # more documents than the file has


def test_paragraphs_of_the_same_article_come_before_others(tmp_path):
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {number}.{part}",
                    "qas": [
                        {"question": "?", "is_impossible": part > 0, "answers": [{"text": "a"}]}
                    ],
                }
                for part in range(4)
            ]
        }
        for number in range(30)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    samples = _made("qa_1", Sources(str, str(path)), 180, num_samples=30)
    for number, sample in enumerate(samples):
        found = re.findall(r"^Paragraph (\d+)\.(\d)$", sample.input, re.MULTILINE)
        assert {(str(number), str(part)) for part in range(4)} < set(found)
        assert len(found) == len(set(found)) > 10


def test_pairs_are_sorted_and_unique():
    adjectives, nouns = ["blue", "old", "blue-eyed", "old", "a"], ["b", "eyed-b", "zoo", "b"]
    pairs = Pairs(adjectives, nouns)
    assert list(pairs) == sorted({f"{x}-{y}" for x in adjectives for y in nouns})


def test_a_size_is_the_largest_that_fits():
    cell = Cell("cwe", 1000, 100, 0, _words)
    assert cell.largest(lambda n: Prompt("word " * 7 * n, []), 5, extra=60) == 840 // 7
    assert cell.largest(lambda n: Prompt("word " * 7 * n, []) if n < 50 else None, 5) == 49


def test_a_text_shrinks_to_a_step_and_is_drawn_until_it_fits():
    cell, sizes = Cell("cwe", 1000, 100, 0, _words), []

    def make(size):
        sizes.append(size)
        return Prompt("word " * (900 if len(sizes) == 3000 else 901 + len(sizes) % 2), [])

    assert cell.fitted(make, 60, 25) == (Prompt("word " * 900, []), 1000)
    assert sizes == [60, 35, 10, *[10] * 2997]
    sizes.clear()
    assert cell.fitted(lambda n: Prompt("word " * 100 * max(n, 0), []), 17, 6, least=0)[1] == 600
    with pytest.raises(UserError, match=r"cwe takes 1101 tokens .* has 1000"):
        cell.fitted(lambda n: make(n) and Prompt("word " * 1001, []), 60, 25)
    assert len(sizes) == 102
    with pytest.raises(UserError, match="cwe takes more tokens"):
        cell.fitted(lambda n: None, 60, 25)


@pytest.mark.parametrize(
    ("prediction", "all_of", "any_of"),
    [("it is ABC and def", 100, 100), (" ab\x07c abc\n", 50, 100), ("ab c", 0, 0), ("", 0, 0)],
)
def test_the_score_counts_answers_or_takes_one(prediction, all_of, any_of):
    assert score(prediction, ["abc", "DEF"]) == all_of
    assert score(prediction, ["abc", "DEF"], takes_any=True) == any_of


def test_published_files_are_read(tmp_path, published):
    path = tmp_path / "validation.jsonl"
    lines = [json.dumps(record) for record in published["vt"]]
    path.write_text("\n".join(lines))
    assert [sample.input for sample in read_samples(path, 2)] == [
        record["input"] for record in published["vt"][:2]
    ]
    assert len(read_samples(path, 9)) == 3
    assert read_samples(path, 1)[0].outputs == tuple(published["vt"][0]["outputs"])
    del published["vt"][0]["answer_prefix"]  # as of older scripts
    path.write_text(json.dumps(published["vt"][0]))
    assert read_samples(path, 1)[0].answer_prefix == ""
    for line in ("[]", "{", '{"input": 1, "outputs": ["a"]}', '{"input": "a", "outputs": []}', ""):
        path.write_text(line)
        with pytest.raises(DataError, match=r"validation\.jsonl"):
            read_samples(path, 1)
    with pytest.raises(DataError, match="cannot be read"):
        read_samples(tmp_path / "none", 1)


def test_prose_has_no_more_tokens_than_asked_for():
    class Records(list):
        sizes = (3, 4, 5)

        def read(self, document, start, stop):
            return list("abcdefg")[start:stop]

    tokenizer = type("Tokenizer", (), {"decode": staticmethod("".join)})
    records = [Records(range(2)), Records(range(3))]
    assert prose_of(records, tokenizer, 8) == "abc abcd a"
    assert prose_of(records, tokenizer, 99) == "abc abcd abc abcd abcde"


def test_mistakes_name_the_option_or_the_file(tmp_path, sources):
    none = Sources(lambda: " ")
    for task, message in [
        ("niah_single_2", "pass --essay=FILE"),
        ("qa_1", r"pass --squad=dev-v2\.0\.json"),
        ("qa_2", "pass --hotpot="),
    ]:
        with pytest.raises(UserError, match=message):
            _made(task, none)
    with pytest.raises(UserError, match="--hotpot has 50 questions for 51 samples"):
        _made("qa_2", sources, num_samples=51)
    path = tmp_path / "file.json"
    for text in ("{}", '{"data": [1]}', '{"data": [{"paragraphs": []}]}', '{"text": 1}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"file\.json"):
            _made("qa_1", Sources(str, str(path)))
        with pytest.raises(DataError, match=r"file\.json"):
            _made("qa_2", Sources(str, hotpot=str(path)))
        with pytest.raises(DataError, match=r"file\.json"):
            read_essay(str(path))
    path.write_text(json.dumps({"text": "Prose."}))
    assert read_essay(str(path)) == "Prose."
    (tmp_path / "lines.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert read_essay(str(tmp_path / "lines.jsonl")) == "One. Two."


def test_the_needles_of_the_paper_are_among_the_tasks():
    assert set(NIAH) < set(TASKS)
    assert (len(NIAH), len(TASKS)) == (6, 13)
    assert NOISE.count(".") == 5
