"""Every method, also one from outside the package, computes on a mesh what it computes on one
device."""

import itertools

import jax
import pytest
from devices import elsewhere
from small_models import run_config

from ttcd_jax.data.sources import BatchesConfig
from ttcd_jax.methods import METHODS
from ttcd_jax.run.build import Program
from ttcd_jax.train.optimizer import MuonSettings, OptimizerConfig, ScheduleConfig

# data x fsdp x seq x tensor. The window reaches over the shards of three devices.
EVERYWHERE = "1x1x4x2"
MESHES = {"ipttcd": ["1x1x8x1", EVERYWHERE], "ipttcd_stream": ["2x2x2x1", EVERYWHERE]}
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


def trained(mesh_name, parts, **changes):
    """(state after three steps, their losses) of a run."""
    from tests.sharding.equal_on_devices import B, T, batch, config, mesh_of

    muon = MuonSettings(orthogonalization="float64")
    optimizer = {"kind": "muon", "settings": muon, "rates": RATES}
    optimizer = OptimizerConfig(**optimizer, schedule=ScheduleConfig(peak=1e-2, warmup=1))
    model = config("ipttcd", init_std=0.2, num_layers=2, fast_layers=(0, 1), **changes)
    memory = model.settings.replace(proj_init="normal", teacher_conv_init="normal")
    fields = {"optimizer": optimizer, "data": BatchesConfig(seq_len=T), "batch_size": B}
    fields |= {"steps": 10, "memory_warmup": 2, "accumulation_steps": parts, "loss_rows": 16}
    program = Program(run_config(model.replace(memory=memory), **fields), mesh_of(mesh_name))
    losses = []
    with jax.set_mesh(program.mesh):
        state, step, row = program.fresh_state(), program.step().compile(), program.placed(batch())
        for _ in range(3):
            state, metrics = step(state, row)
            losses.append(metrics["loss"])
    return jax.device_get((state, losses))


def moved():
    """The largest relative difference of the steps on eight devices."""
    from tests.sharding.equal_on_devices import worst_distance

    pairs = [("1x2x2x2", {}), ("2x2x2x1", {"has_tied_head": False})]
    return max(worst_distance(trained(x, 2, **y), trained("1x1x1x1", 1, **y)) for x, y in pairs)


def test_steps_of_muon_in_parts_on_a_mesh_equal_whole_ones_on_a_device():
    """Three steps on rows of one document, with parameters that are frozen or slow and a memory
    that comes slowly."""
    assert elsewhere(moved, is_wide=True) < 1e-10
