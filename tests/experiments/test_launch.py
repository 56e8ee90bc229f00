"""The launch end to end: files, evaluation, mistakes; tests/soak has its faults."""

import json
import re

import commands
import pytest
import tiny_run

from ttcd_jax.measure.results import evaluate
from ttcd_jax.measure.task import Subject
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.tasks import TASKS

LAUNCH = ("launch", *tiny_run.flags("recall.gin", *tiny_run.RECALL))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    result = commands.run(*LAUNCH, f"--run_dir={run_dir}", is_forked=False)
    assert (result.returncode, result.stderr) == (0, "")
    return run_dir, result.stdout


def test_a_run_directory_holds_all_that_evaluation_needs(finished):
    run_dir, output = finished
    names = {path.name for path in run_dir.iterdir()}
    files = {"config.json", "config.gin", "data.json", "environment.json", "metrics.jsonl"}
    assert files | {"checkpoints", "tensorboard"} <= names
    assert not [name for name in names if name.startswith(".")]
    assert json.loads((run_dir / "config.json").read_text())["model"]["dim"] == 8
    assert [step for step, *_ in tiny_run.losses(run_dir)] == list(range(1, 25))
    assert re.search(r"\nstarted in [\d.]+ s: importing [\d.]+, .*\nstep  1/24  loss \d", output)
    assert re.search(r"step 24/24  loss \d", output)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["16", "20", "24"]


def test_the_same_command_on_a_finished_run_trains_nothing(finished):
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert "complete at step 24" in commands.output(*LAUNCH, f"--run_dir={run_dir}")
    assert (run_dir / "metrics.jsonl").read_bytes() == before


EVALUATED = (
    *LAUNCH,
    *tiny_run.params("RunConfig.evaluate_every=6", "RunConfig.evaluations=(@Recall(),)"),
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The records of an uninterrupted run that is evaluated during training, and its directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "evaluated"
    commands.output(*EVALUATED, f"--run_dir={run_dir}")
    return read_metrics(run_dir / "metrics.jsonl"), run_dir


def test_training_evaluates_as_the_command_does(evaluated):
    records, run_dir = evaluated
    scores = [record for record in records if "loss" not in record]
    assert [record["step"] for record in scores] == [6, 12, 18, 24]
    run = load_run(run_dir)
    data = RunDirectory(run_dir).read_config()["data"]
    expected = evaluate(TASKS["recall"](), Subject(run.model, None, data, run_dir), run.step)
    assert scores[-1] == {"step": 24} | {
        f"recall/{variant}/{row.distance}": row.accuracy
        for variant, rows in expected.series.items()
        for row in rows
    }
    assert len({*scores[-1].values()}) > 2


def test_evaluation_changes_no_loss(evaluated, finished):
    losses = [(r["step"], r["loss"], r["grad_norm"]) for r in evaluated[0] if "loss" in r]
    assert losses == tiny_run.losses(finished[0])


def test_saves_by_time_and_the_best_and_every_so_many_are_kept(evaluated, tmp_path):
    name = next(x for x in evaluated[0][-1] if x.startswith("recall/"))
    keep = "RunConfig.keep_checkpoints=1", "RunConfig.keep_every=5", "RunConfig.keep_best=1"
    rest = f"RunConfig.best_metric='{name}'", "RunConfig.checkpoint_minutes=1e-9"
    commands.output(*EVALUATED, *tiny_run.params(*keep, *rest), f"--run_dir={tmp_path}")
    records = read_metrics(tmp_path / "metrics.jsonl")
    scores = {r["step"]: r[name] for r in records if name in r}
    assert [*scores] == [6, 12, 18, 24]
    earlier = {step: scores[step] for step in scores if step < 24}
    best = max(earlier, key=lambda step: (earlier[step], step))
    saved = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == sorted({5, 10, 15, 20, 24, best})
    losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
    assert losses == [(r["step"], r["loss"]) for r in evaluated[0] if "loss" in r]


def test_evaluation_writes_json_csv_and_a_picture(finished):
    run_dir, _ = finished
    output = commands.output("evaluate", f"--run_dir={run_dir}", "--task=recall", "--max_rows=8")
    assert "IP-TTCD, fast weights on" in output
    assert "off (eta = 0)" in output
    folder = run_dir / "eval" / "recall"
    assert {path.name for path in folder.iterdir()} == {"results.json", "results.csv", "recall.png"}
    assert (folder / "recall.png").read_bytes().startswith(b"\x89PNG")
    output = commands.output("evaluate", f"--run_dir={run_dir}", "--task=needle", "--batch_size=2")
    assert "IP-TTCD, memory published" in output
    needle = json.loads((run_dir / "eval" / "needle" / "results.json").read_text())
    kept, published = needle["series"].values()
    assert needle["chance"] == 1 / 4
    # Two needles in two rows, since there are four keys.
    assert [(row["distance"], row["queries"]) for row in kept] == [
        (str(2**power), 4) for power in range(4, 10)
    ]
    assert len(published) == len(kept)
    read = f"--run_dir={run_dir}", "--task=needle", "--by=prefill", "--distances=7,300"
    assert len(commands.output("evaluate", *read, "--batch_size=2").splitlines()) == 6
    places = f"--run_dir={run_dir}", f"--output={run_dir / 'page'}"
    assert "go on" in commands.output("report", *places, "--next=go on")
    assert {path.name for path in (run_dir / "page").iterdir()} == {
        *("index.html", "recall.png", "needle.png"),
        *("training.png", "memory_ratio.png", "gate_mean.png"),
    }


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (["--gin=quikstart.gin"], ["quikstart.gin", "quickstart.gin"]),
        (["--param=MemoryConfig.chunk_size=0"], ["chunk_size", "0"]),
        (["--param=TransformerConfig.student_window=9"], ["9", "8", "student_window"]),
        (["--param=TransformerConfig.num_kv_heads=3"], ["3", "2", "num_kv_heads"]),
        (["--param=RunConfig.accumulation_steps=4"], ["4", "2", "accumulation_steps"]),
        (["--param=RunConfig.spike_factor=1"], ["spike_factor", "above 1, at most 1e6, or None"]),
        (["--param=RunConfig.max_skipped_steps=-1"], ["max_skipped_steps -1", "at least 0"]),
        (["--param=TransformerConfig.vocab_size=7"], ["7", "8", "vocab_size"]),
        (["--param=TransformerConfig.widnow=4"], ["widnow", "window"]),
        (["--param=RunConfig.steps='many'"], ["RunConfig.steps", "'many'"]),
        (["--prams=x"], ["prams", "param"]),
    ],
)
def test_bad_input_is_one_line_that_names_values_and_remedy(tmp_path, parameters, words):
    message = commands.refused(*LAUNCH, *parameters, f"--run_dir={tmp_path / 'run'}")
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.*"))


def test_bad_data_is_one_line(tmp_path):
    text = tmp_path / "empty"
    text.mkdir()
    line = (
        "launch",
        *tiny_run.flags("text.gin", f"TEXT='{text}'"),
        f"--run_dir={tmp_path / 'run'}",
    )
    assert str(text) in commands.refused(*line, status=3)


def test_evaluating_what_is_no_run_is_one_line(tmp_path):
    message = commands.refused("evaluate", f"--run_dir={tmp_path}", "--task=ppl")
    assert str(tmp_path) in message
    assert "config.json" in message


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    output = commands.output(*LAUNCH, "--dry_run", f"--run_dir={tmp_path / 'run'}")
    for name in ("parameters", "memory: optimizer", "training FLOPs per token"):
        assert name in output
    assert list(tmp_path.iterdir()) == []
