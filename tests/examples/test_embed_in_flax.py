import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "embed_in_flax.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("embed_in_flax", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("train", ["train_nnx", "train_linen"])
def test_the_block_learns_inside_a_foreign_model(example, train):
    losses = getattr(example, train)()
    assert losses[-1] < 0.5 * losses[0]
