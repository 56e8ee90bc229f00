import runpy
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "embed_in_flax.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(PATH), run_name="embed_in_flax")


@pytest.mark.parametrize("train", ["train_nnx", "train_linen"])
def test_the_block_learns_inside_a_foreign_model(example, train):
    losses = example[train]()
    assert losses[-1] < 0.5 * losses[0]
