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
    result = commands.run(*LAUNCH, f"--run_dir={run_dir}", "--profile=2:4", is_forked=False)
    assert result.returncode == 0
    # What its memory stores the convolutions make, and hardly the windows.
    first, *others = result.stderr.splitlines()
    assert first == "loading JAX"
    assert all("a run with equal windows says" in x for x in others)
    return run_dir, result.stdout


def test_a_run_directory_holds_all_that_evaluation_needs_and_is_complete(finished):
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
    (trace,) = (run_dir / "profile").rglob("*.xplane.pb")
    assert trace.relative_to(run_dir).parts[:2] == ("profile", "step_2")
    # The same command trains nothing.
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert "complete at step 24" in commands.output(*LAUNCH, f"--run_dir={run_dir}")
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def _scores(run_dir):
    """The accuracies of the newest checkpoint as training names them, by the command's function."""
    run, data = load_run(run_dir), RunDirectory(run_dir).read_config()["data"]
    result = evaluate(TASKS["recall"](), Subject(run.model, None, data, run_dir), run.step)
    return {
        f"recall/{variant}/{row.distance}": row.accuracy
        for variant, rows in result.series.items()
        for row in rows
    }


@pytest.mark.parametrize(("minutes", "fifth"), [(1e-9, {5, 10, 15, 20}), (None, {20})])
def test_training_evaluates_as_the_command_keeps_the_best_and_changes_no_loss(
    finished, tmp_path, minutes, fifth
):
    """Of saves after every step, or every fourth and those evaluated, the last is kept, every
    fifth, and the best of those evaluated."""
    name = next(iter(_scores(finished[0])))
    bindings = (
        *("RunConfig.evaluate_every=6", "RunConfig.evaluations=(@Recall(),)"),
        *("RunConfig.keep_checkpoints=1", "RunConfig.keep_every=5", "RunConfig.keep_best=1"),
        *(f"RunConfig.best_metric='{name}'", f"RunConfig.checkpoint_minutes={minutes}"),
    )
    commands.output(*LAUNCH, *tiny_run.params(*bindings), f"--run_dir={tmp_path}")
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]
    assert losses == tiny_run.losses(finished[0])
    scores = {record["step"]: record for record in records if "loss" not in record}
    assert [*scores] == [6, 12, 18, 24]
    assert scores[24] == {"step": 24} | _scores(tmp_path)
    assert len({*scores[24].values()}) > 2
    best = max((6, 12, 18), key=lambda step: (scores[step][name], step))
    saved = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == sorted({*fifth, 24, best})


def test_needles_are_measured_as_kept_and_as_published_and_shown(finished):
    run_dir, _ = finished
    output = commands.output("evaluate", f"--run_dir={run_dir}", "--task=needle", "--num_rows=2")
    assert "IP-TTCD + delta rule, memory published" in output
    needle = json.loads((run_dir / "eval" / "needle" / "results.json").read_text())
    kept, published = needle["series"].values()
    assert needle["chance"] == 1 / 4
    # Two needles in two rows, since there are four keys.
    distances = [str(2**power) for power in range(4, 10)]
    assert [(row["distance"], row["queries"]) for row in kept] == [(x, 4) for x in distances]
    assert len(published) == len(kept)
    places = f"--run_dir={run_dir}", f"--output={run_dir / 'page'}"
    assert "go on" in commands.output("report", *places, "--next=go on")
    assert {path.name for path in (run_dir / "page").iterdir()} == {
        *("index.html", "needle.svg"),
        *("training.svg", "memory_ratio.svg", "gate_mean.svg", "window_share.svg"),
    }
