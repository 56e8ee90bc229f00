import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw

from ttcd_jax.memory.delta import chunk_delta, chunk_errors
from ttcd_jax.memory.newton_schulz import newton_schulz


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (12, 12), (3, 2, 5, 9)])
def test_newton_schulz_brings_singular_values_near_one(shape, float64):
    (matrix,) = draw(0, shape)
    u, before, v = np.linalg.svd(np.asarray(matrix), full_matrices=False)
    result = newton_schulz(matrix)
    after = np.linalg.svd(np.asarray(result), compute_uv=False)
    # Singular values far below the largest have not reached 1 after five iterations.
    is_large = before > 0.05 * before.max(-1, keepdims=True)
    assert (np.abs(after[is_large] - 1) < 0.3).all()
    assert np.median(np.abs(after - 1)) < 0.1
    # It changes singular values only, never singular vectors.
    diagonal = np.swapaxes(u, -1, -2) @ np.asarray(result) @ np.swapaxes(v, -1, -2)
    off = diagonal - np.eye(diagonal.shape[-1]) * diagonal
    assert np.abs(off).max() < 1e-12


def test_newton_schulz_of_a_transpose_is_the_transpose(float64):
    (matrix,) = draw(0, (6, 10))
    assert_close(newton_schulz(matrix.T), newton_schulz(matrix).T)


def test_newton_schulz_of_nothing_is_nothing_with_a_finite_gradient():
    matrix = jnp.zeros((2, 4, 6)).at[1].set(draw(0, (4, 6))[0])
    value, gradient = jax.value_and_grad(lambda m: newton_schulz(m).sum())(matrix)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not np.asarray(newton_schulz(matrix)[0]).any()


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("has_rest", [False, True], ids=["bare", "rate and projection"])
def test_errors_follow_their_formula(normalizes, has_rest, float64):
    target, student, w_base, proj = draw(0, (2, 3, 4, 6), (2, 3, 4, 6), (6, 5), (5, 5))
    beta = jax.nn.sigmoid(draw(1, (2, 3, 4))[0])
    ours = chunk_errors(
        target - student,
        w_base,
        beta=beta if has_rest else None,
        proj=proj if has_rest else None,
        normalizes=normalizes,
        zero_slope=1.0,
    )
    error = np.asarray((target - student) @ w_base)
    if normalizes:
        error = error / np.linalg.norm(error, axis=-1, keepdims=True)
    if has_rest:
        error = (error * np.asarray(beta)[..., None]) @ np.asarray(proj)
    assert_close(ours, error)


def test_delta_is_the_sum_of_outer_products_of_key_and_error(float64):
    errors, keys = draw(0, (2, 3, 4, 5), (2, 3, 4, 6))
    delta = chunk_delta(errors, keys, orthogonalizes=False, dtype=float)
    expected = np.zeros((2, 3, 6, 5))
    for b, c, token in np.ndindex(2, 3, 4):
        expected[b, c] += np.outer(keys[b, c, token], errors[b, c, token])
    assert_close(delta, expected)
    assert_close(chunk_delta(errors, keys, orthogonalizes=True, dtype=float), newton_schulz(delta))


def test_delta_of_narrow_operands_is_summed_in_the_state_dtype():
    errors, keys = draw(0, (1, 2, 64, 4), (1, 2, 64, 4), dtype=jnp.bfloat16)
    delta = chunk_delta(errors, keys, orthogonalizes=False, dtype=jnp.float32)
    assert delta.dtype == jnp.float32
    wide = chunk_delta(
        *(x.astype(jnp.float32) for x in (errors, keys)), orthogonalizes=False, dtype=jnp.float32
    )
    assert_close(delta, wide)
