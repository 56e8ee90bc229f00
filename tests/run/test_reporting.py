"""What a run says of its steps; tests/soak kills it and tears its records."""

import json
import math
import re
import time
from types import SimpleNamespace
from unittest import mock

import bad_steps_run
import numpy as np
import pytest

from ttcd_jax.run import reporting
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.train.watchdog import Watchdog


def test_what_a_run_says_of_its_speed_is_that_of_the_clock(tmp_path, capsys, monkeypatch, caplog):
    """64 tokens per step of 1,000 FLOPs each on two devices of 1e5 FLOPs per second: 30 s for the
    first two steps, then 4 s for each and 3 s of an evaluation; 6 and 2 s waiting for batches."""
    clock, tracker = [100.0], mock.Mock()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reporting, "training_flops_per_token", lambda *_: 1000.0)
    monkeypatch.setattr(reporting, "data_sheet", lambda _: SimpleNamespace(peak_flops=1e5))
    monkeypatch.setattr("jax.device_count", lambda: 2)
    config = bad_steps_run.CONFIG.replace(batch_size=8, log_every=2, steps=100)
    with reporting.reporter(config, tmp_path, 0, [tracker], Watchdog(1)) as ((callback,), write):
        for step, now, waited, ratio in ((2, 130.0, 6.0, 0.5), (4, 141.0, 8.0, np.nan)):
            clock[0] = now
            metrics = {"loss": 1.5, "memory_ratio": [ratio, 0.25], "data_seconds": waited}
            metrics["callback_seconds"] = 0.0 if step == 2 else 3.0
            callback.call(step, {name: np.asarray(x) for name, x in metrics.items()})
        write(4, {"recall/on/8": np.inf, "recall/on/16": 0.5})
    first, second, evaluation = read_metrics(tmp_path / "metrics.jsonl")
    for record, seconds, waited in ((first, 30, 6), (second, 8, 2)):
        speed = record["tokens_per_second"], record["data_wait"], record["mfu"]
        rate = 2 * 64 / seconds
        assert speed == pytest.approx((rate, waited / seconds, rate * 1000 / 2e5))
    assert (second["memory_ratio/0"], evaluation["recall/on/8"]) == (None, None)
    assert capsys.readouterr().out.splitlines() == [
        "step   2/100  loss 1.5000  4 tokens/s  24:30 left  MFU 2.1%  |eta S|/|W| 0.500  "
        "20% waiting for data",
        "step   4/100  loss 1.5000  16 tokens/s  8:48 left  MFU 8.0%  |eta S|/|W| 0.250  "
        "25% waiting for data",
    ]
    assert [x.partition(", null")[0] for x in caplog.messages] == ["step 4: not finite"] * 2
    assert tracker.write.call_args == mock.call(4, {"recall/on/16": 0.5})
    assert "memory_ratio/0" not in tracker.write.call_args_list[1].args[1]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)  # no NaN


def _warned_at(caplog, name, values, last=None):
    """The steps at which a watch warns, with every text; `last` ends the run."""
    caplog.clear()
    watch = reporting.MemoryWatch()
    for step, value in enumerate(values, start=1):
        record = {"loss": 9.0, name: value, "skipped": "a text"}
        watch.warn(step, record, is_last=step == last)
    texts = [record.getMessage() for record in caplog.records]
    return [int(re.match(r"step (\d+): ", text)[1]) for text in texts], texts


def test_memories_are_warned_of_by_the_median_of_a_window(caplog):
    """One loud step is none; a loud memory is told of again when it doubles, or after ten times as
    many steps; so are a shut gate and errors that the windows hardly make."""
    for values in ([1.9] * 30 + [9.0] * 9 + [1.9] * 30, [9.0] * 9, [math.nan] * 30):
        assert _warned_at(caplog, "memory_ratio/0", values)[0] == []
    steps, texts = _warned_at(caplog, "memory_ratio/1", [3.0] * 120 + [6.1] * 20)
    assert steps == [10, 100, 131]
    wanted = "step 10: memory_ratio/1 is 3, the median of 10 logged values: the memory outgrows its"
    assert texts[0].startswith(wanted)
    steps, texts = _warned_at(caplog, "gate_mean/0", [0.02] * 20 + [0.004] * 30)
    assert (steps, "the gate of the memory shuts" in texts[0]) == ([31], True)
    steps, texts = _warned_at(caplog, "window_share/0", [0.06] * 20 + [0.04] * 20 + [0.0] * 300)
    assert (steps, "a run with equal windows says" in texts[0]) == ([31, 310], True)
    for last, warned in ((4, []), (5, [5]), (8, [8])):
        assert _warned_at(caplog, "window_share/0", [0.0] * last, last)[0] == warned
