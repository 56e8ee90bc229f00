"""A method defined outside the package gets everything from the shared machinery alone."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from devices import run_on_devices
from small_models import CHUNK, TOY, ToySettings, config_of

from experiments import plan
from experiments.cli import CONFIG_DIR
from tests.inference import test_reading
from tests.models import test_methods
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.methods import METHODS
from ttcd_jax.models.config import TransformerConfig, switched_off
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.flops import forward_flops
from ttcd_jax.train.metrics import IN_STEP, in_step
from ttcd_jax.train.state import init_params, state_of
from ttcd_jax.train.step import make_train_step

ROWS, T = 2, 19
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, T))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", TOY)


def _config(**changes) -> TransformerConfig:
    return config_of("toy", **changes)


def test_it_has_the_properties_of_every_method(float64):
    test_methods.test_a_token_depends_on_its_past_its_row_and_its_document_only("toy")
    test_reading.test_any_way_to_read_rows_gives_what_one_pass_gives("toy", {})


def test_a_step_trains_it(float64):
    config, optimizer = _config(), optax.sgd(0.1)
    train_step = make_train_step(
        *(config, optimizer, lambda count: 0.1), loss_rows=16, measure=in_step(IN_STEP)
    )
    step = jax.jit(train_step)
    state = state_of(optimizer, init_params(config, 0))
    whole = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
    rows = np.zeros((ROWS, T - 1), int)
    batch = whole | {"segment_ids": rows, "positions": rows + np.arange(T - 1)}
    batch |= {"loss_mask": np.ones((ROWS, T - 1), bool)}
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] > losses[1] > losses[2]
    assert metrics["memory_ratio"].shape == (1,)
    assert metrics["memory_ratio"] > 0


def test_a_mesh_changes_neither_loss_nor_gradients():
    script = Path(__file__).parents[1] / "sharding" / "equal_on_devices.py"
    found = run_on_devices(script, json.dumps({"toy": ["1x1x4x2"]}))
    assert found["toy"]["1x1x4x2"] < 1e-6


def test_its_arithmetic_and_its_state_are_counted(float64):
    config = _config()
    plain = config_of("swa")
    memory = 2 * 2 * 32 * config.dim * config.mlp_dim  # read and write, in one layer
    assert forward_flops(config, 32) == forward_flops(plain, 32) + memory
    sizes = state_bytes(config, 1)
    assert sizes["memory"] == 8 * config.dim * config.mlp_dim
    assert sizes["open chunk"] == 8 * CHUNK * (config.dim + config.mlp_dim)
    assert switched_off(config, 32) == config.replace(memory=ToySettings(chunk_size=CHUNK, eta=0.0))


def test_a_gin_file_plans_it(capsys):
    params = ["TransformerConfig.method='toy'", "TransformerConfig.memory=@ToySettings()"]
    params += ["ToySettings.chunk_size=8", "RunConfig.batch_size=1"]
    config = load_config(RunConfig, "recall.gin", params, config_dir=CONFIG_DIR)
    plan.print_plan(config, None)
    assert "parameters" in capsys.readouterr().out
