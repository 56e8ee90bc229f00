"""Rows on several devices are read and continued as on one."""

from pathlib import Path

import jax
from checks import refused
from devices import run_on_devices
from flax import nnx
from jax.sharding import AxisType
from small_models import config_of

from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.state import start_state
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.sharding.mesh import AXES

SCRIPT = Path(__file__).parent / "reading_on_devices.py"


def test_a_mesh_changes_neither_logits_nor_states():
    methods = ("ipttcd", "deltanet_hybrid")
    found = run_on_devices(SCRIPT, ",".join(methods), "2x2x1x2")
    assert found.keys() == {*methods}
    for method, result in found.items():
        assert result["worst"] < 1e-10, method
    # Rows on four groups of devices, key heads and delta_w on two of each group.
    assert found["ipttcd"]["share"] < 1 / 4


def test_a_mesh_that_cuts_rows_is_refused(float64):
    model = inference_model(Transformer(config_of("swa"), rngs=nnx.Rngs(0)))
    mesh = jax.sharding.AbstractMesh((1, 1, 2, 1), AXES, (AxisType.Auto,) * 4)
    with jax.sharding.use_abstract_mesh(mesh):
        refused("seq 2 must be 1", start_state, model, 2)
