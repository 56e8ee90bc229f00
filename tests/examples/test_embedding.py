"""The examples of docs/embedding.md, as their readers run them, and what they may get wrong."""

import json
import runpy
from pathlib import Path

import commands
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(monkeypatch):
    """Runs an example: its variables."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", ["block_in_nnx", "block_in_linen", "fast_mlp_on_your_attention"])
def test_a_foreign_model_learns_with_our_layer(run, name):
    losses = run(name)["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_added_parameters_learn_and_the_base_stays(run, capsys):
    found = run("train_added_parameters")
    assert "at first: True\nthe base is unchanged: True\n" in capsys.readouterr().out
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    added = {path[-1] for path in found["paths"](found["model"]) - found["old"]}
    assert added == {"proj", "rate", "teacher_conv", "student_conv"}


def test_an_own_loop_decodes_as_one_pass(run):
    found = run("your_decode_loop")
    np.testing.assert_array_equal(found["found"], found["whole"])
    assert len({*np.asarray(found["found"]).ravel().tolist()}) > 4, "a constant would pass"


def test_kernels_alone(run):
    found = run("kernels_alone")
    whole, decoded = found["both"](*found["operands"]()), found["last_token"](*found["operands"]())
    for one, other in zip(whole, decoded, strict=True):
        np.testing.assert_allclose(one[:, -1], other, atol=1e-5)
    assert all(float(jnp.abs(x).max()) > 0 for x in found["gradients"])


@pytest.mark.parametrize("name", NAMES)
def test_an_example_fits_a_page(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


EXPECTED = {
    "width": "float32 [2, 12, 16]: the layer needs float [B, T, 32]",
    "tokens": "int32 [2, 12]: the layer needs float [B, T, 32]",
    "float positions": "positions are float32 [2, 12]: the row needs int [2, 12]",
    "short ids": "segment_ids are int32 [2, 7]: the row needs int [2, 12]",
    "attention ids": "segment_ids are int32 [1, 12]: the row needs int [2, 12]",
    "student length": "x [2, 12, 32] and t [2, 5, 32] must have the same shape",
    "student width": "t is float32 [2, 12, 16]: the layer needs float [B, T, 32]",
    "mlp ids": "segment_ids are int32 [2, 7]: the row needs int [2, 12]",
    "long piece": "a piece of 6 tokens does not fit the 4 that the open chunk of 8 has room for",
    "open piece": "a piece of 12 tokens does not fit the 8 that the open chunk of 8 has room for",
    "uneven rows": "a piece of 4 tokens needs one start for all rows",
    "other rows": "h has 1 rows, and the state is one of 2 rows",
    "list": "h is a list, no array: the layer needs float [B, T, 32]",
    "no rngs": "IPTTCDBlock needs rngs=nnx.Rngs(seed), got 0",
    "other config": "IPTTCDMLP is built from a IPTTCDConfig, not from a IPTTCDBlockConfig",
    "negative start": "start -1 is not in 0 .. inf",
    "negative starts": "start [0, -2] is not in 0 .. inf",
    "long lengths": "lengths [4, 5] is not in 0 .. 4",
    "other lengths": "lengths are int32 [1]: the piece needs int [2]",
    "other chunk": "the piece was made for chunk_size 4 and the layer has 8",
    "other window": "the piece was made for window 3 and the layer has 16",
    "large token": "token 8 at position 0, 0 is outside the vocabulary of 8 tokens",
    "negative token": "token -1 at position 0, 0 is outside the vocabulary of 8 tokens",
    "float tokens": "tokens are float32 [2, 4]: the model needs int [B, T]",
    "one row": "tokens are int32 [4]: the model needs int [B, T]",
    "token list": "tokens are a list, no array: the model needs int [B, T]",
    "float token of a prompt": "token ids are float32: they must be integers",
    "float token to decode": "tokens are float32 [2]: the state needs int [2]",
    "nothing to predict": "tokens [2, 1] have no next token",
    "nan": "MemoryConfig.eta nan must be 0 or more, finite",
    "infinity": "MemoryConfig.zero_slope inf must be 0 or more, finite",
}


def test_wrong_inputs_are_refused_with_both_numbers():
    found = json.loads(commands.output(FOLDER / "wrong_inputs.py"))
    assert found.keys() == EXPECTED.keys()
    for name, message in EXPECTED.items():
        assert message in found[name], (name, found[name])
