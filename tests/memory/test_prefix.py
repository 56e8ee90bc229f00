from functools import partial

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttcd_jax.memory.chunks import chunk_segments, memory_mask
from ttcd_jax.memory.prefix import PrefixMemory, PrefixOptions, Writes
from ttcd_jax.memory.protocol import Chunks

FORMS = ("blocked", "associative", "attention")
B, L, F, D = 2, 3, 6, 4


def _operands(num_chunks, batch=B, dtype=None):
    """(z, keys, errors, w_base, initial state)."""
    features, errors = (batch, num_chunks, L, F), (batch, num_chunks, L, D)
    return checks.draw(0, features, features, errors, (F, D), (batch, F, D), dtype=dtype)


def _options(**changes) -> PrefixOptions:
    return PrefixOptions(**({"eta": 0.3, "block_chunks": 3, "state_dtype": jnp.float64} | changes))


def read_prefix(options, z, keys, errors, w_base, mask, state=None, log_decay=None):
    """(y, state after the row)."""
    chunks = Chunks(z, Writes(keys, errors, log_decay), mask)
    return PrefixMemory(w_base, options).row(chunks, state)


def _documents(*lengths) -> jax.Array:
    """Segment ids of one row of documents of these lengths, and of another row with one more cut
    in the middle of its first document."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    other = np.where(np.arange(len(row)) < lengths[0] // 2, len(lengths), row)
    return jnp.asarray(np.stack([row, other]))


# name: (tokens, documents or none, eta, chunks per block)
CASES = {
    "one document, ragged everywhere": (20, None, 0.3, 3),
    "less than a chunk": (2, None, 0.3, 4),
    "documents shorter than a chunk, ragged": (20, (1, 1, 9, 1, 8), 0.3, 2),
    "documents on the chunk grid": (18, (9, 6, 3), 0.3, 4),
    "nothing learned, one chunk at a time": (20, (12, 8), 0.0, 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_groups", [None, 2])
def test_three_forms_agree_from_any_initial_state(name, num_groups, float64):
    """Values, state, and the gradients of everything through both; the layers of
    tests/methods/test_in_place.py agree with the definition in each form."""
    length, documents, eta, block_chunks = CASES[name]
    num_chunks = -(-length // L)
    ids = None if documents is None else _documents(*documents)
    mask = memory_mask(chunk_segments(ids, L), length, L)
    operands = _operands(num_chunks)
    if num_groups is not None:
        (log_decay,) = checks.draw(2, (B, num_chunks, L, num_groups))
        operands = (*operands, -jnp.abs(log_decay) / 3)

    def read(form, z, keys, errors, w_base, *rest):
        options = _options(eta=eta, block_chunks=block_chunks, form=form)
        return read_prefix(options, z, keys, errors, w_base, mask, *rest)

    expected, *others = (checks.with_gradients(partial(read, form), *operands) for form in FORMS)
    for ours in others:
        checks.assert_close(ours, expected)
    if num_groups is None:
        empty = jnp.zeros_like(operands[-1])
        checks.assert_same(*(read("blocked", *operands[:4], *rest) for rest in ((), (empty,))))


def test_reading_the_memory_apart_keeps_what_folding_rounds_away():
    """|S| is about 1 % of |W_base|, and z reads nothing from W_base: its halves cancel."""
    z, keys, errors, w_base, _ = _operands(6, dtype=jnp.bfloat16)
    z = jnp.concatenate([z[..., :3], z[..., :3]], axis=-1)
    w_base = jnp.concatenate([w_base[:3], -w_base[:3]])
    errors = errors * jnp.bfloat16(0.002)

    def read(folds, dtype):
        operands = [x.astype(dtype) for x in (z, keys, errors, w_base)]
        options = _options(folds_state=folds, eta=1.0, state_dtype=jnp.float32)
        return np.asarray(read_prefix(options, *operands, memory_mask(None, 18, L))[0], np.float32)

    exact = read(False, jnp.float32)
    apart, folded = (
        np.linalg.norm(read(folds, jnp.bfloat16) - exact) / np.linalg.norm(exact)
        for folds in (False, True)
    )
    assert apart < 0.01
    assert 10 * apart < folded


def _wide_gradient(form, num_chunks):
    """Peak bytes of the gradient where a state is far larger than its chunk's tokens."""
    shape = (1, num_chunks, 2, 128)
    struct = jax.ShapeDtypeStruct
    operands = [struct(shape, jnp.float32)] * 3 + [struct((128, 128), jnp.float32)]
    options = PrefixOptions(eta=0.3, form=form, block_chunks=4)

    def loss(*operands):
        y, _ = read_prefix(options, *operands, memory_mask(None, 2 * num_chunks, 2))
        return (y**2).sum()

    return checks.temporary_bytes(jax.grad(loss, argnums=(0, 1, 2, 3)), *operands)


def test_the_blocked_gradient_keeps_no_states():
    one_state = 4 * 128 * 128
    short, long = _wide_gradient("blocked", 32), _wide_gradient("blocked", 64)
    assert long - short < 4 * one_state  # 32 chunks more cost less than 4 states
    assert _wide_gradient("associative", 64) > 64 * one_state > 2 * long


@pytest.mark.parametrize(
    ("length", "changes", "expected"),
    [
        (170, {}, "attention"),  # 2 F D / (F + D) = 170.7 tokens
        (171, {}, "blocked"),
        (32, {"orthogonalizes": True}, "blocked"),
        (32, {"folds_state": True}, "blocked"),
    ],
)
def test_auto_takes_the_form_that_multiplies_less(length, changes, expected):
    assert PrefixOptions(eta=0.3, **changes).at_length(length, 256, 128).form == expected


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_products_have_narrow_operands_and_float32_sums(form):
    z, keys, errors, w_base, _ = _operands(5, batch=1, dtype=jnp.bfloat16)
    options = _options(form=form, state_dtype=jnp.float32)
    ids = jnp.asarray(np.repeat([[1, 2]], [7, 8], axis=1))

    def run(*operands):
        (y, state), pull = jax.vjp(
            lambda *xs: read_prefix(options, *xs, memory_mask(chunk_segments(ids, L), 15, L)),
            *operands,
        )
        return y, pull((y, state))

    eqns = checks.traced(run, z, keys, errors, w_base)
    assert checks.dot_operand_types(eqns) == {"bfloat16"}
    sums = {str(x.outvars[0].aval.dtype) for x in eqns if x.primitive.name == "dot_general"}
    assert sums == {"float32"}
