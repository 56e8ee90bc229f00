"""The task `ruler`: a reader of the prompts scores 100 and a guesser about 0, tables, pictures,
published files, and what is left out or refused."""

import collections
import dataclasses
import functools
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from checks import randomize
from small_models import byte_model

from experiments.cli import parse_options
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.measure.results import (
    Results,
    evaluate,
    merged,
    read_all_results,
    task_sections,
)
from ttcd_jax.measure.task import Subject
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.tasks.ruler import NIAH, TASKS
from ttcd_jax.tasks.ruler.task import Answered, Ruler

DATA = Path(__file__).parent / "data/ruler"


class Fours:
    """A token is four characters."""

    @staticmethod
    def encode(text):
        return [text[i : i + 4] for i in range(0, len(text), 4)]

    decode = staticmethod("".join)


TOKENIZER = Fours()
FILES = {"essay": str(DATA / "essay.txt"), "squad": str(DATA / "squad.json")}


@functools.cache
def _model():
    return randomize(Transformer, byte_model())


def _subject(run_dir, data=None, tokenizer=TOKENIZER):
    return Subject(_model(), tokenizer, data or {"type": "none"}, run_dir)


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    context = [["Rivers", ["The Sava is a river.", " It is long."]], ["Hills", ["Hills are low."]]]
    entries = [{"question": f"Which {i}?", "answer": "Sava", "context": context} for i in range(5)]
    path = tmp_path_factory.mktemp("hotpot") / "hotpot.json"
    path.write_text(json.dumps(entries))
    return str(path)


class Writer:
    """Writes what `answer` makes of a prompt; asks for as many tokens as the task has."""

    def __init__(self, answer):
        self.answer, self.most = answer, []

    def generate(self, requests):
        self.most = [request.max_new_tokens for request in requests]
        assert all(request.sampling.temperature == 0 for request in requests)
        return [self.answer(TOKENIZER.decode(request.tokens)) for request in requests]


def _read(prompt):
    """The answer to a prompt, from its text alone."""
    if prompt.startswith("Answer"):
        return "FRANCE, the Sava, the 10th and 11th centuries, Denmark, Iceland and Norway"
    if "magic" in prompt:
        pairs = re.findall(r"One of the special magic \w+ for (.+?) is: ([\w-]+)\.", prompt)
        query = prompt[prompt.rindex(" for ") + 5 : prompt.rindex(" mentioned")]
        return " ".join(value for key, value in pairs if key in query)
    if "VAR" in prompt:
        value = re.findall(r"assigned the value (\d+)", prompt)[-1]
        links = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt.split("Memorize")[-1]))
        names = [name for name in links if _end(links, name) == value]
        return ", ".join(names)
    if "coded" in prompt:
        words = collections.Counter(re.findall(r"\b[a-z]{6}\b", prompt[127:-270]))
        return " ".join(word for word, _ in words.most_common(3))
    listed = re.findall(r"\d+\. (.+?)(?= \d+\.|\n)", prompt.split("Memorize the ones")[-1])
    return ", ".join(word for word, _ in collections.Counter(listed).most_common(10))


def _end(links, name):
    while name in links:
        name = links[name]
    return name


def _measured(task, scorer, subject):
    return task.measure(scorer, task.rows(subject), subject)


def test_a_reader_scores_100_and_a_guesser_0(tmp_path, hotpot):
    task = Ruler(lengths=(2048,), samples=3, hotpot=hotpot, **FILES)
    subject = _subject(tmp_path)
    scorer = Writer(_read)
    records = _measured(task, scorer, subject)
    assert len(records) == 13 * 3
    assert {record.task: record.score for record in records if record.score < 100} == {}
    assert scorer.most == [TASKS[record.task].num_new for record in records]
    assert [record.depth is None for record in records] == [
        not record.task.startswith("niah") for record in records
    ]
    table = Ruler.table({"mine": records})
    assert [row["task"] for row in table] == [*TASKS, "average of 13", "average of 6 needles"]
    assert {row["2K"] for row in table} == {100}
    draw = random.Random(0)
    guesser = Writer(lambda prompt: " ".join(draw.choices(["7", "word", "ABCDE", "None"], k=30)))
    guessed = Ruler.table({"mine": _measured(task, guesser, subject)})
    assert max(row["2K"] for row in guessed) <= 5


def _record(task, length, score, depth=None):
    return Answered(task, length, 0, depth, score, "a prediction", "an answer")


def test_tables_have_the_averages_of_what_is_given():
    on = [_record("niah_single_1", 4096, 100, 5), _record("niah_single_1", 4096, 50, 95)]
    on += [_record("vt", 4096, 25), _record("vt", 8192, 15)]
    off = [_record("vt", 4096, 0), _record("niah_single_1", 4096, 10, 50)]
    table = Ruler.table({"on": on, "off": off})
    assert table == [
        {"task": "niah_single_1", "on, 4K": 75, "on, 8K": None, "off, 4K": 10},
        {"task": "vt", "on, 4K": 25, "on, 8K": 15, "off, 4K": 0},
        {"task": "average of 2 of 13", "on, 4K": 50, "on, 8K": None, "off, 4K": 5},
        {"task": "average of 1 of 6 needles", "on, 4K": 75, "on, 8K": None, "off, 4K": 10},
    ]


def test_pictures_are_lines_and_heat_maps(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        "ttcd_jax.tasks.ruler.task.plot_lines", lambda path, **facts: drawn.update(lines=facts)
    )
    monkeypatch.setattr(
        "ttcd_jax.tasks.ruler.task.plot_heat_map", lambda path, **facts: drawn.update(heat=facts)
    )
    series = {"on": [_record("niah_single_1", x, 80, y) for x in (4096, 8192) for y in (0, 99.9)]}
    series["on"].append(_record("niah_single_2", 8192, 20, 0))
    pictures = Ruler.pictures(tmp_path, series, None)
    assert [picture.path.name for picture in pictures] == ["ruler.png", "depth.png"]
    assert drawn["lines"]["series"] == {"on": ([4096, 8192], [80, 80])}  # of the shared task
    assert "length (1)" in pictures[0].sentence
    assert drawn["heat"]["x"] == ["4K", "8K"]
    rows = drawn["heat"]["panels"]["on"]
    assert (rows[0], rows[4], rows[9]) == ([80, 50], [None, None], [80, 80])
    others = {"on": [_record("vt", 4096, 9)], "off": [_record("fwe", 4096, 8)]}
    (only,) = Ruler.pictures(tmp_path, others, None)
    assert only.path.name == "ruler.png"
    assert drawn["lines"]["series"] == {"on": ([4096], [None]), "off": ([4096], [None])}


def test_runs_with_other_tasks_share_a_table_but_not_with_other_samples():
    options = {"samples": 1, "seed": 42}

    def results(name, digests, record):
        fields = {"run_dir": Path(name), "folder": "ruler", "label": name, "options": options}
        fields |= {"step": 1, "measured_on": digests, "series": {name: [record]}}
        return Results(task=Ruler, **fields)

    one = results("a", {"vt, 4096": "v"}, _record("vt", 4096, 9))
    two = results("b", {"cwe, 8192": "c", "fwe, 8192": "f"}, _record("cwe", 8192, 8))
    table = merged([one, two]).table
    assert table[0] == {"task": "vt", "a, 4K": 9, "b, 8K": None}
    with pytest.raises(UserError, match="evaluate both with the same options"):
        merged([one, dataclasses.replace(two, options=options | {"seed": 1})])
    with pytest.raises(UserError, match="not measured on the same text"):
        merged([one, dataclasses.replace(two, measured_on={"vt, 4096": "of other prose"})])
    with pytest.raises(UserError, match=r"not measured on the same text.*not stored"):
        merged([one, dataclasses.replace(two, measured_on={"": None})])


def test_a_model_is_evaluated_on_prose_of_its_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Sentence {i} of a text. And another.\n" for i in range(3000)))
    data = TextConfig(
        corpus=CorpusConfig(kind="text", path=str(text)), tokenizer=TokenizerConfig(), seq_len=40
    )
    options = ["--tasks=niah_single_2,fwe", "--lengths=3400", "--samples=2", "--batch_size=2"]
    task = parse_options(Ruler, "task ruler", options)
    subject = _subject(tmp_path / "run", data.to_dict(), ByteTokenizer())
    result = evaluate(task, subject, 3)
    assert result.rows == 4
    cases = task.rows(subject)
    assert all("of a text. And another." in x.sample.input for x in cases if x.task != "fwe")
    for records in result.series.values():
        assert [record.length for record in records] == [3400] * 4
        assert {type(record.prediction) for record in records} == {str}
    folder = result.write()
    assert (folder / "depth.png").read_bytes().startswith(b"\x89PNG")
    (section,) = task_sections(read_all_results([result.run_dir]), tmp_path / "page")
    assert section.title == Ruler.title
    assert [row["task"] for row in section.table][:2] == ["niah_single_2", "fwe"]


def test_published_files_are_answered(tmp_path):
    sample = {"input": "A word is Hope.", "answer_prefix": " It is", "outputs": ["hope"]}
    path = tmp_path / "ctx100/vt/validation.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([json.dumps(sample | {"index": 0, "length": 9})] * 3))
    subject = _subject(tmp_path)
    for place in (tmp_path, path):
        task = Ruler(tasks="vt", lengths=(100,), samples=2, data=str(place))
        records = _measured(task, Writer(lambda prompt: prompt[-15:]), subject)
        assert [record.prediction for record in records] == ["d is Hope. It is"[-15:]] * 2
        assert [record.score for record in records] == [100, 100]
    (case,) = Ruler(lengths=(100,), samples=1, data=str(tmp_path)).rows(subject)
    assert case.task == "vt"
    with pytest.raises(DataError, match="the file of one task and length"):
        Ruler(tasks="niah", lengths=(100,), data=str(path)).rows(subject)
    with pytest.raises(UserError, match=r"there is no .*ctx200/vt/validation\.jsonl: pass --data="):
        Ruler(tasks="vt", lengths=(200,), data=str(tmp_path)).rows(subject)


def test_a_task_without_its_source_is_left_out_of_a_group_and_refused_by_name(tmp_path, caplog):
    subject = _subject(tmp_path)
    cases = Ruler(lengths=(2048,), samples=1).rows(subject)
    kept = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert [case.task for case in cases] == kept
    assert len(caplog.messages) == 7
    assert "qa_1 is left out: the questions are those of dev-v2.0.json: pass --squad" in caplog.text
    for tasks, message in [
        ("qa_2", "pass --hotpot="),
        ("niah,niah_single_3", "pass --essay=FILE"),
        ("cwe", r"cwe takes \d+ tokens .* has 100"),
    ]:
        with pytest.raises(UserError, match=message):
            Ruler(tasks=tasks, lengths=(100,), samples=1).rows(subject)
    with pytest.raises(UserError, match=r"RULER has no task here \(niah_single_1 is left out: .*;"):
        Ruler(tasks="niah", lengths=(100,), samples=1).rows(subject)


def test_a_task_whose_package_is_missing_is_left_out_of_a_group(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wonderwords.random_word", None)
    cases = Ruler(lengths=(2048,), samples=1).rows(_subject(tmp_path))
    assert {case.task for case in cases} & {"fwe", "cwe"} == {"fwe"}
    assert "cwe is left out: the list of words cannot be read without wonderwords" in caplog.text


def test_mistakes_are_refused(tmp_path):
    with pytest.raises(UserError, match="RULER has no task 'niah_singel_1'; did you mean 'niah_si"):
        Ruler(tasks="vt,niah_singel_1")
    with pytest.raises(UserError, match="must be one or more, none twice"):
        Ruler(lengths=(4096, 4096))
    for options in ({"seed": 2**32}, {"lengths": (0,)}, {"lengths": (2**30,)}):
        with pytest.raises(UserError, match=r"must (each )?be in"):
            Ruler(**options)
    with pytest.raises(DataError, match="pass another --essay"):
        Ruler(tasks="niah_single_2", essay=str(tmp_path / "none")).rows(_subject(tmp_path))
    with pytest.raises(UserError, match="has no tokenizer and RULER is text"):
        Ruler().rows(_subject(tmp_path, tokenizer=None))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json"):  # a damaged file is refused in a group too
        Ruler(squad=str(tmp_path / "bad.json"), samples=1).rows(_subject(tmp_path))


def test_groups_hold_their_tasks_once(tmp_path):
    task = Ruler(tasks="niah,niah_single_1", lengths=(4096,), samples=1, essay=FILES["essay"])
    assert [case.task for case in task.rows(_subject(tmp_path))] == list(NIAH)
    np.testing.assert_array_equal(task.lengths, [4096])
