import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bad_steps_run import NAN, SPIKE, poisoned_loss
from checks import assert_same, temporary_bytes
from small_models import RECALL, config_of

from ttcd_jax import MemoryConfig, Precision
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.synthetic import SyntheticRows
from ttcd_jax.train import bad_steps
from ttcd_jax.train import step as step_module
from ttcd_jax.train.bad_steps import fault, judged, no_skips
from ttcd_jax.train.loop import MetricCallback, StateCallback, train
from ttcd_jax.train.metrics import IN_STEP, in_step
from ttcd_jax.train.optimizer import OptimizerConfig, ScheduleConfig, build_optimizer, learning_rate
from ttcd_jax.train.state import init_params, state_of
from ttcd_jax.train.step import make_train_step, step_with

MEMORY = MemoryConfig(chunk_size=4, form="blocked", teacher_conv_init="identity")
MODEL = config_of(
    "ipttcd",
    **{"vocab_size": 8, "dim": 16, "mlp_dim": 16, "window": 8, "student_window": 4},
    **{"memory": MEMORY, "precision": Precision()},
)
FIELDS = ("tokens", "targets", "positions", "loss_mask")


def _rate(step):
    return jnp.asarray(0.01)


@functools.cache
def _step(accumulation_steps=1, optimizer=optax.adam):
    optimizer = optimizer(1.0 if optimizer is optax.sgd else _rate)
    options = {"accumulation_steps": accumulation_steps, "measure": in_step(IN_STEP)}
    step = make_train_step(MODEL, optimizer, _rate, loss_rows=16, **options)
    return jax.jit(lambda: state_of(optimizer, init_params(MODEL, 0)))(), jax.jit(step)


BATCHES = Batches(SyntheticRows(RECALL, seed=0, num_rows=1000), batch_size=4)


def _batch(step=0):
    return {name: jnp.asarray(BATCHES.at(step)[name]) for name in FIELDS}


def test_accumulation_keeps_one_copy_of_the_gradients():
    sizes = {"dim": 32, "mlp_dim": 128, "num_layers": 12, "remat": "block"}
    model = MODEL.replace(method="swa", fast_layers=(), memory=None, **sizes)
    state = jax.eval_shape(lambda: state_of(optax.sgd(1.0), init_params(model, 0)))

    def temp_bytes(parts):  # of one row each
        step = make_train_step(model, optax.sgd(1.0), _rate, accumulation_steps=parts, loss_rows=16)
        return temporary_bytes(step, state, {name: x[:parts] for name, x in _batch().items()})

    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state["params"]))
    assert temp_bytes(4) < temp_bytes(1) + 0.3 * gradients


def test_a_step_that_is_not_finite_or_has_no_target_changes_nothing():
    state, step = _step(2)
    broken = jax.tree.map(jnp.copy, state)
    broken["params"]["embedding"] = broken["params"]["embedding"].at[0, 0].set(jnp.nan)
    after, metrics = step(broken, batch := _batch())
    assert not np.isfinite(metrics["loss"])
    assert_same(after["params"], broken["params"])
    after, metrics = step(state, batch | {"loss_mask": jnp.zeros_like(batch["loss_mask"])})
    assert_same((after["params"], after["opt_state"]), (state["params"], state["opt_state"]))
    assert fault(jax.device_get(metrics)) == "loss is nan, as no target of the batch counts"


def _stop(*bad):
    raise AssertionError(bad)


@pytest.mark.parametrize(
    ("start", "steps", "every", "expected"),
    [
        (2, 9, (2, 4), (7, "m4 s4 m6 s7")),  # stopped after two reports
        (0, 3, (100, 100), (3, "m3 s3")),  # the last step is always reported and saved
    ],
)
def test_the_loop_reports_every_step_before_its_state_and_stops_when_asked(
    start, steps, every, expected
):
    seen = []
    calls = {
        "on_metrics": [MetricCallback(every[0], lambda step, metrics: seen.append(f"m{step}"))],
        "on_state": [StateCallback(every[1], lambda step, state: seen.append(f"s{step}"))],
        "is_stopping": lambda step: sum("m" in x for x in seen) == 2,
    }
    _, done = train(*_step(), BATCHES, start=start, steps=steps, on_bad=_stop, **calls)
    assert (done, " ".join(seen)) == expected


def test_the_loop_reports_the_time_that_it_waits_for_batches():
    class Slow:
        def iterate(self, start, count):
            for step, batch in BATCHES.iterate(start, count):
                time.sleep(0.05)
                yield step, batch

    seen = []
    watch = MetricCallback(1, lambda step, metrics: seen.append(metrics["data_seconds"]))
    train(*_step(), Slow(), start=0, steps=4, on_bad=_stop, on_metrics=[watch])
    # Metrics are one step late: those of step n come after the batch of step n + 1.
    assert all(x >= 0.05 * n for n, x in zip((2, 3, 4, 4), seen, strict=True))
    assert seen == sorted(seen)


def _judge(norms, factor=2.0):
    """(whether each step is accepted, the last step's metrics) of gradient norms."""
    step = jax.jit(functools.partial(judged, spike_factor=factor))
    skips, accepted, metrics = no_skips(), [], {}
    for norm in jnp.asarray(norms, jnp.float32):
        is_good, skips, metrics = step(skips, {"grad_norm": norm}, jnp.isfinite(norm))
        accepted.append(bool(is_good))
    return accepted, metrics


def test_spikes_are_steps_like_any_other_until_the_average_decides(monkeypatch):
    monkeypatch.setattr(bad_steps, "WARMUP", 3)
    accepted, metrics = _judge([1.0, np.nan, 3.0, 2.0, 5.0, 3.9, 5.1])
    assert accepted == [True, False, True, True, False, True, False]
    weights = bad_steps.DECAY ** np.arange(4)[::-1]
    average = np.average([1.0, 3.0, 2.0, 3.9], weights=weights)
    np.testing.assert_allclose(metrics["grad_norm_average"], average, rtol=1e-5)
    assert int(metrics["skipped_steps"]) == 3
    assert _judge([1.0, np.inf, 3.0, 2.0, 50.0], None)[0] == [True, False, True, True, True]
    assert _judge([0.0] * 5)[0] == [True] * 5, "a norm of zero is its average"


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [NAN, SPIKE])
def test_a_skipped_step_changes_no_array_but_its_counts(monkeypatch, parts, kind):
    """One bad row of four makes the step bad, whatever its part."""
    monkeypatch.setattr(bad_steps, "WARMUP", 1)
    monkeypatch.setattr(step_module, "summed_loss", poisoned_loss)
    model, optimizer = MODEL.replace(vocab_size=11), optax.adam(_rate)
    options = {"accumulation_steps": parts, "loss_rows": 16, "spike_factor": 20.0}
    step = jax.jit(make_train_step(model, optimizer, _rate, **options))
    state = state_of(optimizer, init_params(model, 0))
    state, metrics = step(state | {"skips": no_skips()}, batch := _batch())
    assert not metrics["is_skipped"]
    bad = batch | {"targets": batch["targets"].at[2, 1].set(kind)}
    after, metrics = step(state, bad)
    assert metrics["is_skipped"]
    assert metrics["skipped_steps"] == 1
    assert_same((after["params"], after["opt_state"]), (state["params"], state["opt_state"]))
    assert int(after["step"]) == 2
    assert_same(after["skips"], state["skips"] | {"skipped": jnp.int32(1)})
    assert fault(jax.device_get(metrics)).startswith("loss is nan" if kind == NAN else "grad_norm ")
    good, metrics = step(after, batch)
    assert not metrics["is_skipped"]
    assert_same(good["params"], step(state, batch)[0]["params"])


def _steps(gradients, marked=1, dtype="float32"):
    """(metrics, change of a parameter) of AdamW's steps along these gradients of the sum."""
    schedule = ScheduleConfig(peak=0.5, steps=8, warmup=4)
    config = OptimizerConfig(weight_decay=0.0, clip_norm=None, schedule=schedule)
    rate = learning_rate(schedule)
    optimizer = build_optimizer(config, rate, {"x": ("embed",)})
    batch = {"loss_mask": jnp.ones(marked, bool)}
    state = state_of(optimizer, {"x": jnp.zeros(1, dtype)}) | {"skips": no_skips()}
    for gradient in gradients:
        grads = {"x": jnp.full(1, gradient, dtype)}
        step = step_with(lambda *_, grads=grads: ((jnp.float32(1), {}), grads), optimizer, rate)
        before = state["params"]["x"]
        state, metrics = step(state, batch)
        yield metrics, float((state["params"]["x"] - before)[0])


def test_the_rate_is_that_of_the_step_after_skipped_ones_too():
    found = [(float(x["learning_rate"]), -moved) for x, moved in _steps([1, np.nan, np.nan, 1, 1])]
    np.testing.assert_allclose([x for x, _ in found], [0.125, 0.25, 0.375, 0.5, 0.5])
    np.testing.assert_allclose([x for _, x in found], [0.125, 0, 0, 0.5, 0.5], rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "gradient", "marked"), [("bfloat16", 256, 257), ("float16", 60_000, 70_001)]
)
def test_the_mean_of_narrow_gradients_is_over_all_targets(dtype, gradient, marked):
    """Their dtypes make 256 of the one number of targets, and infinity of the other."""
    ((metrics, _),) = _steps([gradient], marked, dtype)
    mean = jnp.asarray(float(jnp.asarray(gradient, dtype)) / marked, dtype)
    assert float(metrics["grad_norm"]) == float(mean)
