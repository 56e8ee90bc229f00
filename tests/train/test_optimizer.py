"""AdamW and the gradient clip against the published steps."""

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.train.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    global_norm,
    learning_rate,
)


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
