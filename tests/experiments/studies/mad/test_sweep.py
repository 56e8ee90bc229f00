"""The models of the tasks and their scores, of which parity has those of batches; runs that share a
program: each is what it would be alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_close, assert_same, draw, randomize, value_and_gradients
from devices import printed
from flax import nnx
from jax.sharding import AxisType

from experiments.studies.mad import sweep
from experiments.studies.mad.records import MAD_METHODS, RecipeConfig
from experiments.studies.mad.sweep import Autoencoder, Hyper, batch_scores, mad_config
from experiments.studies.mad.tasks import BASELINES, IGNORE, Rows
from ttcd_jax.models.transformer import Transformer

TASK = BASELINES["in-context-recall"]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 11)), jnp.int32)


def tiny(method="ipttcd"):
    return mad_config(method, TASK, window=4, dim=16, mlp_dim=24)


def test_the_published_sizes():
    def num_params(model_class, config):
        model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))

    D, F, V = 128, 256, 16
    swa = mad_config("swa", TASK)
    block = 4 * D * D + 3 * D * F + 2 * D
    plain = 2 * block + 2 * V * D + D
    assert num_params(Transformer, swa) == plain
    memory = D * D + D + 2 * 5 * F  # P, b, two convolutions of five taps
    ipttcd = mad_config("ipttcd", TASK)
    assert num_params(Transformer, ipttcd) == plain + 2 * memory
    assert num_params(Autoencoder, swa) == plain + 2 * (D * D + 2 * D)
    assert (ipttcd.window, ipttcd.student_window, ipttcd.memory.chunk_size) == (32, 16, 16)
    assert mad_config("full", TASK).window is None
    corrected = mad_config("ipttcd_delta", TASK)
    assert corrected.memory.corrects_errors
    assert num_params(Transformer, corrected) == num_params(Transformer, ipttcd)
    for found in (ipttcd, corrected):
        name = "ipttcd" if found is ipttcd else "ipttcd_delta"
        assert mad_config(f"{name}_no_gap", TASK) == found.replace(student_window=32)


def test_an_autoencoder_reads_the_last_state_alone_and_every_parameter_learns():
    angles = 3 * 10_000.0 ** -(np.arange(4) / 3)
    assert_close(sweep.sinusoids(5, 8)[3], np.concatenate([np.sin(angles), np.cos(angles)]), 1e-5)
    model = randomize(Autoencoder, tiny(), std=0.3)
    (h,) = draw(0, (2, 11, 16))
    assert_same(model.normed(h), model.normed(jnp.zeros_like(h).at[:, -1].set(h[:, -1])))
    _, gradients, _ = value_and_gradients(model, lambda model: model(TOKENS))
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    assert [jax.tree_util.keystr(path) for path, x in paths if not np.abs(x).max() > 0] == []
    for method in MAD_METHODS:
        build = functools.partial(Autoencoder, tiny(method))
        logits = nnx.eval_shape(lambda build=build: build(rngs=nnx.Rngs(0))(TOKENS))
        assert logits.shape == (2, 11, 16)


CLASSES, WIDTH = 5, 8


def _logits(params, batch):
    return jnp.tanh(params["embedding"][batch["tokens"]]) @ params["head"]


def _init(key):
    first, second = jax.random.split(key)
    embedding = jax.random.normal(first, (CLASSES, WIDTH))
    return {"embedding": embedding, "head": jax.random.normal(second, (WIDTH, CLASSES))}


def _measure(params, batch):
    return batch_scores(_logits(params, batch), batch["targets"])


# A bag-of-tokens classifier per position: small enough to compile at once.
PROBLEM = sweep.Problem(
    _init, lambda x, y: sweep.summed_loss(_logits(x, y), y["targets"]), _measure
)
INPUTS = np.random.default_rng(0).integers(0, CLASSES, (16, 7)).astype(np.int32)
TRAIN, TEST = (Rows(x, (x + 1) % CLASSES) for x in (INPUTS[:10], INPUTS[10:]))
RECIPE = RecipeConfig(epochs=6, batch_size=4)


def grid(rates=(1e-2, 1e-1, 3e-2), decays=(0.0, 0.1, 0.5), seeds=(3, 3, 4)) -> Hyper:
    return Hyper(np.array(rates), np.array(decays), np.array(seeds))


def trained(recipe=RECIPE, hyper=None, **options):
    return sweep.train_runs(recipe, PROBLEM, TRAIN, TEST, hyper or grid(), **options)


@pytest.mark.parametrize("method", MAD_METHODS)
def test_a_model_of_every_method_trains_and_is_measured(method):
    config = mad_config(method, TASK, window=4, dim=8, mlp_dim=8, num_heads=1)
    rows = Rows(*np.random.default_rng(0).integers(0, 16, (2, 2, 8)).astype(np.int32))
    options = RecipeConfig(epochs=1, batch_size=2), sweep.mad_problem(TASK, config), rows, rows
    (run,) = sweep.train_runs(*options, grid((1e-3,), (0.0,), (1,)))
    assert run.metrics.loss == run.curve[-1].loss


@functools.cache
def together():
    return trained()


def test_runs_in_groups_are_the_runs_together_and_a_group_is_halved_until_it_fits(monkeypatch):
    sizes, seen = [], []

    def needed(program):
        sizes.append(program.in_avals[0][1].rate.size)
        return 100 * sizes[-1]

    monkeypatch.setattr(sweep.measure, "needed_bytes", needed)
    found = trained(budget_bytes=200, on_evaluation=lambda done, _: seen.append(round(12 * done)))
    assert sizes == [3, 2]
    assert seen == list(range(1, 13))  # two groups of six evaluations
    for ours, theirs in zip(together(), found, strict=True):
        assert_close(ours.to_dict(), theirs.to_dict(), 1e-5)
        assert [point.epoch for point in ours.curve] == [1, 2, 3, 4, 5, 6]
        assert ours.curve[-1].loss < ours.curve[0].loss
        assert ours.metrics.loss == ours.curve[-1].loss
    assert len({run.metrics.loss for run in together()}) == 3


def test_a_step_is_that_of_optax_at_the_rate_of_its_epoch():
    rows = Rows(*(jnp.asarray(x[:4]) for x in TRAIN))
    hyper = Hyper(*map(jnp.asarray, grid((1e-1, 1e38), (0.1, 0.1), (3, 3))))
    init, train = sweep.programs(RECIPE, PROBLEM, jax.make_mesh((1,), ("runs",), (AxisType.Auto,)))
    start = init(hyper)
    params = jax.tree.map(lambda x: x[0], start.train["params"])
    (run, failed_at, _), _ = train(start, hyper, rows, rows, 0, 3)
    assert failed_at.tolist() == [-1, 1]
    assert run["step"].tolist() == [3, 1]  # the other run stays where it failed
    optimizer = optax.inject_hyperparams(optax.adamw)(1.0, b2=0.999, weight_decay=0.1)
    opt_state = optimizer.init(params)
    batch = sweep.take_rows(rows, jnp.arange(4))  # all rows: their order does not matter
    for epoch in range(3):
        opt_state.hyperparams["learning_rate"] = sweep.rate_of_epoch(RECIPE, 1e-1, epoch, 6)
        grads = jax.grad(lambda x: _measure(x, batch)["loss"])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.map(lambda x: x[0], run["params"]), params, 1e-5)


def test_a_run_that_diverges_reports_it_and_the_others_do_not_change_by_a_bit():
    mixed = trained(hyper=grid(rates=(1e-2, 1e38, 3e-2)))
    assert mixed[1].failed_at > 0
    assert mixed[1].metrics is None
    assert len(mixed[1].curve) < 6
    assert mixed[1].curve[-1].training_loss is None
    for run in (0, 2):
        assert mixed[run] == together()[run]
        assert mixed[run].failed_at is None


def test_rows_after_the_last_are_not_scored():
    rows = Rows(*map(jnp.asarray, TRAIN))
    batch = sweep.take_rows(rows, jnp.array([9, 10, 2]))
    assert_same(batch["tokens"][jnp.array([0, 2])], rows.inputs[jnp.array([9, 2])])
    assert (batch["targets"][1] == IGNORE).all()
    assert batch["loss_mask"].tolist() == [[True] * 7, [False] * 7, [True] * 7]


def test_whole_epochs_their_rates_and_ten_evaluations_at_most():
    assert RECIPE.steps_per_epoch(10) == 3
    for recipe, rows, epochs in (
        (RecipeConfig(max_steps=201), 12_800, 3),
        (RecipeConfig(max_steps=400), 256, 200),
        (RecipeConfig(epochs=2, max_steps=10_000), 256, 2),
    ):
        assert recipe.num_epochs(rows) == epochs
    rates = [float(sweep.rate_of_epoch(RECIPE, 1e-3, epoch, 4)) for epoch in (0, 2, 4)]
    assert_close(np.array(rates), np.array([1e-3, (1e-3 + 1e-6) / 2, 1e-6]), 1e-4)
    assert sweep.rate_of_epoch(RECIPE.replace(schedule="constant"), 1e-3, 3, 4) == 1e-3
    for epochs, seen in ((21, [3, 6, 9, 12, 15, 18, 21]), (11, [2, 4, 6, 8, 10, 11])):
        (run,) = trained(RECIPE.replace(epochs=epochs), grid((1e-2,), (0.0,), (3,)))
        assert [point.epoch for point in run.curve] == seen


def losses(runs):
    return " ".join(f"{run.metrics.loss:.5f}" for run in runs)


def test_several_devices_share_the_runs():
    assert printed(__file__, count=2) == f"2 devices: {losses(together())}\n"


if __name__ == "__main__":
    print(f"{jax.device_count()} devices: {losses(trained())}")
