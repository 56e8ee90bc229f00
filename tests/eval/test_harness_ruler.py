"""RULER of lm-evaluation-harness with a run's tokenizer, and what it cannot generate."""

import json
from unittest import mock

import pytest

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.eval.harness import load_tasks, measure

RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
    *("niah_multikey_3", "niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe"),
    *("ruler_fwe", "ruler_qa_squad"),
)


def _load_ruler(names, folder, *lengths, encode=lambda text: [0, *text.split()]):
    return load_tasks(
        names, data=str(folder), metadata={"max_seq_lengths": [*lengths]}, encode=encode
    )


@pytest.fixture(scope="module")
def few_words():
    """Words of needles: the harness combines all of the package, for many seconds."""
    kinds = {kind: ["blue", "fast", "old"] for kind in ("nouns", "verbs", "adjectives")}
    words = [f"{a}{b}" for a in "abcdefghijklmnop" for b in "qrstuvwxyz"]
    every = mock.Mock(_categories=kinds | dict.fromkeys(["noun", "verb", "adjective"], words))
    with mock.patch("wonderwords.RandomWord", return_value=every):
        yield


def test_ruler_of_the_harness_is_generated_for_a_tokenizer(tmp_path, few_words):
    essay = json.dumps({"text": "All is well. Nothing is new here. " * 40})
    (tmp_path / "essays.jsonl").write_text(f"{essay}\n{essay}\n")
    paragraph = {"context": "Mars is red.", "qas": []}
    for i in range(500):
        answers = [{"text": "red"}]
        paragraph["qas"].append({"question": f"{i}?", "answers": answers, "is_impossible": False})
    squad = {"data": [{"paragraphs": [paragraph, {"context": "Venus is not.", "qas": []}]}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(squad))
    items = _load_ruler(["ruler"], tmp_path, 1024)
    tasks = items.loaded["tasks"]
    assert [*tasks] == [*RULER]
    for name, task in tasks.items():
        rows = task.eval_docs
        assert len(rows) == 500
        size = max(len(row["input"].split()) for row in rows)
        assert (10 if name == "ruler_qa_squad" else 300) < size <= 1024
        assert all(row["outputs"] and row["max_length"] == 1024 for row in rows)
        assert all(x in rows[0]["input"] for x in rows[0]["outputs"])
    assert "Nothing is new here." in tasks["niah_single_2"].eval_docs[0]["input"]
    assert "Document 1:\n" in tasks["ruler_qa_squad"].eval_docs[0]["input"]
    again = _load_ruler(["ruler"], tmp_path, 1024).loaded["tasks"]
    assert all([*again[name].eval_docs] == [*tasks[name].eval_docs] for name in tasks)


def test_ruler_of_the_harness_has_a_score(tmp_path, few_words):
    items = _load_ruler(["niah_single_1"], tmp_path, 300, 4096)
    rows = items.loaded["tasks"]["niah_single_1"].eval_docs
    assert [sum(x["max_length"] == n for x in rows) for n in (300, 4096)] == [500, 500]
    oracle, answers = mock.Mock(tokenizer=ByteTokenizer()), iter(rows)
    oracle.generate = lambda requests: [
        f" is {x['outputs'][0]}" if x["max_length"] == 300 else "?" for x in answers
    ]
    short, long = measure(items, oracle)[::-1]
    assert [(x["metric"], x["value"]) for x in (short, long)] == [("300", 1.0), ("4096", 0.0)]
    prompt, settings = items.loaded["tasks"]["niah_single_1"].instances[0].args
    assert prompt.endswith("mentioned in the provided text is")
    assert settings["max_gen_toks"] == 128


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("babilong_qa1", {}, "qa1.jsonl with the fields input, question and target, or"),
        ("babilong", {"lengths": [4096]}, "BABILong is one text, such as 4k, not .4096"),
        ("babilong", {"lengths": "../0k"}, "is one text, such as 4k, not ../0k"),
        ("niah_single_2", {}, "niah_single_2 reads FOLDER/essays.jsonl: pass --data=FOLDER"),
        ("ruler_qa_squad", {}, "pass --data=FOLDER with dev-v2.0.json"),
        ("ruler_qa_hotpot", {}, "pass --data=FOLDER with hotpot_dev_distractor_v1.json"),
        ("niah_single_1", {"lengths": "4k"}, r"of RULER are numbers of tokens, .4096., not 4k"),
        ("niah_single_1", {"lengths": [8]}, r"niah_single_1 .ValueError: Could not generate any"),
        ("ruler_vt", {"encode": list}, "takes .* of the run's tokens for a solved example"),
        ("ruler_vt", {"lengths": [700]}, "ruler_vt takes .* at its smallest and has 700"),
        ("ruler_cwe", {"lengths": [256]}, "ruler_cwe takes .* at its smallest and has 256"),
        ("ruler_fwe", {"lengths": [90]}, "ruler_fwe takes 200 .* at its smallest and has 90"),
    ],
)
def test_what_the_harness_cannot_generate_is_refused(few_words, name, options, words):
    options = {"lengths": None, "encode": str.split} | options
    with pytest.raises(UserError, match=words):
        load_tasks(
            [name],
            metadata={"max_seq_lengths": options["lengths"]},
            encode=options["encode"],
        )


def test_a_damaged_source_of_ruler_is_refused(tmp_path, few_words):
    (tmp_path / "dev-v2.0.json").write_text('{"data": []}')
    with pytest.raises(DataError, match=r"give the whole dev-v2.0.json, for 500 questions"):
        _load_ruler(["ruler_qa_squad"], tmp_path, 1024)
