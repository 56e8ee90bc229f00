"""When a run saves and what it keeps: signals at chosen moments, time, the best checkpoints."""

import signal
import time

import commands
import orbax.checkpoint as ocp
import pytest
import tiny_run
from small_models import config_of

from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.errors import UserError
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.evaluation import best_scores
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.run.training import _Signals
from ttcd_jax.train.optimizer import OptimizerConfig

SIGNALLED = """
import os, runpy, signal, sys

import jax
from ttcd_jax.run import bindings
from ttcd_jax.tasks import TASKS
from ttcd_jax.run.reporting import MetricFiles
from ttcd_jax.train import digest
from ttcd_jax.train.checkpoint import Checkpoints

kind, where, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = []

def count_call():
    calls.append(where)
    if len(calls) == count:
        os.kill(os.getpid(), getattr(signal, kind))

def during(owner, name):
    call = getattr(owner, name)

    def signalled(*arguments, **options):
        count_call()
        return call(*arguments, **options)

    setattr(owner, name, signalled)

def in_compilation(event, duration_secs, **options):
    if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
        if options["fun_name"] == "jit(train_step)":
            count_call()

places = {
    "evaluation": (TASKS["recall"], "series"),
    "restore": (Checkpoints, "restore"),
    "save": (Checkpoints, "save"),
    "seal": (digest, "seal"),
    "start": (bindings, "load_config"),
    "step": (MetricFiles, "write"),
}
if where == "compilation":
    jax.monitoring.register_event_duration_secs_listener(in_compilation)
else:
    during(*places[where])
sys.argv = ["launch", *sys.argv[4:]]
try:
    runpy.run_module("experiments.launch", run_name="__main__")
finally:
    print("signals", calls.count(where) >= count)
"""
SIZES = (
    *("RunConfig.evaluate_every=8", "RunConfig.evaluations=(@Recall(),)"),
    "RunConfig.keep_checkpoints=20",
)
FLAGS = tiny_run.flags("recall.gin", *tiny_run.RECALL, *SIZES)


def _records(run_dir):
    """All that a run reports, apart from its speed."""
    records = read_metrics(run_dir / "metrics.jsonl")
    timed = ("tokens_per_second", "data_wait")
    return [{x: record[x] for x in record if x not in timed} for record in records]


def _saved(run_dir):
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("saves") / "whole"
    commands.output("launch", *FLAGS, f"--run_dir={run_dir}")
    return run_dir


@pytest.fixture
def signalled(tmp_path):
    """Runs the launch, a signal arriving in the n-th of its calls at a place."""
    program = tmp_path / "signalled.py"
    program.write_text(SIGNALLED)

    def signalled(kind, where, count, *flags):
        place = f"--run_dir={tmp_path / 'run'}"
        result = commands.run(program, kind, where, str(count), *FLAGS, place, *flags)
        assert "signals True" in result.stdout, result.stderr
        return result, tmp_path / "run"

    return signalled


def test_after_sigterm_at_any_moment_the_same_command_repeats_the_losses(whole, signalled):
    last, moments = 0, {"compilation": 1, "restore": 2, "evaluation": 9, "save": 13, "seal": None}
    for where, stopped in moments.items():
        result, run_dir = signalled("SIGTERM", where, 1)
        assert result.returncode == 75, (where, result.stderr)
        assert last == 0 or f"resumed at step {last}\n" in result.stdout
        last = max(_saved(run_dir))
        assert stopped in (None, last), where
        assert f"stopped by SIGTERM at step {last}, checkpoint saved" in result.stdout
    assert f"resumed at step {last}\n" in commands.output("launch", *FLAGS, f"--run_dir={run_dir}")
    assert _records(run_dir) == _records(whole)


def test_sigusr1_saves_after_the_step_and_the_run_goes_on(whole, signalled):
    result, run_dir = signalled("SIGUSR1", "step", 5)
    assert result.returncode == 0, result.stderr
    # The metrics of step 5 are reported while step 6 runs.
    assert _saved(run_dir) == [4, 6, 8, 12, 16, 20, 24]
    assert _records(run_dir) == _records(whole)


@pytest.mark.parametrize("kind", ["SIGUSR1", "SIGUSR2"])
def test_a_signal_before_the_first_step_ends_nothing(signalled, kind):
    result, _ = signalled(kind, "start", 1, "--dry_run")
    assert result.returncode == 0, result.stderr


def test_saves_by_time_and_the_best_and_every_so_many_are_kept(whole, tmp_path):
    name = next(x for x in _records(whole)[-1] if x.startswith("recall/"))
    keep = "RunConfig.keep_checkpoints=1", "RunConfig.keep_every=5", "RunConfig.keep_best=1"
    rest = f"RunConfig.best_metric='{name}'", "RunConfig.evaluate_every=6"
    flags = *FLAGS, *tiny_run.params(*keep, *rest, "RunConfig.checkpoint_minutes=1e-9")
    commands.output("launch", *flags, f"--run_dir={tmp_path}")
    scores = {r["step"]: r[name] for r in _records(tmp_path) if name in r}
    assert [*scores] == [6, 12, 18, 24]
    earlier = {step: scores[step] for step in scores if step < 24}
    best = max(earlier, key=lambda step: (earlier[step], step))
    assert _saved(tmp_path) == sorted({5, 10, 15, 20, 24, best})
    assert [x for x in _records(tmp_path) if "loss" in x] == [
        x for x in _records(whole) if "loss" in x
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_processes_agree_on_the_step_by_the_clock_of_the_first(monkeypatch, index):
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


def test_best_scores_are_those_of_the_metric_the_higher_the_better():
    config = RunConfig(
        model=config_of("ipttcd"),
        data=RecallConfig(num_slots=8, num_keys=4, num_values=4),
        optimizer=OptimizerConfig(),
        steps=8,
        batch_size=2,
        evaluate_every=2,
        keep_best=1,
        best_metric="ppl/on/64",
    )
    records = [{"step": 2, "ppl/on/64": 3.0}, {"step": 3, "loss": 1}, {"step": 4, "ppl/on/64": 2.0}]
    assert best_scores(config, records) == {2: -3.0, 4: -2.0}
    none = {"ppl/on/32": 1.0}, {"ppl/on/64": None}, {"ppl/on/64": float("nan")}, {"ppl/on/64": "1"}
    assert best_scores(config, [{"step": 2} | record for record in none]) == {}
    for change in ({"best_metric": None}, {"best_metric": "recall/x"}, {"evaluate_every": None}):
        with pytest.raises(UserError, match=r"RunConfig\.keep_best 1 with best_metric"):
            config.replace(**change)
