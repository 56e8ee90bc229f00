"""A checkpoint of Hugging Face that gets a memory: its first logits are those of the base."""

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from checks import distance
from hugging_face.make import TOKENS
from hugging_face.own import MODELS, write

from experiments import cli
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.build import Program
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import load_params
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.run.start import started_state
from ttcd_jax.train.state import with_params

# Llama with scaled positions, Mistral, Qwen2 with its biases, Qwen3 with norms and YaRN.
BASES = {"full": "ipttcd", "swa": "ipttt", "swa_bias": "ipttcd", "swa_norm": "ipttt"}
BASES |= {"yarn": "ipttcd"}


def run_config(model, run_dir):
    return small_models.run_config(model, start_from=str(run_dir), steps=1, batch_size=1)


def logits(model, params):
    return jax.jit(lambda x: with_params(model, x)(jnp.asarray(TOKENS)))(params)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    mesh = run_mesh(run_config(MODELS["full"], "base"))
    with jax.set_mesh(mesh):
        yield mesh


def _recipe(gin, *params):
    recipe = load_config(RunConfig, gin, params, config_dir=cli.CONFIG_DIR)
    return {"memory": recipe.model.settings.replace(chunk_size=8), "student_window": 5}


@pytest.mark.parametrize("name", BASES)
def test_a_grown_model_starts_at_its_base(name, mesh, tmp_path):
    """With the settings of the recipes of continued training (tests/run/test_start.py has other
    layers); on a CPU bit for bit, where rows are whole chunks (XLA rounds products of other numbers
    of rows otherwise)."""
    run_dir, checkpoint = tmp_path / "run", write(name, tmp_path / "checkpoint")
    line = ("convert", "import", "--format=huggingface", checkpoint, run_dir)
    commands.output(*line, "--tokenizer=none")
    found, config, _ = load_params(run_dir)
    method, expected = BASES[name], logits(config, found)
    model = config.replace(
        method=method, fast_layers=(0, 2), **_recipe(f"cpt/{method}_qwen3_0_6b.gin")
    )
    params = started_state(Program(run_config(model, run_dir), mesh))[-1]["params"]
    np.testing.assert_array_equal(logits(model, params), expected)
    moved = jax.tree.map(lambda x: x + 0.1, params)  # the memory is there
    off = model.replace(memory=model.memory.switched_off(40))
    assert not np.array_equal(logits(model, moved), logits(off, moved))
    if name == "full":  # the delta rule computes its chunks in turn
        model = model.replace(**_recipe("continued/ipttcd_corrected.gin", "BOOKS='books'"))
        params = started_state(Program(run_config(model, run_dir), mesh))[-1]["params"]
        assert distance(logits(model, params), expected) < 1e-5
