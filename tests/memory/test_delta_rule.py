from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, dot_operand_types, draw, largest_array, traced, with_gradients

from ttcd_jax.memory.delta_rule import DeltaMemory, DeltaWrites, l2_normalize_inside

B, T, N, H, X = 2, 21, 2, 4, 3
# Documents of any length; with chunks of 8 one starts on a chunk's edge, two inside one chunk.
IDS = np.stack([np.repeat([7, 3, 4, 1], [8, 1, 2, 10]), np.repeat([2, 1], [19, 2])])


def delta_rule(
    q, k, v, beta, *, log_decay=None, initial_state=None, segment_ids=None, chunk_size, state_dtype
):
    """(o, state after the row)."""
    memory, writes = DeltaMemory(chunk_size, state_dtype), DeltaWrites(k, v, beta, log_decay)
    return memory.row(memory.prepared(q, writes, segment_ids, length=q.shape[1]), initial_state)


def delta_rule_recurrent(
    q, k, v, beta, *, log_decay=None, initial_state=None, segment_ids=None, state_dtype
):
    """`delta_rule` by its definition, one token after the other, in float32 or better."""
    wide = jnp.promote_types(state_dtype, jnp.float32)
    decay = jnp.ones_like(beta) if log_decay is None else jnp.exp(log_decay)
    if segment_ids is not None:
        begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
        decay = jnp.where(begins[..., None], 0, decay)
    if initial_state is None:
        initial_state = jnp.zeros((k.shape[0], *k.shape[2:], v.shape[-1]))
    scale = q.shape[-1] ** -0.5

    def one_token(state, token):
        q, k, v, beta, decay = token
        kept = decay[..., None, None] * state
        u = beta[..., None] * (v - jnp.einsum("BNHX,BNH->BNX", kept, k))
        after = kept + k[..., None] * u[..., None, :]
        return after.astype(state.dtype), scale * jnp.einsum("BNHX,BNH->BNX", after, q)

    tokens = (jnp.moveaxis(x.astype(wide), 1, 0) for x in (q, k, v, beta, decay))
    state, o = jax.lax.scan(one_token, initial_state.astype(state_dtype), tuple(tokens))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state


def _inputs(*, length=T, is_gated=True, dtype=None):
    """Keyword arguments of both forms: unit keys, beta in (0, 1), g < 0, an initial state."""
    shapes = [(B, length, N, H)] * 2 + [(B, length, N, X)] + [(B, length, N)] * 2
    q, k, v, beta, g, state = draw(0, *shapes, (B, N, H, X), dtype=dtype)
    inputs = {"q": q, "k": l2_normalize_inside(k), "v": v, "beta": jax.nn.sigmoid(beta)}
    inputs["initial_state"] = state
    return inputs | ({"log_decay": -jnp.abs(g)} if is_gated else {})


def _evaluate(form, inputs, segment_ids=None, state_dtype=None, **options):
    """(o, state) and the gradients of a weighted sum of both."""
    options |= {"segment_ids": segment_ids, "state_dtype": state_dtype or inputs["q"].dtype}
    return with_gradients(lambda inputs: form(**inputs, **options), inputs)


@pytest.mark.parametrize(
    ("is_gated", "has_documents", "chunk_size"),
    [(False, False, 1), (False, True, 8), (True, False, 64), (True, True, 8)],
)
def test_chunks_equal_the_recurrence_with_all_gradients(
    is_gated, has_documents, chunk_size, float64
):
    inputs, ids = _inputs(is_gated=is_gated), jnp.asarray(IDS) if has_documents else None
    expected = _evaluate(delta_rule_recurrent, inputs, ids)
    assert_close(_evaluate(delta_rule, inputs, ids, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("kind", ["strong decays", "the same key"])
def test_float32_holds_its_digits(kind):
    """(I + A)^-1 has small entries where every key is the same; powers of A reach 1e18 there."""
    if kind == "strong decays":
        inputs, tolerance = _inputs(dtype=jnp.float32), 1e-5
        (where,) = draw(3, (B, T, N))
        inputs["log_decay"] = jnp.select([where > 1, where > 0.5], [-3000.0, -50.0], -0.01)
    else:
        inputs, tolerance = _inputs(length=128, is_gated=False, dtype=jnp.float32), 3e-5  # of sums
        inputs["k"] = jnp.broadcast_to(inputs["k"][:1, :1], inputs["k"].shape)
        inputs["beta"] = jnp.ones_like(inputs["beta"])
    ours = _evaluate(delta_rule, inputs, chunk_size=16 if "log_decay" in inputs else 64)
    assert_close(ours, _evaluate(delta_rule_recurrent, inputs), tolerance)


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    wide = _inputs(dtype=jnp.float32)
    narrow = {name: wide[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    wide |= {name: x.astype(jnp.float32) for name, x in narrow.items()}
    ids = jnp.asarray(IDS)
    ours = _evaluate(delta_rule, wide | narrow, ids, jnp.float32, chunk_size=8)
    (o, state), (gradients,) = ours
    assert (o.dtype, state.dtype, gradients["k"].dtype) == ("bfloat16", "float32", "bfloat16")
    assert_close(ours, _evaluate(delta_rule_recurrent, wide, ids), 0.03)
    # Float32 whatever the inputs: sums of log decays, and the triangular system, which is inverted
    # in log2(8) doublings of two products each and multiplied once.
    del wide["log_decay"]
    run = partial(delta_rule, chunk_size=8, state_dtype=jnp.float32)
    eqns = traced(lambda inputs: run(**inputs), wide | narrow)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    is_wide = [{str(x.aval.dtype) for x in eqn.invars} == {"float32"} for eqn in products]
    assert sum(is_wide) == 2 * 3 + 1
    others = [eqn for eqn, w in zip(products, is_wide, strict=True) if not w]
    assert dot_operand_types(others) == {"bfloat16"}


def test_the_backward_keeps_no_state_per_token():
    length, size = 256, 32
    operands = [jnp.zeros((1, length, 1, size))] * 3 + [jnp.zeros((1, length, 1))] * 2

    def loss(q, k, v, beta, g):
        o, state = delta_rule(q, k, v, beta, log_decay=g, chunk_size=size, state_dtype=jnp.float32)
        return o.sum() + state.sum()

    eqns = traced(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), *operands)
    assert largest_array(eqns) == length * 2 * size  # both right sides of the triangular system
