"""Learning rates of groups, frozen parameters, and a memory that comes slowly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, refused
from small_models import config_of

from ttcd_jax.train.groups import preparation, rate_factors
from ttcd_jax.train.layers_on_disk import by_name, unstacked
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.metrics import IN_STEP, in_step
from ttcd_jax.train.optimizer import MuonSettings, OptimizerConfig, build_optimizer, global_norm
from ttcd_jax.train.state import init_params, logical_axes, state_of, with_params
from ttcd_jax.train.step import make_train_step

# Layers 0 and 1 are one stack of the model, of which a pattern names one row.
MODEL = config_of("ipttcd", num_layers=2, fast_layers=(0, 1))
RATES = (
    *(("layers/1/mlp/proj", 0.25), ("layers/0/*", 0.0), ("*_norm", 0.0)),
    *(("layers/*/mlp/rate", 0.5), ("embedding", 0.0)),
)
FACTORS = {"layers/1/mlp/proj": 0.25, "layers/1/mlp/rate": 0.5, "embedding": 0.0}
T = 12

pytestmark = pytest.mark.usefixtures("float64")


def expected_factor(name):
    is_frozen = name.startswith("layers/0/") or name.endswith("_norm")
    return 0.0 if is_frozen else FACTORS.get(name, 1.0)


def batch(model=MODEL):
    tokens = jax.random.randint(jax.random.key(1), (2, T + 1), 0, model.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    mask = jnp.ones((2, T), bool).at[0, 3:5].set(False)
    fields = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return fields | {"positions": positions, "loss_mask": mask}


def drawn(model):
    """Parameters none of which is zero, as convolutions are that start a memory at nothing."""
    rng = np.random.default_rng(2)
    start = init_params(model, 0)
    return jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(x.dtype), start)


@functools.cache
def compiled(kind, rates, model, warmup, parts):
    """(step, the state before it) of an optimizer without clip."""
    muon = MuonSettings(orthogonalization="float64") if kind == "muon" else None
    config = OptimizerConfig(kind=kind, clip_norm=None, settings=muon)
    factors, axes = rate_factors(model, rates), logical_axes(model)
    optimizer = build_optimizer(config, lambda _: 0.01, axes, factors=factors)
    options = {"accumulation_steps": parts, "loss_rows": 16, "measure": in_step(IN_STEP)}
    options["prepare"] = preparation(model, factors, warmup)
    step = make_train_step(model, optimizer, lambda _: jnp.asarray(0.01), **options)
    return jax.jit(step), state_of(optimizer, drawn(model))


def trained(kind="adamw", rates=(), model=MODEL, warmup=0, parts=1, start=0, steps=1):
    """(parameters before, state after, metrics of the last step)."""
    step, state = compiled(kind, rates, model, warmup, parts)
    before, state = state["params"], state | {"step": jnp.asarray(start)}
    for _ in range(steps):
        state, metrics = step(state, batch(model))
    return before, state, metrics


def rows(params, model=MODEL):
    return unstacked(model, by_name(params))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_rates_multiply_what_a_step_changes(kind, parts):
    before, plain, _ = trained(kind)
    _, after, _ = trained(kind, RATES, parts=parts)
    before, plain, after = (rows(x) for x in (before, plain["params"], after["params"]))
    for name, start in before.items():
        change, factor = after[name] - start, expected_factor(name)
        assert float(jnp.abs(plain[name] - start).max()) > 0, name
        if factor == 0:
            np.testing.assert_array_equal(after[name], start, err_msg=name)
        np.testing.assert_allclose(
            change, factor * (plain[name] - start), rtol=1e-6, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize(("kind", "moments"), [("adamw", {"mu", "nu"}), ("muon", {"trace"})])
def test_frozen_parameters_have_no_moments_and_no_part_in_the_norm(kind, moments):
    _, state, _ = trained(kind, RATES, steps=2)
    held = by_name({"opt_state": state["opt_state"]})
    assert not [name for name in held if "embedding" in name or "_norm" in name]
    assert any("proj" in name for name in held), [*held]
    _, whole, _ = trained(kind)
    everywhere = [*by_name({"opt_state": whole["opt_state"]})]
    assert moments <= {part for name in everywhere for part in name.split("/")}, everywhere
    # The norm of a first step's gradient is that of the parameters that are trained.
    _, _, metrics = trained("adamw", RATES)
    gradients = jax.grad(loss)(drawn(MODEL))
    trained_ones = {k: x for k, x in rows(gradients).items() if expected_factor(k)}
    np.testing.assert_allclose(metrics["grad_norm"], global_norm(trained_ones), rtol=1e-9)


def loss(params, model=MODEL):
    fields, model = batch(model), with_params(model, params)
    hidden, _ = model.forward(fields["tokens"], None, fields["positions"])
    head, mask = model.head_weight(), fields["loss_mask"]
    return summed_loss(hidden, head, fields["targets"], mask, 16) / mask.sum()


def warmed(method="ipttcd", **memory):
    model = config_of(method, num_layers=1)
    return model.replace(memory=model.settings.replace(**memory))


WARMED = {
    "ipttcd": warmed(),
    "corrected": warmed(form="auto", corrects_errors=True),
    "renormalized": warmed(form="auto", renorm_chunks=2, normalizes_errors=True),
    "learned": warmed(form="auto", corrects_errors=True, error="learned", has_proj=False),
    "ipttt": warmed("ipttt"),
}


@pytest.mark.parametrize("name", WARMED)
def test_a_warm_up_is_that_of_eta(name):
    model, steps = WARMED[name], 8
    memory = model.settings
    for start, share in ((2, 0.25), (8, 1.0), (20, 1.0)):
        slower = model.replace(memory=memory.replace(eta=share * memory.eta))
        _, found, metrics = trained(model=model, warmup=steps, start=start)
        _, expected, its_metrics = trained(model=slower, start=start)
        np.testing.assert_allclose(metrics["loss"], its_metrics["loss"], rtol=1e-12)
        np.testing.assert_allclose(metrics["memory_ratio"], its_metrics["memory_ratio"], rtol=1e-9)
        if share == 1.0:
            assert_same(found, expected)
    _, _, off = trained(model=model, warmup=steps)
    _, _, on = trained(model=model)
    assert abs(off["loss"] - on["loss"]) > 1e-6, "the memory has no effect"


def test_what_cannot_be_warmed_is_refused():
    models = [config_of(x) for x in ("swa", "lact", "ipttcd_ideal", "gated_deltanet")]
    for model in (*models, warmed(orthogonalizes_updates=True), warmed(has_proj=False)):
        refused("memory_warmup 5", preparation, model, None, 5)


def test_a_pattern_that_never_counts_is_refused():
    rates = (("layers/*", 0.5), ("layers/0/*", 0.0))
    refused("'layers/0/*' names|put it first", rate_factors, MODEL, rates)
    assert rate_factors(MODEL, rates[::-1])
