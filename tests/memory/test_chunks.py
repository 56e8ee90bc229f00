"""What a chunk writes, and what is measured of it. Chunks and masks are those of the definition of
a layer, tests/methods/test_in_place.py."""

import jax
import jax.numpy as jnp
import numpy as np
from checks import draw

from ttcd_jax.memory.distillation import Distillation, distances, summary
from ttcd_jax.nn.linear import newton_schulz


def test_newton_schulz_of_nothing_is_nothing_with_a_finite_gradient():
    matrix = jnp.zeros((2, 4, 6)).at[1].set(draw(0, (4, 6))[0])
    value, gradient = jax.value_and_grad(lambda m: newton_schulz(m).sum())(matrix)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not np.asarray(newton_schulz(matrix)[0]).any()


def test_a_summary_is_over_the_counted_tokens():
    found = Distillation(
        teacher=jnp.array([[[2.0, 4.0, 0.0, 1.0]]]),
        off=jnp.array([[[1.0, 1.0, 1.0, 9.0]]]),
        on=jnp.array([[[1.0, 0.5, 2.0, 0.0]]]),
        both=jnp.array([[[0.0, 0.0, 7.0, 9.0]]]),
        change=jnp.array([[[0.0, 2.0, 5.0, 9.0]]]),
        is_moved=jnp.array([[[False, True, True, True]]]),
        cosine=jnp.array([[[1.0, 0.5, -1.0, 1.0]]]),
        windows=jnp.array([[[0.0, 1.0, 2.0, 9.0]]]),
    )
    measures = summary(found, jnp.array([[True, True, True, False]]))
    assert jax.tree.map(lambda x: round(float(x[0]), 6), measures) == {
        "gap": (0.5 + 0.25) / 2,
        "gap_on": (0.5 + 0.125) / 2,
        "gap_both": 0.0,
        "cosine": -0.25,
        "closer": 0.5,
        "change": 0.25,
        "loss": 0.5,
        "loss_on": round((1 + 0.25 + 4) / 6, 6),
        "window_share": round((1 + 4) / (4 + 25), 6),
    }
    nothing = summary(found, jnp.zeros((1, 4), bool))
    assert all(np.isnan(x).all() for x in nothing.values())


def test_a_token_with_nothing_to_read_is_not_moved_whatever_rounding_does():
    y_teacher, y_student, y = draw(1, *[(1, 2, 3, 6)] * 3, dtype=jnp.float32)
    ids = jnp.asarray([[[1, 1, 2], [2, 2, 3]]])
    args = y_teacher, y_student, y, y, y
    moved = [distances(*args, windows=y, segments=x).is_moved.tolist() for x in (None, ids)]
    assert moved == [[[[False] * 3, [True] * 3]], [[[False] * 3, [True, True, False]]]]
