"""RULER: the published samples, sizes by other tokenizers, sources, files, score; the task, where
who knows the answers scores 100 and a guesser about 0, tables, pictures, what is left out."""

import collections
import dataclasses
import functools
import gzip
import hashlib
import json
import random
import re
import sys
from pathlib import Path

import pytest
from checks import refused

from ttcd_jax.errors import DataError
from ttcd_jax.measure.results import Results, merged
from ttcd_jax.measure.task import Subject
from ttcd_jax.tasks.ruler.prompts import Cell, Drawing, Prompt, Sources, read_essay
from ttcd_jax.tasks.ruler.task import NIAH, TASKS, Answered, Ruler, make_samples, score

DATA = Path(__file__).parent / "data/ruler"
# Of three prompts of 4,096 words, seed 7, joined by zero bytes: made by a second program, which
# follows the description of the published scripts with Python's global generators.
DIGESTS = json.loads((DATA / "digests.json").read_text())
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
    state = random.getstate()
    texts = "\0".join(sample.prompt for sample in _made(task, sources, 4096, seed=7))
    assert random.getstate() == state
    assert hashlib.sha256(texts.encode()).hexdigest().startswith(DIGESTS[task])


@pytest.mark.parametrize(("count", "length"), [(_fours, 2048), (_words, 4096)])
def test_texts_fit_under_any_tokenizer_and_hold_their_answers(count, length, sources):
    for task, ruler in TASKS.items():
        samples = _made(task, sources, length, count)
        for sample in samples:
            assert sample.length == count(sample.prompt) + ruler.num_new <= length
            assert sample.answer_prefix.startswith(ruler.prefix)
            asked = re.search(r"Question (\d+)\?", sample.input)
            known = f"answer {asked[1]}" if task == "qa_2" else sample.input
            assert all(answer in known for answer in sample.outputs)
        if count is _words and task[:2] != "qa":
            assert max(sample.length for sample in samples) > 0.95 * length


@pytest.mark.parametrize(
    ("task", "length", "words"),
    [
        ("niah_single_1", 150, "niah_single_1 takes |has 150: ask for longer contexts"),
        ("vt", 700, "vt takes | tokens at its smallest and has 700: ask for longer"),
        ("qa_2", 150, "qa_2 takes | at its smallest and has 150: |, or leave it out"),
        ("fwe", 140, "fwe takes 150 tokens or more and has 140"),
        ("cwe", 80_000, "tries lists of | words and wonderwords has 8|: ask for shorter"),
    ],
)
def test_what_the_published_generator_has_no_sample_for_is_refused(task, length, words, sources):
    count = (lambda text: len(text.encode())) if task == "vt" else _words
    refused(words, _made, task, sources, length, count, num_samples=1)


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


def test_paragraphs_of_the_same_article_come_before_others(tmp_path):
    def paragraph(name, is_impossible):
        asked = {"question": "?", "answers": [{"text": "a"}], "is_impossible": is_impossible}
        return {"context": f"Paragraph {name}", "qas": [asked]}

    articles = [[paragraph(f"{i}.{part}", part > 0) for part in range(4)] for i in range(30)]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": x} for x in articles]}))
    samples = _made("qa_1", Sources(str, str(path)), 180, num_samples=30)
    for number, sample in enumerate(samples):
        found = re.findall(r"^Paragraph (\d+\.\d)$", sample.input, re.MULTILINE)
        assert {f"{number}.{part}" for part in range(4)} < set(found)
        assert len(found) == len(set(found)) > 10


def test_a_text_shrinks_to_a_step_and_is_drawn_until_it_fits():
    cell, sizes, drawing = Cell("cwe", 1000, 100, 0, _words), [], Drawing((), 60, 25)

    def make(size):
        sizes.append(size)
        return Prompt("word " * (900 if len(sizes) == 3000 else 901 + len(sizes) % 2), [])

    assert cell.fitted(make, drawing) == (Prompt("word " * 900, []), 1000)
    assert sizes == [60, 35, 10, *[10] * 2997]
    sizes.clear()
    to_zero = Drawing((), 17, 6, least=0)
    assert cell.fitted(lambda n: Prompt("word " * 100 * max(n, 0), []), to_zero)[1] == 600
    too_long = lambda n: make(n) and Prompt("word " * 1001, [])  # noqa: E731
    refused("cwe takes 1101 tokens |has 1000", cell.fitted, too_long, drawing)
    assert len(sizes) == 102
    refused("cwe takes more tokens", cell.fitted, lambda n: None, drawing)


def test_the_score_counts_answers_or_takes_one():
    for text, *expected in (
        ("it is ABC and def", 100, 100),
        (" ab\x07c abc\n", 50, 100),
        ("", 0, 0),
    ):
        assert [score(text, ["abc", "DEF"], takes_any=x) for x in (False, True)] == expected


def test_mistakes_name_the_option_or_the_file(tmp_path, sources):
    words = "--hotpot has 50 questions for 51 samples"
    refused(words, _made, "qa_2", sources, num_samples=51)
    path = tmp_path / "file.json"
    for text in ("{}", '{"data": [1]}', '{"data": [{"paragraphs": []}]}', '{"text": 1}'):
        path.write_text(text)
        refused("file.json", _made, "qa_1", Sources(str, str(path)), error=DataError)
        refused("file.json", _made, "qa_2", Sources(str, hotpot=str(path)), error=DataError)
        refused("file.json", read_essay, str(path), error=DataError)
    for name, text in (("file.json", ""), ("lines.jsonl", '\n{"text": "Two."}\n')):
        (tmp_path / name).write_text('{"text": "One."}' + text)
        assert read_essay(str(tmp_path / name)) == ("One. Two." if text else "One.")


class Fours:
    """A token is four characters."""

    @staticmethod
    def encode(text):
        return [text[i : i + 4] for i in range(0, len(text), 4)]

    decode = staticmethod("".join)


TOKENIZER = Fours()
FILES = {"essay": str(DATA / "essay.txt"), "squad": str(DATA / "squad.json")}


def _subject(run_dir):
    return Subject(None, TOKENIZER, {"type": "none"}, run_dir)


class Writer:
    """Writes what `answer` makes of a prompt; asks for as many tokens as the task has."""

    def __init__(self, answer):
        self.answer, self.most = answer, []

    def generate(self, requests):
        self.most = [request.max_new_tokens for request in requests]
        assert all(request.sampling.temperature == 0 for request in requests)
        return [self.answer(TOKENIZER.decode(request.tokens)) for request in requests]


def _measured(task, answer, subject):
    """The records, and the most tokens asked for."""
    writer = Writer(answer)
    return [*task.measure(writer, task.rows(subject), subject)], writer.most


def test_who_knows_the_answers_scores_100_and_a_guesser_0(tmp_path, hotpot, sources):
    subject = _subject(tmp_path)
    task = Ruler(lengths=(2048,), samples=3, hotpot=str(hotpot), **FILES)
    samples = [x for name in TASKS for x in _made(name, sources, 2048, _fours)]
    known = {x.prompt: " ".join(x.outputs) for x in samples}
    records, most = _measured(task, known.get, subject)
    assert len(records) == 13 * 3
    assert {record.task: record.score for record in records if record.score < 100} == {}
    assert most == [TASKS[record.task].num_new for record in records]
    assert all((x.depth is None) == (not x.task.startswith("niah")) for x in records)
    table = Ruler.table({"mine": records})
    assert [row["task"] for row in table] == [*TASKS, "average of 13", "average of 6 needles"]
    assert {row["2K"] for row in table} == {100}
    draw = random.Random(0)
    guess = lambda prompt: " ".join(draw.choices(["7", "word", "ABCDE", "None"], k=30))  # noqa: E731
    guessed = Ruler.table({"mine": _measured(task, guess, subject)[0]})
    assert max(row["2K"] for row in guessed) <= 5


def _record(task, length, score, depth=None):
    return Answered(task, length, 0, depth, score, "a prediction", "an answer")


def test_tables_have_the_averages_of_what_is_given():
    needle = functools.partial(_record, "niah_single_1", 4096)
    on = [needle(100), needle(50), _record("vt", 4096, 25), _record("vt", 8192, 15)]
    off = [_record("vt", 4096, 0), needle(10)]
    assert Ruler.table({"on": on, "off": off}) == [
        {"task": "niah_single_1", "on, 4K": 75, "on, 8K": None, "off, 4K": 10},
        {"task": "vt", "on, 4K": 25, "on, 8K": 15, "off, 4K": 0},
        {"task": "average of 2 of 13", "on, 4K": 50, "on, 8K": None, "off, 4K": 5},
        {"task": "average of 1 of 6 needles", "on, 4K": 75, "on, 8K": None, "off, 4K": 10},
    ]


def test_pictures_are_lines_and_heat_maps(tmp_path, monkeypatch):
    drawn, module = {}, "ttcd_jax.tasks.ruler.task"
    monkeypatch.setattr(f"{module}.plot_lines", lambda path, **facts: drawn.update(facts))
    monkeypatch.setattr(f"{module}.plot_depths", lambda path, *facts: drawn.update(depths=facts))
    series = {"on": [_record("niah_single_1", x, 80, y) for x in (4096, 8192) for y in (0, 99.9)]}
    series["on"].append(_record("niah_single_2", 8192, 20, 0))
    pictures = Ruler.pictures(tmp_path, series, None)
    assert [picture.path.name for picture in pictures] == ["ruler.svg", "depth.svg"]
    assert drawn["series"] == {"on": ([4096, 8192], [80, 80])}  # of the shared task
    assert "length (1)" in pictures[0].sentence
    lengths, panels = drawn["depths"]
    rows = [panels["on"][i] for i in (0, 4, 9)]
    assert (lengths, rows) == ([4096, 8192], [[80, 50], [None, None], [80, 80]])
    others = {"on": [_record("vt", 4096, 9)], "off": [_record("fwe", 4096, 8)]}
    (only,) = Ruler.pictures(tmp_path, others, None)
    assert only.path.name == "ruler.svg"
    assert drawn["series"] == {"on": ([4096], [None]), "off": ([4096], [None])}


def test_runs_with_other_tasks_share_a_table_but_not_with_other_samples():
    options = {"samples": 1, "seed": 42}
    fields = {"task": Ruler, "folder": "ruler", "run_dir": Path(), "step": 1, "options": options}
    one = {"measured_on": {"vt, 4096": "v"}, "series": {"a": [_record("vt", 4096, 9)]}}
    two = {"measured_on": {"cwe, 8192": "c"}, "series": {"b": [_record("cwe", 8192, 8)]}}
    one, two = (Results(label="", **fields | x) for x in (one, two))
    assert merged([one, two]).table[0] == {"task": "vt", "a, 4K": 9, "b, 8K": None}
    for changes, words in [
        ({"options": options | {"seed": 1}}, "evaluate both with the same options"),
        ({"measured_on": {"vt, 4096": "of other prose"}}, "not measured on the same text"),
        ({"measured_on": {"": None}}, "not measured on the same text|not stored"),
    ]:
        refused(words, merged, [one, dataclasses.replace(two, **changes)])


def test_a_task_without_its_source_is_left_out_of_a_group_and_refused_by_name(
    tmp_path, monkeypatch, caplog
):
    subject, task = _subject(tmp_path), Ruler(lengths=(2048,), samples=1)
    niah = task.replace(tasks="niah,niah_single_1", lengths=(4096,), essay=FILES["essay"])
    assert [case.task for case in niah.rows(subject)] == list(NIAH)
    kept = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert [case.task for case in task.rows(subject)] == kept
    assert len(caplog.messages) == 7
    assert "qa_1 is left out: the questions are those of dev-v2.0.json: pass --squad" in caplog.text
    for tasks, words in [
        ("qa_2", "pass --hotpot="),
        ("niah,niah_single_3", "pass --essay=PATH"),
        ("cwe", "cwe takes | has 100"),
        ("niah", "RULER has no task here (niah_single_1 is left out: |;"),
    ]:
        refused(words, task.replace(tasks=tasks, lengths=(100,)).rows, subject)
    monkeypatch.setitem(sys.modules, "wonderwords.random_word", None)
    assert {case.task for case in task.rows(subject)} & {"fwe", "cwe"} == {"fwe"}
    assert "cwe is left out: the list of words cannot be read without wonderwords" in caplog.text


def test_mistakes_are_refused(tmp_path):
    for options, words in [
        ({"tasks": "vt,niah_singel_1"}, "RULER has no task 'niah_singel_1'; did you mean 'niah_si"),
        ({"lengths": (4096, 4096)}, "must be one or more, none twice"),
        ({"seed": 2**32}, "must be in"),
        ({"lengths": (2**30,)}, "must each be in"),
    ]:
        refused(words, Ruler, **options)
    (bad := tmp_path / "bad.json").write_text("{}")
    absent = Ruler(tasks="niah_single_2", essay=str(tmp_path / "none"))
    damaged, subject = Ruler(squad=str(bad), samples=1), _subject(tmp_path)
    refused("pass another --essay", absent.rows, subject, error=DataError)
    refused("bad.json", damaged.rows, subject, error=DataError)  # in a group too
    refused("no tokenizer and RULER is text", Ruler().rows, subject._replace(tokenizer=None))
