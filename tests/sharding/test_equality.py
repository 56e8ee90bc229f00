"""Every method, also one from outside the package, computes on a mesh what it computes on one
device."""

import itertools

import jax
import pytest
from devices import elsewhere

from ttcd_jax.methods import METHODS
from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.train.groups import preparation, rate_factors
from ttcd_jax.train.optimizer import (
    MuonSettings,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    learning_rate,
)
from ttcd_jax.train.state import init_params, logical_axes, state_of, state_shardings
from ttcd_jax.train.step import make_train_step

# data x fsdp x seq x tensor. The window reaches over the shards of three devices.
EVERYWHERE = "1x1x4x2"
MESHES = {"ipttcd": ["1x8x1x1", "1x1x8x1", EVERYWHERE]}
# Float64; what the memory holds is measured in float32.
TOLERANCE = 1e-6


def differences(meshes):
    """By method and mesh the largest relative difference from one device."""
    from tests.sharding.equal_on_devices import config, mesh_of, results, worst_distance

    found = {}
    for method, names in meshes.items():
        expected = results(config(method))
        ours = {name: results(config(method), mesh_of(name)) for name in names}
        found[method] = {name: worst_distance(x, expected) for name, x in ours.items()}
    return found


@pytest.mark.parametrize(
    "methods", list(itertools.batched([*METHODS, "corrected", "hebbian"], 4)), ids="-".join
)
def test_a_mesh_changes_neither_loss_nor_gradients(methods):
    """Several methods to a process, which takes long to start."""
    meshes = {method: MESHES.get(method, [EVERYWHERE]) for method in methods}
    found = elsewhere(differences, meshes, is_wide=True)
    assert {method: list(worst) for method, worst in found.items()} == meshes
    for method, worst in found.items():
        assert {mesh: value for mesh, value in worst.items() if not value < TOLERANCE} == {}, method


RATES = (("layers/0/mixer/*", 0.0), ("final_norm", 0.0), ("layers/*/mlp/down", 0.5))


def trained(mesh_name, parts):
    """(state after three steps, their losses, programs compiled)."""
    from tests.sharding.equal_on_devices import B, T, batch, config, mesh_of

    model = config("ipttcd", init_std=0.2, num_layers=2, fast_layers=(0, 1))
    memory = model.settings.replace(proj_init="normal", teacher_conv_init="normal")
    model, schedule = model.replace(memory=memory), ScheduleConfig(peak=1e-2, warmup=1, steps=10)
    muon = MuonSettings(orthogonalization="float64")
    muon = OptimizerConfig(kind="muon", settings=muon, schedule=schedule)
    rate, mesh = learning_rate(schedule), mesh_of(mesh_name)
    factors = rate_factors(model, RATES)
    optimizer = build_optimizer(muon, rate, logical_axes(model), factors=factors)
    places = state_shardings(model, optimizer, mesh)
    fields = batch()
    del fields["segment_ids"]
    row = Placement(mesh, batch_size=B, length=T)(fields)
    options = {"accumulation_steps": parts, "prepare": preparation(model, factors, memory_warmup=2)}
    step = make_train_step(model, optimizer, rate, loss_rows=16, **options)
    run = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(mesh)))
    losses = []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: state_of(optimizer, init_params(model, 0)), out_shardings=places)()
        for _ in range(3):
            state, metrics = run(state, row)
            losses.append(metrics["loss"])
    return jax.device_get((state, losses)), run._cache_size()


def moved():
    """(the largest relative difference of the steps on eight devices, programs compiled)."""
    from tests.sharding.equal_on_devices import worst_distance

    (found, num_programs), (expected, _) = trained("1x2x2x2", 2), trained("1x1x1x1", 1)
    return worst_distance(found, expected), num_programs


def test_steps_of_muon_in_parts_on_a_mesh_equal_whole_ones_on_a_device():
    """Three steps on rows of one document, with parameters that are frozen or slow and a memory
    that comes slowly."""
    worst, num_programs = elsewhere(moved, is_wide=True)
    assert worst < 1e-10
    assert num_programs == 1
