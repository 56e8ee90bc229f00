"""lm-evaluation-harness on a run: likelihoods, prompts, groups, texts, its command, mistakes."""

import json
import sys
from pathlib import Path
from unittest import mock

import commands
import jax.numpy as jnp
import lm_eval.tasks
import numpy as np
import pytest
import tokenizers
from checks import randomize, refused
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager
from small_models import byte_model
from tiny_run import save_text_model

from ttcd_jax import MemoryConfig, Transformer, load_run
from ttcd_jax.commands import harness
from ttcd_jax.commands.harness import RunLM
from ttcd_jax.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_of
from ttcd_jax.errors import DataError, NonFiniteError, UserError
from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.measure.harness import Refusals, ScorerLM, evaluate, load_tasks
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Subject
from ttcd_jax.tasks.harness import Harness, Score

BOS, LONGEST = ByteTokenizer.bos_id, 384
RULER = str(Path(lm_eval.tasks.__file__).with_name("ruler"))  # all folders take seconds
MODEL = byte_model(
    init_std=0.5, has_tied_head=False, memory=MemoryConfig(chunk_size=4, output="teacher_raw")
)
QUESTIONS = [
    {"question": "Which planet is red?", "choices": ["Mars", "Venus", "Jupiter"], "gold": 0},
    {"question": "What freezes?", "choices": ["steam", "water, at zero degrees"], "gold": 1},
    {"question": "Wo ist die Tür?", "choices": ["hier", "da", "dort", "nirgends"], "gold": 2},
    {"question": "What does a hen lay?", "choices": ["eggs", "stones"], "gold": 0},
]
YAML = """
task: four_questions
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}} "
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
MMLU = "{question}\nA. {0}\nB. {1}\nC. {2}\nD. {3}\nAnswer:"
TOPIC = "The following are multiple choice questions (with answers) about {}.\n\n"


def _subject(name, count):
    """`count` questions, whose answers are 0, 1, ..."""
    options = ["one", "two", "three", "four"]
    return [
        {"subject": name, "question": f" {name} {i}? ", "choices": options, "answer": i % 4}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, a task of its own kind, and the data sets of the harness' tasks."""
    folder = tmp_path_factory.mktemp("harness")
    save_text_model(folder / "run", MODEL)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "four.yaml").write_text(YAML.replace("FILE", str(folder / "four.jsonl")))
    hub = {"text": ["ice", "fire"], "label": ["1", "2"]}
    story = {"activity_label": "Cooking", "ctx_a": "A man cooks.", "ctx_b": "he [title] then"}
    endings = ["eats [substeps] it.", "flies  away."]
    sizes = {"astronomy": 3, "virology": 1, "anatomy": 2}
    for stem, rows in {
        "four": QUESTIONS,
        "arc_easy": QUESTIONS[:2],
        "arc_challenge_test": [{"id": "x", "question": "Cold?", "choices": hub, "answerKey": "1"}],
        "arc_challenge_train": QUESTIONS[2:],
        "hellaswag": [story | {"endings": endings, "label": "1", "ind": 4}],
        "mmlu_test": [x for name, size in sizes.items() for x in _subject(name, size)],
        "mmlu_dev": [x for name in sizes for x in _subject(name, 5)],
    }.items():
        (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def scorer(folder):
    run = load_run(folder / "run")
    return Scorer(run.model, run.tokenizer, batch_size=4)


@pytest.fixture
def four(folder):
    """Loads the task of our own kind."""
    return lambda path=folder / "tasks", **options: load_tasks(
        ["four_questions"], include_path=str(path), **options
    )


def _measured(items, scorer):
    return Harness().measure(scorer, items, None)


def _requests(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def _prompts(items, name):
    return [x.args for x in items.loaded["tasks"][name].instances]


def _log_probs(scorer, text):
    """[T, V] after bos and the bytes of a text."""
    row = [BOS, *text.encode()]
    padded = jnp.asarray([row + [0] * (LONGEST - len(row))])
    logits = np.asarray(scorer.model(padded), np.float64)[0, : len(row)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _likelihood(scorer, context, answer):
    """(log-likelihood, is greedy) from the logits of the whole text."""
    logs = _log_probs(scorer, context + answer)
    ids = np.frombuffer((context + answer).encode(), np.uint8)
    part = np.arange(len(context.encode()), len(ids))
    return logs[part, ids[part]].sum(), bool((logs[part].argmax(-1) == ids[part]).all())


def test_an_answer_inside_a_token_of_its_prompt_is_read_apart(scorer, tmp_path):
    lm, path = ScorerLM(scorer), tmp_path / "tokenizer.json"
    words = {"<bos>": 0, "<eos>": 1, "x": 2, "m": 3, "e": 4, "mem": 5, "ory": 6, "memory": 7}
    model = tokenizers.models.WordPiece(words, unk_token="x", continuing_subword_prefix="")
    tokenizers.Tokenizer(model).save(str(path))
    lm._tokenizer = build_tokenizer(tokenizer_of(path).replace(bos_id=0, eos_id=1))
    whole, prompt, answer = map(lm.tok_encode, ("memory", "mem", "ory"))
    assert len(whole) <= len(prompt)  # nothing is left of it
    found = lm.loglikelihood(_requests("loglikelihood", ("mem", "ory"), ("mem", "x")))
    context = np.array([lm.prefix_token_id, *prompt])
    expected = scorer.loglikelihoods([(context, np.array(answer))])[0]
    assert found[0] == pytest.approx(tuple(expected))
    assert found[0][0] < -1
    requests = _requests("loglikelihood", ("Once ", ""))
    refused("the answer '' to|has no token, so no l", ScorerLM(scorer).loglikelihood, requests)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stepp": 4}, "no argument 'stepp'; did you mean 'step'"),
        ({"batch_size": 0}, "batch_size 0 is not a number of rows, or 'auto'"),
        ({"batch_size": "auto:x"}, "batch_size 'auto:x' is not a number of rows"),
        ({"batch_size": "auto", "max_batch_size": -2}, "'auto', at most -2 is not a number"),
        ({"param": 5}, "5"),
        ({"step": "x"}, "step 'x' is not a number"),
        ({"run_dir": None}, "give run_dir=DIR"),
    ],
)
def test_arguments_of_a_run_are_refused_by_name(folder, arguments, words):
    config = {"batch_size": "1", "max_batch_size": None, "device": None}
    given = {"run_dir": folder / "run"} | arguments
    given = {name: x for name, x in given.items() if x is not None}
    refused(words, RunLM.create_from_arg_obj, given, config)


def test_automatic_batches_are_ours(folder, caplog):
    config = {"batch_size": "auto:4", "max_batch_size": 8, "device": "mps"}
    lm = RunLM.create_from_arg_obj({"run_dir": folder / "run"}, config)
    assert lm._scorer.batch_size == 8
    assert "device mps has no effect: JAX computes on cpu" in caplog.text
    caplog.clear()
    RunLM(folder / "run", device="cuda:0")  # the harness' default
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_beams": 1, "top_k": 0, "use_cache": True}, SamplingConfig()),
        ({"repetition_penalty": 1.2, "top_p": 0.5}, SamplingConfig(repetition_penalty=1.2)),
        ({"do_sample": True, "top_k": -1}, SamplingConfig(temperature=1, seed=1)),
        ({"temperature": 0.7, "top_k": 5}, SamplingConfig(temperature=0.7, top_k=5, seed=1)),
        ({"do_sample": True, "seed": 7}, SamplingConfig(temperature=1, seed=8)),
        ({"max_gen_toks": 3, "until": [""]}, (3, ())),
        ({"max_new_tokens": 4, "stop": ["y"]}, (4, ("x", "y"))),
        ({"num_beams": 4}, "generate with num_beams: not supported"),
        ({"max_new_tokens": 2.5}, "generate with|2.5|: not numbers"),
        ({"do_sample": "yes"}, "generate with|yes|: not numbers, or not True or False"),
        ({"stop": [5]}, "generate until ['x', 5]: give texts"),
        ({"until": [3]}, "generate until [3]: give texts"),
        ({"top_p": 2}, "top_p 2 must be above 0"),
    ],
)
def test_settings_of_generation_are_ours_or_refused(settings, expected):
    """Here of the second request, which draws by the next seed."""
    lm = ScorerLM(mock.Mock(tokenizer=ByteTokenizer(), generate=lambda requests: requests))
    requests = _requests("generate_until", *[("text", {"until": "x"} | settings)] * 2)
    if isinstance(expected, str):
        refused(expected, lm.generate_until, requests)
    else:
        request = lm.generate_until(requests)[1]
        is_sampling = isinstance(expected, SamplingConfig)
        found = request.sampling if is_sampling else (request.max_new_tokens, request.stop)
        assert (found, request.tokens) == (expected, [*b"text"])
        assert request.begins_with_bos  # as in likelihoods


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 2.5}, "limit 2.5 must be a number from 1, or a share below 1"),
        ({"samples": {"four_questionz": [0]}}, "no task 'four_questionz'|did you mean"),
        ({"samples": {"four_questions": [3, 0]}}, "increasing numbers of its 4 questions|3, 0"),
        ({"samples": [1]}, "samples [1] are not numbers of questions by task"),
        ({"apply_chat_template": True}, "no chat template"),
        ({"cache_requests": True}, "cache_requests keeps prompts by a task's name"),
        ({"shots": -1}, "four_questions: num_fewshot -1 must be at least 0"),
        ({"generation": {"num_beams": 4}}, "generate with num_beams: not supported"),
    ],
)
def test_what_the_harness_passes_over_is_refused_before_prompts(four, scorer, options, words):
    loaded, options = four().loaded, dict(options)
    task = loaded["tasks"]["four_questions"]
    task.set_config(key="num_fewshot", value=options.pop("shots", 0))
    if settings := options.pop("generation", None):
        task.OUTPUT_TYPE = "generate_until"
        task.set_config(key="generation_kwargs", value=settings)
    refused(words, evaluate, ScorerLM(scorer), loaded, **options)
    assert not hasattr(task, "_instances")


def test_kept_answers_of_another_model_are_refused(folder, scorer, tmp_path):
    cache = str(tmp_path / "kept.db")
    request = _requests("loglikelihood", ("Once", " a"))
    (first,) = CachingLM(ScorerLM(scorer), cache).loglikelihood(request)
    assert CachingLM(ScorerLM(scorer), cache).loglikelihood(request) == [first]
    other = load_run(folder / "run", changes=["TransformerConfig.window=16"])
    lm = ScorerLM(Scorer(other.model, other.tokenizer))
    refused("--use_cache has answers of another model", CachingLM, lm, cache)


def test_an_error_of_the_harness_is_a_line_and_a_defect_of_ours_none(four, scorer):
    loaded = four().loaded
    loaded["tasks"]["four_questions"].set_config(key="num_fewshot", value=99)
    words = r"cannot do this \(ValueError: Sample larger than population.*\): sorry"
    with pytest.raises(UserError, match=words), Refusals("cannot do this", ": sorry"):
        evaluate(ScorerLM(scorer), loaded)
    loaded["tasks"]["four_questions"].set_config(key="num_fewshot", value=0)
    broken = mock.patch.object(Scorer, "_scores", side_effect=ZeroDivisionError)
    with broken, pytest.raises(ZeroDivisionError), Refusals("cannot do this"):
        evaluate(ScorerLM(scorer), loaded)


def test_likelihoods_are_those_of_the_logits(scorer):
    lm = ScorerLM(scorer)
    likeliest = chr(int(_log_probs(scorer, "One day")[-1].argmax()))
    pairs = [("A b c.", " Dé"), ("A b c.", " e"), ("ends in spaces  ", "x"), ("", "no context")]
    pairs += [("One day", likeliest), ("long " * 40, "words")]
    found = lm.loglikelihood(_requests("loglikelihood", *pairs))
    # The harness gives spaces at the end of a context to its continuation.
    spaced = [(c.rstrip(), c[len(c.rstrip()) :] + a) for c, a in pairs]
    expected = [_likelihood(scorer, *pair) for pair in spaced]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-5)
    assert [x for _, x in found] == [x for _, x in expected]
    assert found[4][1]
    texts = [("A whole text. " * 9,), ("short",)]
    rolling = lm.loglikelihood_rolling(_requests("loglikelihood_rolling", *texts))
    expected = [_likelihood(scorer, "", text)[0] for (text,) in texts]
    np.testing.assert_allclose(rolling, expected, rtol=1e-5)
    lost = randomize(Transformer, MODEL)
    lost.embedding[...] *= np.nan
    lm = ScorerLM(Scorer(lost, ByteTokenizer()))
    requests = {"loglikelihood": pairs[:1], "generate_until": [("", {"max_gen_toks": 1})]}
    for kind, asked in (requests | {"loglikelihood_rolling": texts}).items():
        refused("it diverged", getattr(lm, kind), _requests(kind, *asked), error=NonFiniteError)


def test_a_task_of_the_user_has_the_accuracy_of_its_logits(folder, four, scorer):
    expected, sums = {"acc": [], "acc_norm": []}, []
    for row in QUESTIONS:
        context = f"Question: {row['question']}"
        # The space at the end of the prompt goes to the answer.
        sums.append([_likelihood(scorer, context, f"  {x}")[0] for x in row["choices"]])
        sizes = [len(choice) for choice in row["choices"]]
        expected["acc"].append(int(np.argmax(sums[-1])) == row["gold"])
        expected["acc_norm"].append(int(np.argmax(np.divide(sums[-1], sizes))) == row["gold"])
    share, items = four(limit=0.3), four()
    assert share == [("four_questions", str(row)) for row in QUESTIONS[:2]]
    assert {record.items for record in _measured(share, scorer)} == {2}
    records = _measured(items, scorer)
    assert [x.metric for x in records] == ["acc", "acc_norm"]
    assert [x.value for x in records] == [np.mean(hits) for hits in expected.values()]
    assert records[0].stderr == pytest.approx(np.std(expected["acc"], ddof=1) / 2)
    assert records[0].chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4 + 1 / 2) / 4)
    assert (records[0].items, len(items)) == (4, 4)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    results = simple_evaluate(
        ScorerLM(scorer), tasks=["four_questions"], task_manager=manager, bootstrap_iters=0
    )
    assert results["results"]["four_questions"]["acc,none"] == records[0].value
    (sample, *_) = results["samples"]["four_questions"]
    np.testing.assert_allclose([value for ((value, _),) in sample["resps"]], sums[0], rtol=1e-5)
    assert {"torch", "transformers"}.isdisjoint(sys.modules)


def test_a_task_without_a_metric_that_is_known_is_refused(folder, four, scorer, tmp_path):
    text = YAML[: YAML.index("  - {")].replace("FILE", str(folder / "four.jsonl"))
    unknown = "  - {metric: unknown, aggregation: mean, higher_is_better: true}"
    (tmp_path / "task.yaml").write_text(text + unknown)
    refused("measures nothing of four_questions: check", _measured, four(tmp_path), scorer)


def test_the_prompts_are_those_of_the_harness(folder, scorer):
    names = ["hellaswag", "arc_easy", "arc_challenge", "mmlu_virology"]
    items = load_tasks(names, data=str(folder), limit=1)
    assert [name for name, _ in items] == names
    _measured(items, scorer)
    story = "Cooking: A man cooks. He. then"
    assert _prompts(items, "hellaswag") == [(story, " eats it."), (story, " flies away.")]
    question = "Question: Which planet is red?\nAnswer:"
    assert _prompts(items, "arc_easy") == [(question, f" {x}") for x in QUESTIONS[0]["choices"]]
    assert _prompts(items, "arc_challenge")[1] == ("Question: Cold?\nAnswer:", " fire")
    topic = TOPIC.format("virology")
    asked = MMLU.format("one", "two", "three", "four", question="virology 0?")
    assert _prompts(items, "mmlu_virology")[2] == (topic + asked, " C")
    items = load_tasks(["mmlu_virology", "arc_challenge"], data=str(folder), num_fewshot=2)
    _measured(items, scorer)
    shots = [asked.replace(" 0?", f" {i}?") + f" {'AB'[i]}\n\n" for i in range(2)]
    assert _prompts(items, "mmlu_virology")[3] == (topic + "".join(shots) + asked, " D")
    assert "Wo ist die Tür?\nAnswer: dort\n\n" in _prompts(items, "arc_challenge")[0][0]


def test_mmlu_is_a_group_of_the_subjects_that_are_there(folder, scorer, caplog):
    items = load_tasks(["mmlu", "arc_easy"], data=str(folder))
    assert "mmlu_stem_tasks: 2 of 19 members (--data=" in caplog.text
    records = _measured(items, scorer)
    assert [(x.task, x.depth, x.items) for x in records] == [
        *[("arc_easy", 0, 2)] * 2,
        ("mmlu", 0, 6),
        ("mmlu_stem", 1, 5),
        ("mmlu_anatomy", 2, 2),
        ("mmlu_astronomy", 2, 3),
        ("mmlu_other", 1, 1),
        ("mmlu_virology", 2, 1),
    ]
    value = {x.task: x.value for x in records}
    total = 2 * value["mmlu_anatomy"] + 3 * value["mmlu_astronomy"] + value["mmlu_virology"]
    assert value["mmlu"] == pytest.approx(total / 6)


def test_a_task_of_texts_has_a_score(folder, four, tmp_path):
    text = YAML[: YAML.index("doc_to_choice")].replace("FILE", str(folder / "four.jsonl"))
    more = "{until: [], max_gen_toks: 16}\nmetric_list: [{metric: exact_match}]"
    text = text.replace("multiple_choice", "generate_until") + f"generation_kwargs: {more}\n"
    (tmp_path / "task.yaml").write_text(text + 'doc_to_target: "{{choices[gold]}}"')
    items, oracle = four(tmp_path), mock.Mock(tokenizer=ByteTokenizer())
    oracle.generate = lambda requests: [
        "eggs" if "hen" in bytes(x.tokens).decode() else "?" for x in requests
    ]
    (record,) = _measured(items, oracle)
    assert (record.metric, record.value, record.items) == ("exact_match", 0.25, 4)
    assert _prompts(items, "four_questions")[0][1]["max_gen_toks"] == 16


def test_names_are_given_together_or_apart_and_rows_are_measured_by_task(folder):
    subject = Subject(None, ByteTokenizer(), {}, folder / "run")
    files = {"data": str(folder), "include_path": str(folder / "tasks")}
    task = Harness(tasks=("arc_easy,mmlu_virology", "four_questions"), limit=1, **files)
    rows = task.rows(subject)
    names = ["arc_easy", "mmlu_virology", "four_questions"]
    assert sorted(name for name, _ in rows) == sorted(names)
    assert task.measured_on(rows, subject).keys() == {*names}


def test_runs_with_other_tasks_share_a_table_but_not_with_other_items():
    series = {x: [Score(x, "acc", 0.5, None, 0.25, 4, 0, 0)] for x in "ab"}
    rows = [{"task": "a, acc (%)", "a": 50, "b": None}, {"task": "b, acc (%)", "a": None, "b": 50}]
    assert Harness.table(series) == rows
    options = (Harness(**x).to_dict() for x in ({}, {"tasks": ("x",)}, {"limit": 3}))
    first, same, other = (Harness.comparable(x, []) for x in options)
    assert first == same != other


def test_the_command_of_the_harness_runs_a_run(folder, four, scorer, monkeypatch, capsys):
    arguments = {"run_dir": folder / "run", "step": 7, "param": "TransformerConfig.window=16"}
    lm = RunLM.create_from_arg_obj(arguments | {"batch_size": 4}, {"batch_size": 1, "device": None})
    (pair,) = lm.loglikelihood(_requests("loglikelihood", ("A long enough context", " a")))
    assert pair[0] != _likelihood(scorer, "A long enough context", " a")[0]
    tasks = ("--tasks", "four_questions", "--include_path", str(folder / "tasks"))
    model = ("--model", "ttcd_jax", "--model_args", f"run_dir={folder / 'run'},batch_size=4")
    output = commands.output("harness", *model, *tasks)
    (line,) = [line for line in output.splitlines() if "four_questions" in line]
    assert float(line.split("|")[7]) == _measured(four(), scorer)[0].value
    unknown = mock.Mock(side_effect=ValueError("Tasks not found: nope"))
    for step, words in (
        (lambda: RunLM("/nowhere"), "\nerror: /nowhere is not a run directory"),
        (unknown, "\nerror: the harness refuses (ValueError: Tasks not found: nope)"),
    ):
        evaluated = mock.Mock(side_effect=lambda step=step: (print("a task \x1b[2J"), step()))
        monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluated)
        with pytest.raises(SystemExit, match="2"):
            harness.main()
        printed = capsys.readouterr()
        assert words in f"\n{printed.err}"
        assert printed.out == "a task \\x1b[2J\n"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("helaswag", {}, "no task 'helaswag'; did you mean 'hellaswag'"),
        ("mmlu_sociology", {}, "no row of mmlu_sociology"),
        ("arc_easy", {"data": "/nowhere"}, "--data=/nowhere is no folder"),
        ("arc_easy", {"include_path": "/nowhere"}, "include_path=/nowhere is no folder"),
        ("arc_easy", {"num_fewshot": 1}, "arc_easy: 1 examples would be among"),
        ("arc_easy", {"data": None}, "cannot build arc_easy (ConnectionError: Couldn't reach"),
        ("ruler", {"include_path": RULER}, "cannot build ruler |RULER| by evaluate --task=ruler, "),
    ],
)
def test_tasks_refused(folder, name, options, words, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries to be online
    refused(words, load_tasks, [name], **{"data": str(folder)} | options)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("arc_easy", "{", "line 1 is not JSON"),
        ("arc_easy", '{"question": "a", "choices": ["x"], "gold": 1}', "no row of arc_easy"),
        ("arc_easy", '{"question": 3, "choices": ["x"], "gold": 0}', "missing or no string"),
        ("arc_easy", '{"choices": ["x"], "gold": 0}', "KeyError('question"),
        ("hellaswag", '{"label": "b", "endings": []}', "no row of hellaswag"),
        ("mmlu", '{"choices": ["", "a", "b"]}', "not four choices"),
    ],
)
def test_damaged_data_is_refused(tmp_path, name, line, words):
    for split in ("test", "validation"):
        (tmp_path / f"{name}_{split}.jsonl").write_text(line)
    refused(words, load_tasks, [name], data=str(tmp_path), error=DataError)


def test_without_lm_eval_the_remedy_is_named(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "ttcd_jax.measure.harness")
    monkeypatch.delattr("ttcd_jax.measure.harness")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    subject = Subject(byte_model(), ByteTokenizer(), {}, folder / "run")
    refused("lm_eval is missing): install ttcd_jax[harness]", Harness().rows, subject)
    refused("has no tokenizer", Harness().rows, subject._replace(tokenizer=None))
    refused("tasks () must be one or more", Harness, tasks=())
