"""A checkpoint of Hugging Face that gets a memory: its first logits are those of the base."""

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import distance, refused
from hugging_face.make import TOKENS
from hugging_face.own import MODELS, write

from experiments import cli
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.errors import CheckpointError
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.build import Program
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import load_params
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.run.start import plan_start, started_state
from ttcd_jax.train.optimizer import OptimizerConfig
from ttcd_jax.train.state import with_params

# Llama with scaled positions, Mistral, Qwen2 with its biases, Qwen3 with norms and YaRN.
BASES = ("full", "swa", "swa_bias", "swa_norm", "yarn")


def run_config(model, run_dir):
    data = RecallConfig(num_slots=8, num_keys=4, num_values=4)
    fields = {"data": data, "optimizer": OptimizerConfig(), "steps": 1, "batch_size": 1}
    return RunConfig(model=model, start_from=str(run_dir), **fields)


def logits(model, params):
    return jax.jit(lambda x: with_params(model, x)(jnp.asarray(TOKENS)))(params)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = run_mesh(run_config(MODELS["full"], "base"))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="module")
def base(mesh, tmp_path_factory):
    """The run directory and logits of an imported base: `base(name)`."""
    found = {}

    def base(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            run_dir, checkpoint = folder / "run", write(name, folder / "checkpoint")
            line = ("convert", "import", "--format=huggingface", checkpoint, run_dir)
            commands.output(*line, "--tokenizer=none")
            params, config, _ = load_params(run_dir)
            found[name] = run_dir, config, logits(config, params)
        return found[name]

    return base


def _recipe(gin, *params):
    recipe = load_config(RunConfig, gin, params, config_dir=cli.CONFIG_DIR)
    return {"memory": recipe.model.settings.replace(chunk_size=8), "student_window": 5}


@pytest.mark.parametrize("method", ["ipttcd", "ipttt"])
@pytest.mark.parametrize("name", BASES)
def test_a_grown_model_starts_at_its_base(name, method, base, mesh):
    """With the settings of the recipes of continued training (tests/run/test_start.py has other
    layers); on a CPU bit for bit, where rows are whole chunks (XLA rounds products of other numbers
    of rows otherwise)."""
    run_dir, config, expected = base(name)
    fields = _recipe(f"cpt/{method}_qwen3_0_6b.gin")
    model = config.replace(method=method, fast_layers=(0, 2), **fields)
    params = started_state(Program(run_config(model, run_dir), mesh))[-1]["params"]
    np.testing.assert_array_equal(logits(model, params), expected)
    moved = jax.tree.map(lambda x: x + 0.1, params)  # the memory is there
    off = model.replace(memory=model.memory.switched_off(40))
    assert not np.array_equal(logits(model, moved), logits(off, moved))
    if method == "ipttcd":  # the delta rule computes its chunks in turn
        model = model.replace(**_recipe("continued/ipttcd_corrected.gin", "BOOKS='books'"))
        params = started_state(Program(run_config(model, run_dir), mesh))[-1]["params"]
        assert distance(logits(model, params), expected) < 1e-5


def test_a_base_of_another_shape_is_refused(base):
    run_dir, _, _ = base("full")
    other = run_config(MODELS["full"].replace(mlp_dim=48), run_dir)
    refused("not fit|start_from", plan_start, other, error=CheckpointError)
