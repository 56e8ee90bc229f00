import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ttcd_jax.axes import LOGICAL_AXES, param
from ttcd_jax.errors import UserError
from ttcd_jax.sharding import rules
from ttcd_jax.sharding.mesh import AXES


def _mesh(*sizes, types=(AxisType.Auto,) * 4):
    return AbstractMesh(sizes, AXES, axis_types=types)


def test_the_table_knows_every_logical_axis_and_no_other():
    assert rules.RULES.keys() == {*LOGICAL_AXES, "batch", "length"}


def test_names_become_mesh_axes():
    mesh = _mesh(2, 2, 2, 2)
    assert rules.spec(("vocab", "embed"), mesh) == PartitionSpec("tensor", ("fsdp", "seq"))
    names = ("batch", "length", None)
    assert rules.spec(names, mesh) == PartitionSpec(("data", "fsdp"), "seq", None)
    with pytest.raises(KeyError, match="wocab"):
        rules.spec(("wocab",), mesh)


def test_axes_that_a_surrounding_shard_map_cut_are_left_alone():
    types = (AxisType.Manual, AxisType.Auto, AxisType.Manual, AxisType.Auto)
    assert rules.spec(("batch", "length"), _mesh(2, 2, 2, 2, types=types)) == PartitionSpec(
        "fsdp", None
    )


def test_a_dimension_that_does_not_divide_is_refused_with_both_numbers():
    arrays = {"gate": jax.ShapeDtypeStruct((16, 30), jnp.float32)}
    with pytest.raises(UserError, match=r"gate \(16, 30\): its axis 'mlp' of 30 .* 4 devices"):
        rules.shardings(_mesh(1, 1, 1, 4), {"gate": ("embed", "mlp")}, arrays)


def test_without_a_mesh_nothing_is_moved():
    x = jnp.ones((2, 3))
    assert rules.constrain(x, "batch", None) is x
    assert rules.gathered(param(x, ("embed", "mlp")), jnp.bfloat16) is x
    assert not rules.is_distributed()
