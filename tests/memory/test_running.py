from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw

from ttcd_jax.memory.chunks import chunk_segments
from ttcd_jax.memory.prefix import PrefixOptions, Writes
from ttcd_jax.memory.running import CorrectingMemory, IdealMemory, RenormalizedMemory

B, L, F, D = 2, 3, 6, 5


def _operands(num_chunks, batch=B):
    """(z, keys, errors, w_base)."""
    features, errors = (batch, num_chunks, L, F), (batch, num_chunks, L, D)
    return draw(0, features, features, errors, (F, D))


def _options(**changes) -> PrefixOptions:
    return PrefixOptions(**({"eta": 0.3, "state_dtype": jnp.float64} | changes))


def _row(memory, reads, writes, ids, length):
    """(y, the state after the row), of `length` tokens with these documents."""
    segments = None if ids is None else chunk_segments(ids, L)
    return memory.row(memory.prepared(reads, writes, segments, length=length))


def _renormalised(options, z, keys, errors, w_base, group_chunks, length, ids=None):
    """(y, what was written over eta)."""
    memory = RenormalizedMemory(w_base, options, group_chunks)
    y, end = _row(memory, z, Writes(keys, errors), ids, length)
    return y, (memory._weight(end) - w_base) / (options.eta or 1.0)


def _renormalised_loop(eta, length, z, keys, errors, w_base, group_chunks):
    """One row of whole chunks, sequentially, by the equations. numpy."""
    norm = np.linalg.norm(w_base)

    def renorm(matrix):
        return matrix * norm / max(np.linalg.norm(matrix), 1e-6)

    start, total, y = w_base, np.zeros_like(w_base), []
    for chunk in range(z.shape[0]):
        y.append(z[chunk] @ renorm(start + eta * total))
        rows = np.arange(chunk * L, chunk * L + L) < length
        total = total + keys[chunk][rows].T @ errors[chunk][rows]
        if (chunk + 1) % group_chunks == 0:
            start, total = renorm(start + eta * total), np.zeros_like(w_base)
    return np.stack(y), renorm(start + eta * total)


@pytest.mark.parametrize("group_chunks", [1, 2, 16])
def test_renormalised_memory_follows_its_loop(group_chunks, float64):
    z, keys, errors, w_base = _operands(5)
    run = jax.jit(partial(_renormalised, _options(), group_chunks=group_chunks, length=14))
    y, state = run(z, keys, errors, w_base)
    for row in range(B):
        arrays = (np.asarray(x) for x in (z[row], keys[row], errors[row], w_base))
        expected, end = _renormalised_loop(0.3, 14, *arrays, group_chunks)
        assert_close(y[row], expected)
        assert_close(w_base + 0.3 * state[row], end)
    held = jnp.linalg.norm(w_base + 0.3 * state, axis=(-2, -1))
    assert_close(held, jnp.broadcast_to(jnp.linalg.norm(w_base), (B,)))


def test_renormalised_documents_of_a_row_equal_rows_of_their_own(float64):
    z, keys, errors, w_base = _operands(6, batch=1)
    ids = jnp.asarray(np.repeat([[1, 2]], [9, 9], axis=1))  # the first ends inside a group of two

    @jax.jit
    def run(z, keys, errors):
        def memory(part, ids, length):
            operands = (x[:, part] for x in (z, keys, errors))
            return _renormalised(_options(), *operands, w_base, 2, length, ids)[0]

        alone = [memory(slice(0, 3), None, 9), memory(slice(3, 6), None, 9)]
        return memory(slice(None), ids, 18), jnp.concatenate(alone, axis=1)

    assert_close(*run(z, keys, errors))


def test_renormalised_memory_that_learns_nothing_is_the_base(float64):
    z, keys, errors, w_base = _operands(3)
    y, state = _renormalised(_options(eta=0.0), z, keys, errors, w_base, 2, 9)
    assert_close(y, z @ w_base)
    assert_close(state, jnp.zeros_like(state), 1e-12)


def _corrected(z, keys, errors, w_base, log_decay, rate, length=14, ids=None):
    """(y, the sum after the row), keys of norm 1."""
    keys = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    memory = CorrectingMemory(w_base, _options())
    return _row(memory, z, Writes(keys, errors, log_decay, rate), ids, length)


def _corrected_loop(z, keys, errors, w_base, log_decay, rate, length=14):
    """Token by token, by the equation."""
    keys = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    reads, ends = [], []
    for row in range(len(z)):
        state, y = jnp.zeros_like(w_base), []
        for chunk in range(z.shape[1]):
            y.append(z[row, chunk] @ (w_base + 0.3 * state))
            tokens = range(min(L, length - chunk * L))
            columns = jnp.repeat(jnp.exp(log_decay[row, chunk, : len(tokens)].sum(0)), D)
            state = columns * state
            for token in tokens:
                k, e, beta = (x[row, chunk, token] for x in (keys, errors, rate))
                state = state + jnp.outer(k, e - beta * (k @ state))
        reads.append(jnp.stack(y))
        ends.append(state)
    return jnp.stack(reads), jnp.stack(ends)


def _corrected_operands(num_chunks, batch=B):
    shape = (batch, num_chunks, L)
    log_decay, rate = draw(1, (*shape, 1), shape)
    return (*_operands(num_chunks, batch), -0.1 * jnp.exp(log_decay), jax.nn.sigmoid(rate))


def test_a_corrected_memory_follows_its_tokens_with_every_gradient(float64):
    operands = _corrected_operands(5)
    weights = draw(2, (B, 5, L, D), (B, F, D))

    def loss(run, *operands):
        y, end = run(*operands)
        y = jnp.where((jnp.arange(15) < 14).reshape(5, L, 1), y, 0)
        return (weights[0] * y).sum() + (weights[1] * end).sum(), (y, end)

    def both(run):
        whole = jax.value_and_grad(partial(loss, run), argnums=range(6), has_aux=True)
        return jax.jit(whole)(*operands)

    found, expected = both(_corrected), both(_corrected_loop)
    assert_close(found, expected)
    assert all(abs(gradient).max() > 0 for gradient in found[1])


def test_corrected_documents_of_a_row_equal_rows_of_their_own(float64):
    operands = _corrected_operands(6, batch=1)
    ids = jnp.asarray(np.repeat([[1, 2]], [9, 9], axis=1))

    def part(chunks, length, ids=None):
        z, keys, errors, w_base, log_decay, rate = operands
        z, keys, errors, log_decay, rate = (
            x[:, chunks] for x in (z, keys, errors, log_decay, rate)
        )
        return _corrected(z, keys, errors, w_base, log_decay, rate, length, ids)[0]

    alone = [part(slice(0, 3), 9), part(slice(3, 6), 9)]
    assert_close(part(slice(0, 6), 18, ids), jnp.concatenate(alone, axis=1))


def test_a_corrected_memory_returns_what_was_stored_last_under_a_key(float64):
    """However often: the sum of a `PrefixMemory` returns all of it together."""
    _, keys, errors, w_base = _operands(4, batch=1)
    keys = jnp.broadcast_to(keys[:, :1, :1], keys.shape)
    z = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    memory = CorrectingMemory(w_base, _options(eta=1.0))
    y, _ = _row(memory, z, Writes(z, errors), None, 12)
    assert_close((y - z @ w_base)[0, 1:, 0], errors[0, :-1, -1])


def _ideal(z_teacher, z_student, w_base, length, ids=None):
    """(y, what was written over eta)."""
    memory = IdealMemory(w_base, 0.3, jnp.float64)
    y, end = _row(memory, z_teacher, (z_teacher, z_student), ids, length)
    return y, (end - w_base) / 0.3


def _distillation_loss(weight, running, z_teacher, z_student):
    """L_CD of a chunk: mean over its tokens of |stopgrad(z_teacher W_i) - z_student W|^2 / 2."""
    target = jax.lax.stop_gradient(z_teacher @ running)
    return 0.5 * jnp.sum((target - z_student @ weight) ** 2, axis=-1).mean()


@pytest.mark.parametrize("length", [15, 13])
def test_the_ideal_memory_descends_the_distillation_loss(length, float64):
    """Every delta_w is -eta times `jax.grad` of L_CD at the running weight."""
    z_teacher, z_student, _, w_base = _operands(5)
    y, state = jax.jit(partial(_ideal, length=length))(z_teacher, z_student, w_base)
    for row in range(B):
        weight = w_base
        for chunk in range(5):
            assert_close(y[row, chunk], z_teacher[row, chunk] @ weight)
            real = slice(0, min(L, length - chunk * L))
            slope = jax.grad(_distillation_loss)(
                weight, weight, z_teacher[row, chunk, real], z_student[row, chunk, real]
            )
            weight = weight - 0.3 * slope
        assert_close(w_base + 0.3 * state[row], weight)


def test_no_gradient_reaches_the_teacher_through_an_update(float64):
    """Only what the last chunk reads has a gradient with respect to teacher features."""
    z_teacher, z_student, _, w_base = _operands(3, batch=1)

    def last_chunk(z_teacher, z_student, w_base):
        return jnp.cos(_ideal(z_teacher, z_student, w_base, 9)[0][:, -1]).sum()

    d_teacher, d_student, d_base = jax.grad(last_chunk, argnums=(0, 1, 2))(
        z_teacher, z_student, w_base
    )
    assert_same(d_teacher[:, :-1], jnp.zeros_like(d_teacher[:, :-1]))
    assert abs(d_teacher[:, -1]).min() > 0
    assert abs(d_student[:, :-1]).min() > 0
    assert abs(d_base).min() > 0


def test_ideal_documents_of_a_row_equal_rows_of_their_own(float64):
    z_teacher, z_student, _, w_base = _operands(6, batch=1)
    ids = jnp.asarray(np.repeat([[1, 2]], [7, 11], axis=1))
    whole, _ = _ideal(z_teacher, z_student, w_base, 18, ids)
    first, _ = _ideal(z_teacher[:, :3], z_student[:, :3], w_base, 7)
    assert_close(whole[:, :2], first[:, :2])
    assert_close(whole[0, 2, 0], first[0, 2, 0])
    # The second document starts inside chunk 2: its own tokens of that chunk are its first write.
    ids = jnp.asarray([[1] + [2] * 11])
    second, _ = _ideal(z_teacher[:, 2:], z_student[:, 2:], w_base, 12, ids)
    assert_close(whole[0, 2, 1:], second[0, 0, 1:])
    assert_close(whole[:, 3:], second[:, 1:])
