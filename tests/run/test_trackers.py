"""Trackers: what they receive, what they may do to a run, and a run of Weights & Biases on disk."""

import importlib.util
import json
import shutil
import struct
from unittest import mock

import commands
import numpy as np
import pytest
import tiny_run
from checks import refused
from small_models import config_of, run_config
from wandb.proto.wandb_internal_pb2 import Record

from ttcd_jax import Precision, train_run
from ttcd_jax.run.directory import METRICS
from ttcd_jax.run.reporting import MetricFiles, read_metrics, reporter
from ttcd_jax.run.trackers import TRACKERS, Guarded
from ttcd_jax.train.watchdog import Watchdog

MODEL = config_of("ipttcd", num_layers=1, precision=Precision())
CONFIG = run_config(MODEL, steps=5, log_every=1, checkpoint_every=4)


def test_a_tracker_of_the_user_receives_every_record(tmp_path):
    first, second, config = mock.Mock(), mock.Mock(), CONFIG.to_dict()
    train_run(CONFIG, tmp_path, trackers=[first])
    start, *written, close = first.mock_calls
    assert (start, close) == (mock.call.start(tmp_path, config, 0), mock.call.close())
    found = [(name, step, "loss" in record) for name, (step, record), _ in written]
    assert found == [("write", step, True) for step in range(1, 6)]
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    train_run(CONFIG, tmp_path, trackers=[second])  # step 5 was reported before
    assert second.mock_calls == [mock.call.start(tmp_path, config, 4), mock.call.close()]
    assert [step for step, *_ in tiny_run.losses(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [RuntimeError("no\nkey"), SystemExit(3)])
@pytest.mark.parametrize("method", ["start", "write", "close"])
def test_a_tracker_that_fails_is_a_warning_and_gets_no_more_calls(method, error, tmp_path, caplog):
    tracker, order = mock.Mock(), ["start", "write", "write", "close"]
    getattr(tracker, method).side_effect = error
    with reporter(CONFIG, tmp_path, 0, [tracker], Watchdog(1)) as ((callback,), _):
        for step in (1, 2):
            times = dict.fromkeys(("data_seconds", "callback_seconds"), np.zeros(()))
            callback.call(step, {"loss": np.ones(())} | times)
    assert [name for name, *_ in tracker.mock_calls] == order[: order.index(method) + 1]
    assert [record["step"] for record in read_metrics(tmp_path / METRICS)] == [1, 2]
    (message,) = (x for x in caplog.messages if "tracker" in x)
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert message == f"tracker Mock failed ({cause}): the run goes on without it"


def test_an_interruption_inside_a_tracker_is_none_of_its_failures(caplog):
    with pytest.raises(KeyboardInterrupt):
        Guarded(mock.Mock(close=mock.Mock(side_effect=KeyboardInterrupt))).call("close")
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
    refused("pip install 'ttcd-jax[wandb]'", TRACKERS["wandb"])


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
    bindings = "STEPS=90", "RunConfig.trackers=('wandb',)", "RunConfig.checkpoint_every=30"
    sizes = tiny_run.flags("recall.gin", *tiny_run.RECALL, *bindings)
    line = "launch", *sizes, f"--run_dir={run_dir}"
    environment = commands.cpu_environment(MY_TOKEN="hunter2")
    process = commands.start(*line, env=environment)
    tiny_run.wait_until(lambda: len(tiny_run.losses(run_dir)) >= 45, process)
    process.kill()
    process.wait()
    killed_at = tiny_run.losses(run_dir)[-1][0]
    commands.output(*line, env=environment)

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
    assert {*range(killed_at + 1, 91)} <= {*steps} <= {*range(1, 91)}
    losses = {step: loss for step, loss, _ in tiny_run.losses(run_dir)}
    assert [row["loss"] for row in rows] == [losses[step] for step in steps]
    written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert b"hunter2" not in written
