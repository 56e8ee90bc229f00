"""Runs that share a program: each is what it would be alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checks import assert_close, assert_same
from devices import printed
from jax.sharding import AxisType

from experiments.studies.mad import sweep
from experiments.studies.mad.models import Problem, batch_scores, summed_loss
from experiments.studies.mad.records import RecipeConfig
from experiments.studies.mad.sweep import Hyper, rate_of_epoch, take_rows
from experiments.studies.mad.tasks import IGNORE, Rows

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
PROBLEM = Problem(_init, lambda x, y: summed_loss(_logits(x, y), y["targets"]), _measure)


INPUTS = np.random.default_rng(0).integers(0, CLASSES, (16, 7)).astype(np.int32)
TRAIN, TEST = (Rows(x, (x + 1) % CLASSES) for x in (INPUTS[:10], INPUTS[10:]))
RECIPE = RecipeConfig(epochs=6, batch_size=4)


def grid(rates=(1e-2, 1e-1, 3e-2), decays=(0.0, 0.1, 0.5), seeds=(3, 3, 4)) -> Hyper:
    return Hyper(np.array(rates), np.array(decays), np.array(seeds))


def trained(recipe=RECIPE, hyper=None, **options):
    return sweep.train_runs(recipe, PROBLEM, TRAIN, TEST, hyper or grid(), **options)


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
    batch = take_rows(rows, jnp.arange(4))  # all rows: their order does not matter
    for epoch in range(3):
        opt_state.hyperparams["learning_rate"] = rate_of_epoch(RECIPE, 1e-1, epoch, 6)
        grads = jax.grad(lambda x: _measure(x, batch)["loss"])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.map(lambda x: x[0], run["params"]), params, 1e-5)


def test_the_rate_falls_from_epoch_to_epoch_or_stays():
    rates = [float(rate_of_epoch(RECIPE, 1e-3, epoch, 4)) for epoch in range(5)]
    assert_close(np.array(rates[::2]), np.array([1e-3, (1e-3 + 1e-6) / 2, 1e-6]), 1e-4)
    constant = RECIPE.replace(schedule="constant")
    assert rate_of_epoch(constant, 1e-3, 3, 4) == 1e-3


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
    batch = take_rows(rows, jnp.array([9, 10, 2]))
    assert_same(batch["tokens"][jnp.array([0, 2])], rows.inputs[jnp.array([9, 2])])
    assert (batch["targets"][1] == IGNORE).all()
    assert batch["loss_mask"].tolist() == [[True] * 7, [False] * 7, [True] * 7]
    assert RECIPE.steps_per_epoch(10) == 3


def test_max_steps_keeps_whole_epochs():
    assert RecipeConfig(max_steps=201).num_epochs(12_800) == 3
    assert RecipeConfig(max_steps=400).num_epochs(256) == 200
    assert RecipeConfig(epochs=2, max_steps=10_000).num_epochs(256) == 2


def test_a_run_has_ten_evaluations_at_most_and_one_at_its_end():
    for epochs, seen in ((21, [3, 6, 9, 12, 15, 18, 21]), (11, [2, 4, 6, 8, 10, 11])):
        (run,) = trained(RECIPE.replace(epochs=epochs), grid((1e-2,), (0.0,), (3,)))
        assert [point.epoch for point in run.curve] == seen


def summary(runs):
    return [f"{run.metrics.loss:.5f}" for run in runs]


def test_several_devices_share_the_runs():
    assert printed(__file__, count=2).splitlines() == ["2 devices", *summary(together())]


if __name__ == "__main__":
    print(jax.device_count(), "devices")
    print(*summary(trained()), sep="\n")
