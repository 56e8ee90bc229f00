"""Bad steps of a run: skipped and counted, the same after a restart and on several devices."""

import functools
import math
import time
from pathlib import Path
from unittest import mock

import jax
import pytest
from bad_steps_run import BAD, CONFIG, records, train
from checks import assert_same, refused
from devices import elsewhere

from ttcd_jax.errors import NonFiniteError
from ttcd_jax.run import build
from ttcd_jax.train.checkpoint import Checkpoints
from ttcd_jax.train.loop import MetricCallback
from ttcd_jax.train.watchdog import Watchdog


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("skips") / "run"
    train(run_dir)
    return run_dir


def _final_state(run_dir):
    checkpoints = Checkpoints(run_dir / "checkpoints", model=CONFIG.model, is_read_only=True)
    _, state = checkpoints.restore(dict(build.Program(CONFIG).state))
    checkpoints.close()
    return jax.device_get(state)


def test_bad_steps_are_skipped_and_recorded_with_their_rows(undisturbed, caplog):
    every = records(undisturbed)
    assert [record["step"] for record in every] == list(range(1, 25))
    skipped = {record["step"]: record for record in every if "skipped" in record}
    assert list(skipped) == list(BAD)
    assert [record["skipped_steps"] for record in skipped.values()] == [1, 2, 3, 4]
    first, spike = skipped[3], skipped[16]
    assert (first["skipped"], first["rows"], first["loss"]) == ("loss is nan", [8, 11], None)
    ratio = spike["grad_norm"] / spike["grad_norm_average"]
    assert spike["skipped"].startswith(f"grad_norm {spike['grad_norm']:.4g} is {ratio:.3g} times")
    assert spike["rows"] == [60, 63]
    assert int(_final_state(undisturbed)["skips"]["accepted"]) == 20


def _fail_at(step):
    """Divides by zero after a step."""
    return MetricCallback(1, lambda done, metrics: 1 / (done - step))


@pytest.mark.parametrize(("step", "minutes"), [(3, None), (18, 1e-9)])
def test_a_run_killed_among_them_repeats_losses_skips_state(undisturbed, tmp_path, step, minutes):
    with pytest.raises(ZeroDivisionError):  # with `minutes` every step is saved, skipped ones too
        train(tmp_path, _fail_at(step), checkpoint_minutes=minutes)
    train(tmp_path, checkpoint_minutes=minutes)
    assert records(tmp_path) == records(undisturbed)
    assert_same(_final_state(tmp_path), _final_state(undisturbed))


def test_skipped_steps_are_recorded_and_warned_of_between_reports(tmp_path, caplog):
    tracker = mock.Mock()
    train(tmp_path, log_every=50, steps=4, trackers=[tracker])
    (skip, record), (last, other) = (x.args for x in tracker.write.call_args_list)
    assert (skip, record["skipped"], record["rows"]) == (3, "loss is nan", (8, 11))
    assert (last, "skipped" in other) == (4, False)
    assert [record["step"] for record in records(tmp_path)] == [3, 4]
    (message,) = (x for x in caplog.messages if "skipped" in x)
    assert message.startswith("step 3 is skipped (loss is nan): rows 8 .. 11 of the data, 1 of at")


NONE = {"max_skipped_steps": 0, "spike_factor": None}


_ended = functools.partial(refused, "", train, error=NonFiniteError)


def test_one_bad_step_too_many_ends_a_run_that_another_limit_takes_on(undisturbed, tmp_path):
    message = _ended(tmp_path, **NONE, checkpoint_every=2)
    assert message.startswith("loss is nan at step 3, in rows 8 .. 11 of the data; bad steps: 1, ")
    assert "max_skipped_steps: 0; last good checkpoint: step 2. Resume with --param=" in message
    assert "; last good checkpoint: none." in _ended(tmp_path / "new", **NONE)
    assert message.endswith("or start anew with a lower ScheduleConfig.peak or MemoryConfig.eta")
    message = _ended(tmp_path, spike_factor=None, max_skipped_steps=1, checkpoint_every=2)
    assert "at step 17, " in message
    assert "bad steps: 2, RunConfig.max_skipped_steps: 1; last good checkpoint: step 16" in message
    train(tmp_path, spike_factor=None, checkpoint_every=2)
    every = records(tmp_path)
    assert [record["step"] for record in every if "skipped" in record] == [3, 17]
    assert [x["loss"] for x in every[:15]] == [x["loss"] for x in records(undisturbed)[:15]]


def test_what_a_run_waits_for_at_its_end_has_more_time_than_a_step(tmp_path, monkeypatch):
    deadlines, enter, wait, tracker = [], Watchdog.__enter__, Checkpoints.wait, mock.Mock()

    def entered(watchdog):
        def note(name):
            deadlines.append((name, watchdog._deadline - time.monotonic()))

        monkeypatch.setattr(Checkpoints, "wait", lambda x: (note("checkpoint"), wait(x)))
        tracker.close = lambda: note("tracker")
        return enter(watchdog)

    monkeypatch.setattr(Watchdog, "__enter__", entered)
    _ended(tmp_path / "bad", **NONE, checkpoint_every=1, trackers=[tracker])
    train(tmp_path / "good", steps=2, trackers=[tracker])
    limits = {"checkpoint": [590, 600], "tracker": [math.inf, math.inf]}
    assert all(limits[name][0] <= left <= limits[name][1] for name, left in deadlines)
    assert {name for name, _ in deadlines} == {*limits}


def test_a_run_that_skips_nothing_stores_no_counts_and_goes_on_from_those_of_another(tmp_path):
    assert "skips" not in build.Program(CONFIG.replace(**NONE)).state
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, _fail_at(8))
    assert "at step 17, in rows 64 .. 67 of the data; bad steps: 1, " in _ended(tmp_path, **NONE)
    assert "skips" not in _final_state(tmp_path)


def trained(run_dir):
    train(Path(run_dir))
    return records(Path(run_dir))


def test_four_devices_skip_the_same_steps(undisturbed, tmp_path):
    found = elsewhere(trained, str(tmp_path), count=4)
    for ours, theirs in zip(found, records(undisturbed), strict=True):
        for name in theirs:
            if isinstance(theirs[name], float):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
            elif name != "skipped":
                assert ours[name] == theirs[name]
