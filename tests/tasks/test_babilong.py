"""BABILong: published samples are reproduced field by field, answers of our own stories are those
that follow from their text, prompts and judgement are the published ones."""

import collections
import hashlib
import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from babi_solver import solve
from checks import refused

from ttcd_jax.commands.cli import parse_options
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.measure.task import Subject
from ttcd_jax.tasks.babilong import task as module
from ttcd_jax.tasks.babilong.stories import BabiTask, read_folder, read_questions, story_lines
from ttcd_jax.tasks.babilong.task import LABELS, BabiLong, hide, is_right, of_size, prompt

DATA = Path(__file__).parent / "data/babilong"
BABI = str(DATA / "babi")
TASKS = get_args(BabiTask)
PROSE = " ".join(
    f"In the year {year} the committee met {year % 7} times and discussed its budget at length."
    for year in range(1000, 1400)
)


class Words:
    """A token is a word."""

    encode = staticmethod(str.split)
    decode = staticmethod(" ".join)


def _json_lines(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def addresses():
    """All State of the Union addresses, as far as the samples read them."""
    texts = [" "] * 65
    for part in _json_lines("state_of_the_union_parts.jsonl"):
        text = texts[part["text"]].ljust(part["length"])
        end = part["start"] + len(part["part"])
        texts[part["text"]] = text[: part["start"]] + part["part"] + text[end:]
    return texts


def _questions(task, num_stories, seed=0):
    return list(read_questions(story_lines(task, seed, num_stories)))


@pytest.mark.parametrize("task", TASKS)
def test_published_samples_are_reproduced(task, addresses):
    published = [x for x in _json_lines("samples_words400.jsonl") if x["task"] == task]
    questions = of_size(read_folder(DATA / "babi", task), 400)
    numbered = [(x["sample_index"], questions[x["sample_index"]]) for x in published]
    samples = hide(numbered, addresses, Words, size=400, seed=11)
    for sample, expected in zip(samples, published, strict=True):
        fields = json.loads(json.dumps(sample._asdict()))
        fields |= {"task": task, "sample_index": fields.pop("index"), "size": 400, "seed": 11}
        assert fields == expected


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_their_text(task):
    """Those of bAbI and ours, all labels about as often."""
    published, many = read_folder(DATA / "babi", task), 1000 if task == "qa4" else 200
    questions = _questions(task, many)
    assert (len(published) > 40, len(questions)) == (True, 1000)
    for x in (*published, *questions):
        assert solve(x.facts, x.question) == (x.target, x.references), x
    answers, labels = [x.target for x in questions], LABELS[task]
    assert {*answers} == {*labels}
    assert max(map(answers.count, labels)) < 2 * len(answers) / len(labels)
    assert questions == _questions(task, many)
    assert questions[:5] == _questions(task, 5)[:5] != _questions(task, 5, seed=1)[:5]


def test_all_forms_of_statements_and_questions_occur():
    """Those of bAbI's files, names aside."""

    def forms(questions):
        names = ("John", "Mary", "Sandra", "Daniel", "Bill", "Fred", "Jeff")
        kinds = {"A": names, "P": LABELS["qa1"], "O": ("apple", "football", "milk")}
        kind_of = {name: kind for kind, members in kinds.items() for name in members}
        texts = {text for x in questions for text in (*x.facts, x.question)}
        words = ([kind_of.get(w.strip(".? "), w.strip(".? ")) for w in x.split()] for x in texts)
        return {" ".join(x) for x in words}

    for task in TASKS:
        published = forms(read_folder(DATA / "babi", task))
        ours = forms(_questions(task, 300))
        assert published <= ours, task
        assert len(ours - published) <= 6, task  # a part of the files has not all of them


@pytest.mark.parametrize(("tokenizer", "size"), [(Words, 300), (ByteTokenizer(), 700)])
def test_facts_and_sentences_fill_the_text(tokenizer, size):
    """Whatever the tokenizer: the text has `size` tokens."""
    questions = _questions("qa2", 20)
    fitting = of_size(questions, size)
    assert fitting == [x for x in questions if len(x.facts) + 1 <= size // 8]
    samples = list(hide(enumerate(fitting), [PROSE], tokenizer, size=size, seed=3))
    assert [x.index for x in samples] == [*range(len(fitting))]
    long, samples = ([x for x in samples if any(x.background) is y] for y in (False, True))
    assert len(samples) > 20
    assert bool(long) is (tokenizer is not Words)  # facts of 25 bytes and more
    for sample in long:
        assert (sample.background, sample.input) == (("",), " ".join(sample.facts))
        assert {*sample.fact_positions} <= {0, 1}
    for sample in samples:
        assert sample[1:5] == fitting[sample.index]
        # One of the bytes is the first blank, which the text leaves out.
        assert len(tokenizer.encode(sample.input)) == size - (tokenizer is not Words)
        assert all(sentence in PROSE for sentence in sample.background)
    (plain,) = hide([(7, questions[0])], [], Words, size=0, seed=0)
    assert (plain.index, plain.background, plain.input) == (7, (), " ".join(questions[0].facts))


def test_a_long_text_encodes_each_sentence_once():
    """Else a hundred samples of 32K tokens take minutes."""
    encoded = collections.Counter()

    class Counting(ByteTokenizer):
        def encode(self, text):
            encoded[text] += 1
            return super().encode(text)

    questions = _questions("qa1", 20)
    samples = hide(enumerate(questions), [PROSE * 20], Counting(), size=31_700, seed=0)
    assert len([*samples]) == 100
    assert len(encoded) < 1000
    assert max(encoded.values()) == 1


def test_damaged_stories_are_refused(tmp_path):
    story = "1 Mary got the milk.\n2 Mary went to the office.\n3 Where is Mary? \toffice\t2\n"
    assert len([*read_questions(story.splitlines())]) == 1
    for old, new, words in (
        ("2 Mary", "4 Mary", "line 2: '4 Mary went to the office.' is no line 2 of a bAbI story"),
        ("\toffice\t", "\t \t", "line 3: |is no line 3 of a bAbI story"),
        ("\t2", "\t7", "line 3: |is no line 3 of a bAbI story"),
        ("\toffice\t2", "\toffice", "line 3"),
        ("1 Mary", "Mary", "line 1"),
    ):
        damaged = story.replace(old, new).splitlines()
        refused(words, lambda lines: [*read_questions(lines)], damaged, error=DataError)
    refused("has 0 files qa1_*test.txt", read_folder, tmp_path / "none", "qa1", error=DataError)
    (tmp_path / "qa1_x_test.txt").write_bytes(b"1 M\xffary.\n")
    refused("qa1_x_test.txt, line 1: ", read_folder, tmp_path, "qa1", error=DataError)


def test_prompts_are_the_published_ones():
    """All their texts by a digest; those of qa4 are filled in here."""
    texts = (Path(prompt.__code__.co_filename).parent / "prompts.json").read_bytes()
    assert hashlib.sha256(texts).hexdigest()[:16] == "4de7c982302c83fc"
    templates = json.loads(texts)
    for form in ("official", "harness"):
        filled = prompt(form, "qa4", " The {a} is. ", "What is it? ")
        template = templates[form]["qa4"]
        expected = template.replace("{context}", "The {a} is.").replace("{question}", "What is it?")
        assert filled == expected != template
    assert filled.endswith("? garden\n\nThe {a} is.\nWhat is it?")


def test_answers_are_judged_as_published():
    before, gift = "Where was the milk before the kitchen? ", "What did Fred give to Bill? "
    for asked, output, official, harness in (
        (("qa3", "office", before), " The most recent location of Mary is OFFICE", True, True),
        (("qa3", "office", before), "office. Then the garden", True, True),
        (("qa3", "office", before), "the garden or the office", False, True),
        (("qa3", "office", before), "garden. office", False, True),
        (("qa3", "office", before), "the office<example> the garden", True, True),
        (("qa3", "office", before), "the office <context> the garden", True, True),
        (("qa3", "office", before), "kitchen, then office", True, True),  # in the question
        (("qa3", "office", before), "the offic", False, False),
        (("qa5", "milk", gift), "Fred gave Bill the milk", True, True),
        (("qa5", "milk", gift), "Mary gave Bill the milk", False, True),
        (("qa5", "Jeff", "Who gave the milk? "), "jeff", True, True),
    ):
        for form, expected in (("official", official), ("harness", harness)):
            task, target, question = asked
            assert is_right(form, task, target, output, question) is expected


class Oracle:
    """Answers like a scorer: `answer(prompt's text)`."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []

    def generate(self, requests):
        self.requests = requests
        assert all(request.sampling.temperature == 0 for request in requests)
        return [self.answer(ByteTokenizer().decode(request.tokens)) for request in requests]


def _subject(tmp_path):
    return Subject(SimpleNamespace(), ByteTokenizer(), {"type": "none"}, tmp_path, "mine")


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    return str(path)


@pytest.mark.parametrize(("form", "babi"), [("official", None), ("harness", BABI)])
def test_an_oracle_scores_100_and_random_labels_chance(tmp_path, prose, form, babi):
    task = BabiLong(lengths=("0k", "2k"), samples=20, background=prose, babi=babi, form=form)
    subject = _subject(tmp_path)
    cases = task.rows(subject)
    targets = iter([case.sample.target for case in cases])
    oracle = Oracle(lambda _: f" It is {next(targets)}.")
    best = [*task.measure(oracle, cases, subject)]
    assert {x.max_new_tokens for x in oracle.requests} == {20 if form == "official" else 16}
    whole = {"0k": 100.0, "2k": 100.0, "average": 100.0}
    assert task.table({"mine": best}) == [{"task": x} | whole for x in (*TASKS, "average")]
    rng = random.Random(0)
    names = itertools.cycle([case.task for case in cases])
    guess = Oracle(lambda _: f"The {rng.choice(LABELS[next(names)])}.")
    records = [x for _ in range(20) for x in task.measure(guess, cases, subject)]
    (*_, average) = task.table({"mine": records})
    assert abs(average["average"] - task.chance(subject)) < 2.5  # 4 standard errors
    assert task.chance(subject) == pytest.approx(100 * (4 / 6 + 1 / 7) / 5)
    both = task.table({"a": best, "b": records})
    assert [row["task"] for row in both[:6]] == [f"a, {name}" for name in (*TASKS, "average")]
    (picture,) = task.pictures(tmp_path, {"a": best, "b": records}, task.chance(subject))
    assert (tmp_path / picture.path).read_text().startswith("<svg")
    assert "facts hidden in a text" in picture.sentence
    options = [task.replace(**x).to_dict() for x in ({}, {"batch_size": 3}, {"samples": 3})]
    first, same, other = (task.comparable(x, []) for x in options)
    assert first == same != other


def test_prompts_hold_the_text_and_the_question(tmp_path, prose):
    options = ["--tasks=qa1,qa3", "--lengths=0k,2k", "--samples=5", f"--background={prose}"]
    task = parse_options(BabiLong, "task babilong", options)

    def cases_of(**changes):
        return task.replace(**changes).rows(_subject(tmp_path))

    cases = cases_of()
    expected = [*itertools.product(("qa1", "qa3"), ("0k", "2k"))]
    assert [(x.task, x.length) for x in cases[::5]] == expected
    for case in cases:
        text = ByteTokenizer().decode(case.prompt)
        assert text == prompt("official", case.task, case.sample.input, case.sample.question)
        assert len(case.sample.input) == 1699 or case.length == "0k"
    samples = [x.sample for x in cases]
    assert samples == [x.sample for x in cases_of()]
    assert samples[0].facts != cases_of(seed=1)[0].sample.facts


def test_what_cannot_be_measured_is_refused(tmp_path, prose):
    take = module.Background(["", "Short. Too short. Far too short."], str.split, 0).take
    words = "no sentence of 10 |in 50,000 draws from a background of 2 texts for 20 tokens"
    refused(words, take, 20, error=DataError)
    subject = _subject(tmp_path)
    few = BabiLong(tasks=("qa3",), lengths=("1k",), samples=50, background=prose, babi=BABI)
    refused("qa3 has 8 questions whose facts fit into 1k tokens, not 50", few.rows, subject)
    none = subject._replace(tokenizer=None)
    refused("has no tokenizer: babilong needs a run on text", BabiLong().rows, none)
    absent = BabiLong(background=str(tmp_path / "none.txt"))
    refused("none.txt", absent.rows, subject, error=DataError)
    for wrong in ("--tasks=qa6", "--lengths=3k", "--tasks=qa1,qa1", "--samples=0", "--form=mine"):
        option = wrong[2:].partition("=")[0]
        refused(option, parse_options, BabiLong, "task babilong", [wrong])
