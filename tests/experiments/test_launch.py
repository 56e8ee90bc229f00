import json
import re
import shutil
import signal
import subprocess
import time

import commands
import pytest

from ttcd_jax.eval.results import evaluate
from ttcd_jax.eval.task import Subject
from ttcd_jax.eval.tasks import TASKS
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.run.reporting import read_metrics

TINY = f"""{commands.TINY}RunConfig.batch_size = 2
RunConfig.data = @RecallConfig()
RunConfig.steps = 24
RunConfig.checkpoint_every = 4
RecallConfig.num_slots = 8
RecallConfig.num_keys = 4
RecallConfig.num_values = 4
TransformerConfig.vocab_size = 8
"""


@pytest.fixture(scope="module")
def gin_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gin") / "tiny.gin"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def finished(gin_file, tmp_path_factory):
    """An uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    result = commands.run("launch", f"--gin={gin_file}", f"--run_dir={run_dir}", is_forked=False)
    assert result.returncode == 0, result.stderr
    return run_dir, result


def _losses(run_dir):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(run_dir / "metrics.jsonl")]


def test_a_run_directory_holds_all_that_evaluation_needs(finished):
    run_dir, result = finished
    names = {path.name for path in run_dir.iterdir()}
    files = {"config.json", "config.gin", "data.json", "environment.json", "metrics.jsonl"}
    assert files | {"checkpoints", "tensorboard"} <= names
    assert not [name for name in names if name.startswith(".")]
    assert json.loads((run_dir / "config.json").read_text())["model"]["dim"] == 8
    assert [step for step, *_ in _losses(run_dir)] == list(range(1, 25))
    assert re.search(r"step 24/24  loss \d", result.stdout)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["16", "20", "24"]


def test_after_kill_9_the_same_command_repeats_the_losses_bit_for_bit(finished, gin_file, tmp_path):
    arguments = (f"--gin={gin_file}", f"--run_dir={tmp_path / 'run'}")
    process = commands.start("launch", *arguments, stdout=subprocess.DEVNULL)
    _wait_for_step(tmp_path / "run", 10, process)
    process.kill()
    process.wait()
    assert len(_losses(tmp_path / "run")) < 24
    result = commands.run("launch", *arguments)
    assert result.returncode == 0, result.stderr
    assert re.search(r"resumed at step (4|8|12|16|20)\n", result.stdout)
    assert _losses(tmp_path / "run") == _losses(finished[0])


def test_sigterm_saves_and_asks_to_be_resumed(finished, gin_file, tmp_path):
    arguments = (f"--gin={gin_file}", f"--run_dir={tmp_path / 'run'}")
    process = commands.start("launch", *arguments, stdout=subprocess.PIPE)
    _wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.fail("the run was over before the signal came: make it longer")
    assert process.returncode == 75
    stopped = int(re.search(r"stopped by SIGTERM at step (\d+), checkpoint saved", output)[1])
    result = commands.run("launch", *arguments)
    assert f"resumed at step {stopped}\n" in result.stdout
    assert _losses(tmp_path / "run") == _losses(finished[0])


def _wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + 200
    while not any(record[0] >= step for record in _losses(run_dir)):
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"step {step} was never reported"
        time.sleep(0.005)


def test_the_same_command_on_a_finished_run_trains_nothing(finished, gin_file):
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_bytes()
    output = commands.output("launch", f"--gin={gin_file}", f"--run_dir={run_dir}")
    assert "complete at step 24" in output
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_run_directory_of_another_config_is_refused(finished, gin_file):
    places = f"--gin={gin_file}", f"--run_dir={finished[0]}"
    message = commands.refused("launch", *places, "--param=OptimizerConfig.beta1=0.8")
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


def test_training_evaluates_as_the_command_does(gin_file, tmp_path):
    run_dir = tmp_path / "run"
    parameters = ["--param=RunConfig.evaluate_every=16", "--param=RunConfig.tasks=('recall',)"]
    result = commands.run("launch", f"--gin={gin_file}", *parameters, f"--run_dir={run_dir}")
    assert result.returncode == 0, result.stderr
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [r.pop("step") for r in records] == [*range(1, 17), 16, *range(17, 25), 24]
    run = load_run(run_dir)
    data = RunDirectory(run_dir).read_config()["data"]
    expected = evaluate(TASKS["recall"](), Subject(run.model, None, data, run_dir), run.step)
    assert records[-1] == {
        f"recall/{variant}/{row['distance']}": row["accuracy"]
        for variant, rows in expected["series"].items()
        for row in rows
    }
    assert len({*records[-1].values()}) > 1


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
    places = f"--run_dir={run_dir}", f"--output={run_dir / 'page'}"
    assert "go on" in commands.output("report", *places, "--next=go on")
    assert {path.name for path in (run_dir / "page").iterdir()} == {
        *("index.html", "recall.png", "needle.png")
    }


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (["--gin=quikstart.gin"], ["quikstart.gin", "quickstart.gin"]),
        (["--param=MemoryConfig.chunk_size=0"], ["chunk_size", "0"]),
        (["--param=TransformerConfig.student_window=9"], ["9", "8", "student_window"]),
        (["--param=TransformerConfig.num_kv_heads=3"], ["3", "2", "num_kv_heads"]),
        (["--param=RunConfig.accumulation_steps=4"], ["4", "2", "accumulation_steps"]),
        (["--param=TransformerConfig.vocab_size=7"], ["7", "8", "vocab_size"]),
        (["--param=TransformerConfig.widnow=4"], ["widnow", "window"]),
        (["--param=RunConfig.steps='many'"], ["RunConfig.steps", "'many'"]),
        (["--prams=x"], ["prams", "param"]),
    ],
)
def test_bad_input_is_one_line_that_names_values_and_remedy(gin_file, tmp_path, parameters, words):
    base = [] if parameters[0].startswith("--gin") else [f"--gin={gin_file}"]
    message = commands.refused("launch", *base, *parameters, f"--run_dir={tmp_path / 'run'}")
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.*"))


def test_bad_data_is_one_line(gin_file, tmp_path):
    text = tmp_path / "empty"
    text.mkdir()
    parameters = [
        "--param=RunConfig.data=@TextConfig()",
        "--param=TextConfig.corpus=@CorpusConfig()",
        "--param=TextConfig.tokenizer=@TokenizerConfig()",
        "--param=TextConfig.seq_len=16",
        "--param=TransformerConfig.vocab_size=258",
        "--param=CorpusConfig.kind='text'",
        f"--param=CorpusConfig.path='{text}'",
    ]
    run_dir = tmp_path / "run"
    arguments = f"--gin={gin_file}", *parameters, f"--run_dir={run_dir}"
    assert str(text) in commands.refused("launch", *arguments, status=3)


def test_evaluating_what_is_no_run_is_one_line(tmp_path):
    message = commands.refused("evaluate", f"--run_dir={tmp_path}", "--task=ppl")
    assert str(tmp_path) in message
    assert "config.json" in message


def test_dry_run_prints_the_plan_and_writes_nothing(gin_file, tmp_path):
    run_dir = tmp_path / "run"
    output = commands.output("launch", f"--gin={gin_file}", "--dry_run", f"--run_dir={run_dir}")
    for name in ("parameters", "memory: optimizer", "training FLOPs per token"):
        assert name in output
    assert not run_dir.exists()


def test_a_locked_run_directory_names_its_owner(gin_file, tmp_path):
    import fcntl

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / "lock").open("w") as handle:
        handle.write("process 1 on elsewhere\n")
        handle.flush()
        fcntl.flock(handle, fcntl.LOCK_EX)
        message = commands.refused("launch", f"--gin={gin_file}", f"--run_dir={run_dir}")
    assert "process 1 on elsewhere" in message
