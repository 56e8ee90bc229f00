"""Sizes, pieces and phases that nobody chose: a row read and decoded in any way gives what one pass
gives."""

import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, randomize
from flax import nnx
from small_models import config_of

from ttcd_jax.inference.advance import head_logits
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import stream
from ttcd_jax.inference.state import start_state
from ttcd_jax.methods import METHODS
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("float64")

BOUND = 1e-10  # sums in another order


def _sizes(method: str, rng: np.random.Generator) -> TransformerConfig:
    """The small model with window, chunk and taps from 1 up, in any relation."""
    config = config_of(method, num_layers=1)
    chunk, taps, window = (int(rng.integers(1, most)) for most in (17, 7, 14))
    changes = {"chunk_size": chunk, "num_taps": taps}
    own = {name: value for name, value in changes.items() if hasattr(config.memory, name)}
    return config.replace(
        window=None if method == "full" else window,
        student_window=int(rng.integers(1, window + 1)),
        memory=None if config.memory is None else config.memory.replace(**own),
    )


SWITCHES = [
    {"renorm_chunks": 2, "orthogonalizes_updates": True},
    {"output": "teacher_raw", "is_conv_causal": False},
    {"has_teacher_conv": False, "has_student_conv": False, "has_token_rate": False},
    {"folds_state": True, "resets_at_document": False},
    {"output": "student", "normalizes_errors": True, "has_proj": False},
    {"half_lives": (5.0, 80.0), "decay": "gated"},
    {"corrects_errors": True, "half_lives": (9.0,)},
]


@pytest.mark.parametrize(
    ("method", "switches"),
    [*((method, {}) for method in METHODS), *(("ipttcd", switches) for switches in SWITCHES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_any_way_to_read_rows_gives_what_one_pass_gives(method, switches):
    rng = np.random.default_rng(list(METHODS).index(method))
    num_rows, length = (int(rng.integers(*bounds)) for bounds in ((2, 5), (30, 60)))
    rows, tokens = np.arange(num_rows), rng.integers(0, 11, (num_rows, length))
    config = _sizes(method, rng)
    if switches:
        config = config.replace(memory=config.memory.replace(**{"form": "auto"} | switches))
    trained = randomize(Transformer, config)
    want = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(trained, jnp.asarray(tokens)))
    model = inference_model(trained)
    state, done = start_state(model, num_rows, max_length=length), np.zeros(num_rows, int)
    for _ in range(3):
        lengths = np.minimum(length - done, rng.integers(0, length // 2, num_rows))
        rest = np.stack([np.roll(row, -n) for row, n in zip(tokens, done, strict=True)])
        piece_size = int(rng.integers(1, 40))
        for counts, hidden, after in stream(model, state, rest, lengths, piece_size=piece_size):
            state, logits = after, head_logits(model, hidden)
            for row, (start, count) in enumerate(zip(done, counts, strict=True)):
                assert_close(logits[row, :count], want[row, start : start + count], BOUND)
            done = done + counts
        for _ in range(int(rng.integers(1, 8))):
            is_active = (done < length) & (rng.random(num_rows) < 0.8)
            now = rows, np.minimum(done, length - 1)
            logits, state = decode(model, state, tokens[now], is_active)
            assert_close(np.asarray(logits)[is_active], want[now][is_active], BOUND)
            done = done + is_active
    assert state.position.tolist() == done.tolist()
