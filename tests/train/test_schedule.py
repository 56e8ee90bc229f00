"""The learning rate against the published rule, every variant of it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttcd_jax.train.optimizer import ScheduleConfig, learning_rate

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "lr_schedules.npz")
CASES = json.loads(str(GOLDEN["config_json"]))["config"]


def _config(case: dict) -> ScheduleConfig:
    floor = case["lr_min"] if "lr_min" in case else min(1.0, case["lr_min_absolute"] / case["lr"])
    return ScheduleConfig(
        peak=case["lr"],
        steps=case["steps"],
        warmup=case["warmup"],
        decay_ratio=case["decay_ratio"],
        decay=case["decay_type"],
        floor_ratio=floor,
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_published_rates(name):
    expected = GOLDEN[f"out.{name}"]
    steps = jnp.arange(len(expected), dtype=jnp.int32)
    with jax.enable_x64(True):
        rate = learning_rate(_config(CASES[name]))
        one_by_one = np.array([rate(step) for step in range(len(expected))])
        traced = jax.jit(jax.vmap(rate))(steps)
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-12, atol=0)
    np.testing.assert_allclose(traced, expected, rtol=1e-12, atol=0)
    narrow = jax.vmap(rate)(steps)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, expected, rtol=0, atol=1e-6 * expected.max())


def test_floor_holds_after_the_last_step():
    rate = learning_rate(ScheduleConfig(peak=1.0, steps=10, warmup=2, floor_ratio=0.25))
    assert float(rate(9)) > 0.25
    assert float(rate(10)) == float(rate(1000)) == 0.25
