"""Trackers: what they receive, what they may do to a run, and a run of Weights & Biases on disk."""

import importlib.util
import json
import shutil
import struct

import commands
import pytest
import tiny_run
from wandb.proto.wandb_internal_pb2 import Record

from ttcd_jax.errors import UserError
from ttcd_jax.run.reporting import MetricFiles
from ttcd_jax.run.trackers import Guarded, named

LAUNCH = ("launch", *tiny_run.flags("recall.gin", *tiny_run.RECALL))
TRACKED = "--param=RunConfig.trackers=('wandb',)"
# A run with a tracker of its own, which does as it is told at the third call of write.
OWN = """
import sys
from pathlib import Path
from ttcd_jax.run.bindings import load_config
from ttcd_jax import RunConfig, train_run

class Own:
    def start(self, run_dir, config, step):
        self.lines = [f"start {run_dir.name} {config['steps']} {step}"]

    def write(self, step, record):
        self.lines.append(f"{step} {'loss' in record}")
        if step == 3:
            FAIL

    def close(self):
        print(*self.lines, "close", sep="|")

params = [text.removeprefix("--param=") for text in sys.argv[2:]]
config = load_config(RunConfig, "recall.gin", params, config_dir=Path("experiments/configs"))
print(train_run(config, sys.argv[1], trackers=[Own()]).step)
"""


def _own(tmp_path, failure, *bindings):
    program = tmp_path / "own.py"
    program.write_text(OWN.replace("FAIL", failure))
    sizes = tiny_run.params(*tiny_run.BINDINGS, *tiny_run.RECALL, *bindings)
    result = commands.run(program, tmp_path / "run", *sizes)
    assert result.returncode == 0, result.stderr
    return result


def test_a_tracker_of_the_user_receives_every_record(tmp_path):
    output = _own(tmp_path, "pass", "STEPS=5").stdout
    assert "start run 5 0|1 True|2 True|3 True|4 True|5 True|close\n" in output
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "5")
    output = _own(tmp_path, "pass", "STEPS=5").stdout
    assert "start run 5 4|close\n" in output  # step 5 was reported before
    assert [step for step, *_ in tiny_run.losses(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_a_tracker_that_fails_is_one_warning(tmp_path):
    result = _own(tmp_path, "raise ConnectionError('no network')", "STEPS=6")
    assert result.stdout.endswith("\n6\n")
    assert result.stderr.count("\n") == 1
    words = "failed (ConnectionError: no network)"
    assert result.stderr.endswith(f"tracker Own {words}: the run goes on without it\n")


class _Failing:
    """Raises in one of its methods."""

    def __init__(self, method, error):
        self.calls, self._method, self._error = [], method, error

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == self._method:
                raise self._error

        return call


@pytest.mark.parametrize("error", [RuntimeError("no\nkey"), SystemExit(3)])
@pytest.mark.parametrize("method", ["start", "write", "close"])
def test_a_tracker_gets_no_call_after_one_that_fails(method, error, caplog):
    tracker = _Failing(method, error)
    guarded, order = Guarded(tracker), ["start", "write", "write", "close"]
    for name in order:
        guarded.call(name)
    assert tracker.calls == order[: order.index(method) + 1]
    (message,) = caplog.messages
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert message == f"tracker _Failing failed ({cause}): the run goes on without it"


def test_an_interruption_inside_a_tracker_is_none_of_its_failures(caplog):
    with pytest.raises(KeyboardInterrupt):
        Guarded(_Failing("write", KeyboardInterrupt())).call("write")
    assert not caplog.messages


def test_a_record_that_is_written_again_is_told_from_another_of_its_step(tmp_path):
    files = MetricFiles(tmp_path, 0)
    assert files.write(4, {"loss": 1.0})
    assert files.write(5, {"loss": 1.0, "mfu": 0.5})
    assert files.write(5, {"ppl/all/32": 1.0})
    for start in (4, 4, 3):  # the second time nothing was written since
        files = MetricFiles(tmp_path, start)
    assert files.write(4, {"ppl/all/32": 1.0})
    for step, name in ((4, "loss"), (5, "loss"), (5, "ppl/all/32")):
        assert not files.write(step, {name: 1.0})
    assert files.write(6, {"loss": 1.0})


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ttcd-jax\[wandb\]'"):
        named(("wandb",))


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path):
    error = commands.refused(
        *LAUNCH, "--param=RunConfig.trackers=('wand',)", f"--run_dir={tmp_path}"
    )
    assert "no tracker is called 'wand'; did you mean 'wandb'?" in error
    assert not [*tmp_path.iterdir()]


def _records(run_dir):
    """The records of the files of Weights & Biases: logs in the format of LevelDB."""
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        content, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(content):
            if (left := 2**15 - position % 2**15) < 7:
                position += left
                continue
            size, kind = struct.unpack("<HB", content[position + 4 : position + 7])
            record += content[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(record)
                record = b""


def test_weights_and_biases_offline_has_each_step_once_after_a_kill(tmp_path):
    run_dir = tmp_path / "project" / "run"
    line = *LAUNCH, TRACKED, f"--run_dir={run_dir}", "--param=STEPS=300"
    environment = commands.cpu_environment(MY_TOKEN="hunter2")
    process = commands.start(*line, "--param=RunConfig.checkpoint_every=100", env=environment)
    tiny_run.wait_for_step(run_dir, 150, process)
    process.kill()
    process.wait()
    killed_at = tiny_run.losses(run_dir)[-1][0]
    commands.output(*line, "--param=RunConfig.checkpoint_every=100", env=environment)

    records = [*_records(run_dir)]
    runs = [record.run for record in records if record.HasField("run")]
    names = {(run.run_id, run.project, run.display_name) for run in runs}
    assert names == {((run_dir / "wandb" / "id").read_text(), "project", "run")}
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in x.history.item}
        for x in records
        if x.HasField("history")
    ]
    steps = [row["_step"] for row in rows]
    assert len(steps) == len(set(steps))
    # A kill loses at most what was not on disk yet.
    assert {*range(killed_at + 1, 301)} <= {*steps} <= {*range(1, 301)}
    losses = {step: loss for step, loss, _ in tiny_run.losses(run_dir)}
    assert [row["loss"] for row in rows] == [losses[step] for step in steps]
    written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert b"hunter2" not in written
