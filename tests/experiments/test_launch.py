"""The launch end to end: files, interruptions, evaluation, mistakes."""

import fcntl
import json
import re
import shutil
import signal
import subprocess

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


def test_after_kill_9_the_same_command_repeats_the_losses_bit_for_bit(finished, tmp_path):
    line = (*LAUNCH, f"--run_dir={tmp_path}")
    process = commands.start(*line, stdout=subprocess.DEVNULL)
    tiny_run.wait_for_step(tmp_path, 10, process)
    process.kill()
    process.wait()
    assert len(tiny_run.losses(tmp_path)) < 24
    assert re.search(r"resumed at step (4|8|12|16|20)\n", commands.output(*line))
    assert tiny_run.losses(tmp_path) == tiny_run.losses(finished[0])


def test_sigterm_saves_and_asks_to_be_resumed(finished, tmp_path):
    line = (*LAUNCH, f"--run_dir={tmp_path}")
    process = commands.start(*line, stdout=subprocess.PIPE)
    tiny_run.wait_for_step(tmp_path, 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, "0: the run was over before the signal came, make it longer"
    stopped = int(re.search(r"stopped by SIGTERM at step (\d+), checkpoint saved", output)[1])
    assert f"resumed at step {stopped}\n" in commands.output(*line)
    assert tiny_run.losses(tmp_path) == tiny_run.losses(finished[0])


def test_the_same_command_on_a_finished_run_trains_nothing(finished):
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert "complete at step 24" in commands.output(*LAUNCH, f"--run_dir={run_dir}")
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_run_directory_of_another_config_is_refused(finished):
    line = (*LAUNCH, f"--run_dir={finished[0]}")
    message = commands.refused(*line, "--param=OptimizerConfig.beta1=0.8")
    assert "optimizer.beta1: 0.9 -> 0.8" in message
    assert "--run_dir" in message


def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(finished, tmp_path):
    run_dir = tmp_path / "copy"
    shutil.copytree(finished[0], run_dir)
    files = (run_dir / "checkpoints" / "24" / "params").rglob("d/*")
    victim = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    result = commands.run("evaluate", f"--run_dir={run_dir}", "--task=recall", "--max_rows=4")
    assert result.returncode == 0, result.stderr
    assert "24" in result.stderr
    assert victim.name in result.stderr
    assert "(step 20, 4 rows)" in result.stdout
    named = f"--run_dir={run_dir}", "--task=recall", "--step=24"
    message = commands.refused("evaluate", *named, status=4)
    assert "checkpoint step 24 is damaged" in message
    assert "step=20" in message


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


def test_a_run_killed_between_an_evaluation_and_a_save_repeats_both(evaluated, tmp_path):
    def scored_steps():
        records = read_metrics(tmp_path / "metrics.jsonl")
        return [record["step"] for record in records if "loss" not in record]

    line = (*EVALUATED, f"--run_dir={tmp_path}")
    process = commands.start(*line, stdout=subprocess.DEVNULL)
    tiny_run.wait_until(lambda: 6 in scored_steps(), process)  # saved at 4, next at 8
    process.kill()
    process.wait()
    commands.output(*line)
    assert scored_steps() == [6, 12, 18, 24]
    names = {"step", "loss", "grad_norm", *evaluated[0][-1]}

    def repeatable(records):
        return [{x: record[x] for x in record.keys() & names} for record in records]

    assert repeatable(read_metrics(tmp_path / "metrics.jsonl")) == repeatable(evaluated[0])


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
        *("index.html", "recall.png", "needle.png", "training.png")
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


def test_a_locked_run_directory_names_its_owner(tmp_path):
    with (tmp_path / "lock").open("w") as handle:
        handle.write("process 1 on elsewhere\n")
        handle.flush()
        fcntl.flock(handle, fcntl.LOCK_EX)
        message = commands.refused(*LAUNCH, f"--run_dir={tmp_path}")
    assert "process 1 on elsewhere" in message
