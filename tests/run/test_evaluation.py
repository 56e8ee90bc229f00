"""Evaluation during training happens when it is due and compiles once; which checkpoints are the
best; when a run saves by the clock."""

import json
import math
import shutil
import signal
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from checks import randomize, refused
from flax import nnx
from small_models import config_of, recipe, run_config

from ttcd_jax import Precision, RunConfig, Transformer
from ttcd_jax.run.config import upgraded
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.evaluation import best_scores, evaluation_callbacks
from ttcd_jax.run.training import _Signals, train_run
from ttcd_jax.tasks.documents import FinalBlock
from ttcd_jax.tasks.perplexity import Perplexity
from ttcd_jax.tasks.recall import Recall
from ttcd_jax.train.state import TrainState

MODEL = config_of("ipttcd", precision=Precision())
CONFIG = run_config(MODEL, steps=5, evaluate_every=2, evaluations=(Recall(),))


@pytest.fixture
def run_dir(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.claim(CONFIG.to_dict(), "", {})
    return directory


def test_tasks_run_every_so_many_steps_and_after_the_last(run_dir, caplog):
    params = nnx.to_pure_dict(nnx.state(randomize(Transformer, MODEL), nnx.Param))
    state = TrainState(params=params, opt_state=(), step=jnp.array(0))
    written, compiled = {}, []

    def note(event: str, duration_secs: float, **kwargs: str | int):
        if event.endswith("backend_compile_duration"):
            compiled.append(kwargs["fun_name"])

    (callback,) = evaluation_callbacks(CONFIG, run_dir, written.__setitem__, 2)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for step in (2, 3, 4, 5):  # at 3 the run is stopped
            callback.call(step, state)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert callback.every == 2
    assert [*written] == [2, 4, 5]
    # With the memory and without, for all evaluations.
    assert compiled.count("jit(_forward_scores)") == 2
    page = run_dir.path / "index.html"
    assert "between its memory on and off" in page.read_text()
    assert page.read_text().count("<svg") == 1
    page.unlink()
    page.mkdir()  # so that it cannot be written: a warning, once
    for step in (2, 4):
        callback.call(step, state)
    assert caplog.text.count("RunPage failed") == 1
    name = [*written[2]][-1]
    config = CONFIG.replace(checkpoint_every=1, keep_best=1, best_metric=f"{name}x")
    (callback,) = evaluation_callbacks(config, run_dir, written.__setitem__, 2)
    refused(f"best_metric '{name}x'; did you mean '{name}'?", callback.call, 2, state)
    assert evaluation_callbacks(CONFIG.replace(evaluate_every=None), run_dir, print, 2) == []


def test_a_run_is_evaluated_on_the_same_cases_to_its_end(run_dir):
    evaluation_callbacks(CONFIG, run_dir, print, 2)
    evaluation_callbacks(CONFIG, run_dir, print, 1)  # another batch, the same rows
    evaluation_callbacks(CONFIG.replace(evaluations=(Recall(max_rows=3),)), run_dir, print, 2)
    path = run_dir.path / "evaluations.json"
    digests = json.loads(path.read_text())
    assert len(digests) == 2
    path.write_text(json.dumps({name: {"": "of other text"} for name in digests}))
    words = "the text that task recall measures | on changed since"
    refused(words, evaluation_callbacks, CONFIG, run_dir, print, 2)


def test_an_evaluation_that_was_interrupted_is_made_up(tmp_path):
    def records():
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]

    config = CONFIG.replace(checkpoint_every=2, log_every=1)
    train_run(config, tmp_path)
    whole = records()
    for last in (5, 4):
        for step in {*range(last + 1, 6)}:
            shutil.rmtree(tmp_path / f"checkpoints/{step}", ignore_errors=True)
        kept = [x for x in whole if x["step"] < last or (x["step"] == last and "loss" in x)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in kept))
        assert train_run(config, tmp_path).step == 5
        found = {x["step"]: x for x in records() if "loss" not in x}
        assert found == {x["step"]: x for x in whole if "loss" not in x}


def test_evaluations_are_tasks_with_options_and_those_that_do_not_fit_are_refused(run_dir):
    def loaded(tasks, *params):
        params = "RunConfig.evaluate_every=2", f"RunConfig.evaluations={tasks}", *params
        return recipe("quickstart.gin", *params)

    config = loaded("(@Recall(), @Perplexity())", "Recall.max_rows=7")
    tasks = [(task.name, task.max_rows) for task in config.evaluations]
    assert tasks == [("recall", 7), ("ppl", 512)]
    stored = config.to_dict()
    stored["evaluations"][0]["data"] = None  # an option of tasks once
    assert RunConfig.from_dict(upgraded(stored)) == config
    refused("did you mean 'Perplexity'", loaded, "(@Perplexty(),)")
    twice = (Recall(), Recall(max_rows=3))
    refused("has tasks recall, recall", lambda: CONFIG.replace(evaluations=twice))
    config, words = CONFIG.replace(evaluations=(Perplexity(),)), "trained on recall data, not on"
    refused(f"{words} text: measure it by", evaluation_callbacks, config, run_dir, print, 2)


def test_best_scores_are_those_of_the_metric_the_higher_the_better():
    fields = {"checkpoint_every": 2, "keep_best": 1, "best_metric": "ppl/on/64"}
    config = run_config(evaluate_every=2, **fields)
    records = [{"step": 2, "ppl/on/64": 3.0}, {"step": 3, "loss": 1}, {"step": 4, "ppl/on/64": 2.0}]
    assert best_scores(config, records) == {2: -3.0, 4: -2.0}
    for name, score in (("distillation/gap/0", -3), ("distillation/cosine/0", 3)):
        assert best_scores(SimpleNamespace(best_metric=name), [{"step": 2, name: 3}]) == {2: score}
    name = "harness/IP-TTCD/wikitext, word_perplexity"
    assert best_scores(SimpleNamespace(best_metric=name), [{"step": 2, name: 3}]) == {2: -3}
    none = {"ppl/on/32": 1.0}, {"ppl/on/64": None}, {"ppl/on/64": float("nan")}, {"ppl/on/64": "1"}
    assert best_scores(config, [{"step": 2} | record for record in none]) == {}
    for change in ({"best_metric": None}, {"best_metric": "recall/x"}, {"evaluate_every": None}):
        refused("RunConfig.keep_best 1 with best_metric", lambda x=change: config.replace(**x))
    without = {"evaluations": (), "keep_best": None, "best_metric": None}
    refused("evaluate_every 2 without evaluations", lambda: config.replace(**without))


@pytest.mark.parametrize("index", [0, 1])
def test_processes_agree_on_the_step_to_save_by_the_clock_of_the_first(monkeypatch, index):
    stored, now = {}, [0.0]

    class Client:
        def key_value_set(self, key, value, allow_overwrite):
            stored[key] = value

        def key_value_dir_get(self, prefix):
            return [(key, value) for key, value in stored.items() if key.startswith(prefix)]

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: index)
    monkeypatch.setattr(ocp.multihost, "get_jax_distributed_client", Client)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with _Signals(minutes=1) as signals:
        due = []
        for step in range(1, 13):
            now[0] += 25
            if signals.is_saving(step):
                due.append(step)
                signals.note_save()
        assert due == ([5, 10] if index == 0 else [])
        signal.raise_signal(signal.SIGUSR1)
        assert [step for step in range(13, 18) if signals.is_saving(step)] == [15]


def test_means_over_documents_are_numbers_in_training():
    task, losses = FinalBlock, [(4, 0, 2, 1.0), (4, 1, 2, 3.0), (8, 1, 2, 5.0), (16, None, 0, 0.0)]
    series = {"on": [task.record(*x) for x in losses], "off": [task.record(*losses[0])]}
    assert isinstance(task.table(series)[0]["on"], str)  # with its interval
    expected = {"on/4": math.exp(1), "on/8": math.exp(2.5), "off/4": math.exp(0.5)}
    assert task.numbers(series) == pytest.approx(expected)
