"""Distances between student, memory and teacher, against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, draw, randomize
from small_models import FLOAT64

from ttcd_jax.memory.distillation import Distillation, distances, summary
from ttcd_jax.methods.ideal import IdealConfig, IdealMemoryConfig, IdealMLP
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.nn.mlp import MLPConfig

D, F, L, ETA = 6, 8, 4, 0.3
MLP = MLPConfig(dim=D, hidden_dim=F, precision=FLOAT64, init_std=0.5)


def _module(**memory):
    settings = MemoryConfig(**{"chunk_size": L, "num_taps": 3, "eta": ETA} | memory)
    return randomize(IPTTCDMLP, IPTTCDConfig(mlp=MLP, memory=settings))


def _ideal(**memory):
    settings = IdealMemoryConfig(**{"chunk_size": L, "eta": ETA} | memory)
    return randomize(IdealMLP, IdealConfig(mlp=MLP, memory=settings))


# The published recipes, and every switch that acts on what is compared.
VARIANTS = {
    "from scratch": {},
    "continued": {"output": "teacher_raw", "normalizes_keys": False},
    "student output": {"output": "student"},
    "nothing but the memory": {
        "has_teacher_conv": False,
        "has_student_conv": False,
        "has_proj": False,
        "has_token_rate": False,
        "normalizes_keys": False,
    },
    "leaking": {"resets_at_document": False},
}


def _parameters(module):
    names = ("gate", "up", "down", "proj", "rate", "teacher_conv", "student_conv")
    return {name: np.asarray(getattr(module, name)[...]) for name in names if hasattr(module, name)}


def _features(w, a):
    gate = a @ w["gate"]
    return gate / (1 + np.exp(-gate)) * (a @ w["up"])


def _convolved(z, taps, ids):
    """Causal, inside chunk and document, of one row."""
    out = np.zeros_like(z)
    for i in range(len(z)):
        for r, tap in enumerate(taps):
            j = i - (len(taps) - 1 - r)
            if j >= i // L * L and ids[j] == ids[i]:
                out[i] += tap * z[j]
    return out


def _row(w, settings, x, t, ids):
    """The distances of one row, token by token: each document has a running weight, which its
    tokens of a chunk write together."""
    is_ideal = isinstance(settings, IdealMemoryConfig)
    raw, z_s = _features(w, x), _features(w, t)
    z_t = _convolved(raw, w["teacher_conv"], ids) if "teacher_conv" in w else raw
    z_s = _convolved(z_s, w["student_conv"], ids) if "student_conv" in w else z_s
    output = "teacher" if is_ideal else settings.output
    z_out = {"teacher": z_t, "teacher_raw": raw, "student": z_s}[output]
    error = (z_t - z_s) @ w["down"]
    if "rate" in w:
        error = error / (1 + np.exp(-t @ w["rate"]))[:, None]
    error = error @ w.get("proj", np.eye(D))
    is_unit = not is_ideal and settings.normalizes_keys
    keys = z_s / np.linalg.norm(z_s, axis=1, keepdims=True) if is_unit else z_s
    found = np.zeros((7, len(x)))
    documents = ids if settings.resets_at_document else np.zeros_like(ids)
    for document in np.unique(documents):
        weight, is_written = w["down"].copy(), False
        for start in range(0, len(x), L):
            here = np.flatnonzero(documents[start : start + L] == document) + start
            if not len(here):
                continue
            target = z_t[here] @ w["down"]
            rows = target, target - z_s[here] @ w["down"], target - z_s[here] @ weight
            rows += (z_t[here] - z_s[here]) @ weight, z_out[here] @ (weight - w["down"])
            lengths = [np.linalg.norm(row, axis=1) for row in rows]
            move = z_s[here] @ (weight - w["down"])
            angle = np.einsum("td,td->t", move, rows[1])
            angle /= np.linalg.norm(move, axis=1) * lengths[1] if is_written else 1
            found[:, here] = [*lengths, np.full(len(here), is_written), angle]
            if is_ideal:
                step = z_s[here].T @ ((z_t[here] - z_s[here]) @ weight) / len(here)
            else:
                step = keys[here].T @ error[here]
            weight, is_written = weight + ETA * step, True
    return found


def _measured(module, x, t, ids):
    run = jax.jit(functools.partial(module.remember, measures=True))
    return run(x, t, jnp.asarray(ids))


@pytest.mark.parametrize("name", [*VARIANTS, "ideal"])
def test_distances_are_those_of_the_definition(name, float64):
    """Several documents in a row, the last chunk ragged."""
    module = _ideal() if name == "ideal" else _module(**VARIANTS[name])
    x, t = draw(1, (2, 14, D), (2, 14, D))
    ids, w = np.asarray(TWO_ROWS), _parameters(module)
    # Convolutions know no documents where memories leak.
    known = ids if module.settings.resets_at_document else np.zeros_like(ids)
    rows = [_row(w, module.settings, np.asarray(x[i]), np.asarray(t[i]), known[i]) for i in (0, 1)]
    expected = Distillation(*np.stack(rows, axis=1))
    y, found = _measured(module, x, t, ids)
    assert_close(found._replace(is_moved=found.is_moved.astype(float)), expected)
    assert 0 < found.is_moved.mean() < 1
    assert_close(y, jax.jit(module.remember)(x, t, jnp.asarray(ids))[0])


def test_without_a_rate_the_memory_is_the_student(float64):
    x, t = draw(1, (2, 14, D), (2, 14, D))
    for module in (_module(eta=0.0), _ideal(eta=0.0)):
        _, found = _measured(module, x, t, TWO_ROWS)
        assert_close(found.on, found.off)
        assert found.off.min() > 0
        assert not found.change.max() > 1e-12


def test_equal_views_have_no_gap_and_write_nothing(float64):
    (x,) = draw(1, (2, 14, D))
    _, found = _measured(_ideal(), x, x, TWO_ROWS)
    assert not found.off.any()
    assert found.on.max() < 1e-14
    assert not found.is_moved.any()


def test_a_summary_is_over_the_counted_tokens():
    found = Distillation(
        teacher=jnp.array([[[2.0, 4.0, 0.0, 1.0]]]),
        off=jnp.array([[[1.0, 1.0, 1.0, 9.0]]]),
        on=jnp.array([[[1.0, 0.5, 2.0, 0.0]]]),
        both=jnp.array([[[0.0, 0.0, 7.0, 9.0]]]),
        change=jnp.array([[[0.0, 2.0, 5.0, 9.0]]]),
        is_moved=jnp.array([[[False, True, True, True]]]),
        cosine=jnp.array([[[1.0, 0.5, -1.0, 1.0]]]),
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
    }
    nothing = summary(found, jnp.zeros((1, 4), bool))
    assert all(np.isnan(x).all() for x in nothing.values())


def test_a_token_with_nothing_to_read_is_not_moved_whatever_rounding_does():
    y_teacher, y_student, y = draw(1, *[(1, 2, 3, D)] * 3, dtype=jnp.float32)
    ids = jnp.asarray([[[1, 1, 2], [2, 2, 3]]])
    args = y_teacher, y_student, y, y, y
    moved = [distances(*args, segments).is_moved.tolist() for segments in (None, ids)]
    assert moved == [[[[False] * 3, [True] * 3]], [[[False] * 3, [True, True, False]]]]
