from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, Mesh

from ttcd_jax.errors import UserError
from ttcd_jax.run import layout
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import AXES, MeshConfig

CONFIG_DIR = Path(__file__).parents[2] / "experiments" / "configs"
RECIPES = sorted(
    str(path.relative_to(CONFIG_DIR))
    for path in (*CONFIG_DIR.glob("*_[37][46]0m.gin"), *CONFIG_DIR.glob("ablation/*.gin"))
)


def _loaded(name: str, **changes) -> RunConfig:
    return load_config(RunConfig, name, [], config_dir=CONFIG_DIR).replace(**changes)


def _laid_out(config: RunConfig, num_devices: int) -> tuple[dict[str, int], int]:
    sizes = layout.mesh_config(config, num_devices).sizes(num_devices)
    mesh = AbstractMesh(tuple(sizes.values()), AXES)
    return sizes, layout.num_parts(config, mesh)


@pytest.mark.parametrize("num_devices", [1, 2, 8, 64, 128])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_divides_among_devices_a_row_of_32768_tokens_at_a_time(name, num_devices):
    config = _loaded(name)
    sizes, parts = _laid_out(config, num_devices)
    by_rows = min(num_devices, config.batch_size)
    assert sizes == {"data": 1, "fsdp": by_rows, "seq": num_devices // by_rows, "tensor": 1}
    assert parts == config.batch_size // by_rows


def test_short_rows_are_computed_together():
    config = _loaded("quickstart.gin", batch_size=256)
    length = config.data.seq_len
    assert _laid_out(config, 1)[1] == 256 * length // layout.PART_TOKENS
    assert _laid_out(config, 8)[1] == 1


def test_on_a_cpu_parts_are_small_and_layers_unrolled():
    config = _loaded("quickstart.gin", batch_size=256)
    mesh, length = layout.run_mesh(config, jax.devices("cpu")[:1]), config.data.seq_len

    def chosen(config: RunConfig, mesh: Mesh | AbstractMesh) -> tuple:
        config = layout.laid_out(config, mesh)
        return config.accumulation_steps, config.model.remat, config.model.scans_layers

    assert chosen(config, mesh) == (256 * length // layout.CPU_PART_TOKENS, "none", False)
    assert chosen(config, mesh.abstract_mesh) == (256 * length // layout.PART_TOKENS, "dots", True)
    for rows, parts in ((7, 7), (9, 3), (11, 11), (16, 8)):
        assert chosen(config.replace(batch_size=rows), mesh)[0] == parts
    short = config.replace(batch_size=17, data=config.data.replace(seq_len=64))
    assert chosen(short, mesh)[0] == 1
    large = config.replace(model=config.model.replace(num_layers=layout.CPU_LAYERS + 1))
    assert chosen(large.replace(accumulation_steps=1), mesh) == (1, "dots", True)
    bound = config.model.replace(remat="block", scans_layers=True)
    assert chosen(config.replace(model=bound), mesh)[1:] == ("block", True)


def test_bound_fields_stay():
    config = _loaded("ipttcd_340m.gin", mesh=MeshConfig(seq=2), accumulation_steps=16)
    assert _laid_out(config, 8) == ({"data": 1, "fsdp": 4, "seq": 2, "tensor": 1}, 16)


def test_rows_that_do_not_divide_among_a_bound_mesh_are_refused():
    config = _loaded("ipttcd_340m.gin", mesh=MeshConfig(), accumulation_steps=16)
    sizes = layout.mesh_config(config, 8).sizes(8)
    with pytest.raises(UserError, match="parts of 1 rows, which do not divide among the 8 devices"):
        layout.laid_out(config, AbstractMesh(tuple(sizes.values()), AXES))


def test_devices_that_no_mesh_divides_the_batch_among_are_refused():
    config = _loaded("ipttcd_340m.gin", batch_size=32)
    with pytest.raises(UserError, match="among 24 devices: use 16 of them, or set"):
        layout.mesh_config(config, 24)
