"""The learning rate against the published rule, and what AdamW and the clip make of it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.golden import Golden
from tests.parity.training import schedule_of
from ttcd_jax.train.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    global_norm,
    learning_rate,
)

GOLDEN = Golden(Path(__file__).parents[1] / "golden" / "lr_schedules.npz")


@pytest.mark.parametrize("name", sorted(GOLDEN.config))
def test_published_rates(name):
    expected, config = GOLDEN.arrays[f"out.{name}"], schedule_of(GOLDEN.config[name])
    steps = jnp.arange(len(expected), dtype=jnp.int32)
    with jax.enable_x64(True):
        rate = learning_rate(config)
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


def test_config_schedule_starts_at_step_zero():
    schedule = ScheduleConfig(peak=0.1, steps=10, warmup=4)
    config = OptimizerConfig(weight_decay=0.5, clip_norm=None, schedule=schedule)
    optimizer = build_optimizer(config, learning_rate(config.schedule), axes={})
    params = {"norm": jnp.ones(3), "w": jnp.ones((2, 2))}
    grads = jax.tree.map(jnp.zeros_like, params)
    state = optimizer.init(params)
    for step in range(3):
        updates, state = optimizer.update(grads, state, params)
        expected = -0.5 * float(learning_rate(schedule)(step))
        for update in jax.tree.leaves(updates):
            np.testing.assert_allclose(update, expected, rtol=1e-6)


def test_global_norm_of_bfloat16_is_summed_wide():
    norm = global_norm({"a": jnp.ones(1000, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)})
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, np.sqrt(1001), rtol=1e-6)
