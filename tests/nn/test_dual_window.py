import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, draw, randomize
from flax import nnx
from small_models import small_attention

from ttcd_jax.errors import UserError
from ttcd_jax.nn.attention import Attention, DualWindowAttention, DualWindowConfig
from ttcd_jax.nn.row import Row

T, D = 10, 6
IDS = jnp.asarray(np.repeat([[5, 2, 9]], [4, 1, 5], axis=1))


def _config(teacher, student) -> DualWindowConfig:
    return DualWindowConfig(attention=small_attention(window=teacher), student_window=student)


def _module(teacher=5, student=2):
    return randomize(DualWindowAttention, _config(teacher, student))


@pytest.mark.parametrize("teacher", [5, None])
def test_outputs_are_those_of_two_attentions_with_these_weights(teacher, float64):
    """Their windows and documents are tested in test_attention.py."""
    dual = _module(teacher)
    (h,) = draw(1, (*TWO_ROWS.shape, D))
    ids = jnp.asarray(TWO_ROWS)

    def single(window):
        config = dual.config.replace(window=window)
        attention = nnx.eval_shape(lambda: Attention(config, rngs=nnx.Rngs(0)))
        nnx.update(attention, nnx.state(dual, nnx.Param))
        return jax.jit(attention)(h, None, ids)

    ours = jax.jit(dual)(h, None, ids)
    assert_close(tuple(ours), (single(teacher), single(2)))


def test_the_first_tokens_of_a_document_have_no_error_to_learn_from(float64):
    (h,) = draw(1, (1, T, D))
    teacher, student = jax.jit(_module())(h, Row.of(h).positions, IDS)
    equal = np.asarray(jnp.isclose(teacher, student, rtol=1e-12, atol=1e-12).all(-1)[0])
    assert equal.tolist() == [True, True, False, False, True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        (4, 5, "student_window 5 is wider than the teacher's window 4"),
        (4, 0, "student_window 0 must be at least 1"),
    ],
)
def test_windows_that_do_not_fit_are_refused(teacher, student, message):
    with pytest.raises(UserError, match=message):
        _config(teacher, student)
