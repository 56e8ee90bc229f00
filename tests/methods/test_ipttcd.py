import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    TWO_ROWS,
    after_chunk,
    assert_close,
    assert_narrow,
    assert_same,
    draw,
    influence,
    may_see,
    randomize,
    value_and_gradients,
)
from flax import nnx
from small_models import FLOAT64

from ttcd_jax.errors import UserError
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.precision import Precision

D, F, L = 6, 8, 4
CONTINUED = {
    "output": "teacher_raw",
    "normalizes_keys": False,
    "teacher_conv_init": "identity",
    "student_conv_init": "zeros",
}


def _config(precision=FLOAT64, **memory) -> IPTTCDConfig:
    return IPTTCDConfig(
        mlp=MLPConfig(dim=D, hidden_dim=F, precision=precision, init_std=0.5),
        memory=MemoryConfig(
            **({"chunk_size": L, "num_taps": 3, "form": "blocked", "block_chunks": 2} | memory)
        ),
    )


def _fresh(*args, **memory) -> IPTTCDMLP:
    """As initialized."""
    return IPTTCDMLP(_config(*args, **memory), rngs=nnx.Rngs(0))


def _module(precision=FLOAT64, **memory) -> IPTTCDMLP:
    """Without parameters of zero or one."""
    return randomize(IPTTCDMLP, _config(precision, **memory))


def _call(module, x, t, ids=None):
    return jax.jit(lambda x, t: module(x, t, ids))(x, t)


# Every switch at least once; P "plain" has the defaults.
VARIANTS = {
    "plain": {},
    "student output": {"output": "student"},
    "raw teacher output": {"output": "teacher_raw", "normalizes_keys": False},
    "raw teacher output, symmetric": {"output": "teacher_raw", "is_conv_causal": False},
    "nothing but the memory": {
        "has_teacher_conv": False,
        "has_student_conv": False,
        "has_proj": False,
        "has_token_rate": False,
    },
    "normalised errors": {"normalizes_errors": True},
    "renormalised": {"renorm_chunks": 2},
    "orthogonalised": {"orthogonalizes_updates": True},
    "half-lives": {"half_lives": (4.0,)},
    "gated half-lives": {"half_lives": (4.0, 90.0), "decay": "gated"},
    "half-lives of orthogonalised": {"half_lives": (9.0,), "orthogonalizes_updates": True},
    "corrected": {"corrects_errors": True, "form": "auto"},
    "corrected without gate, with half-lives": {
        **{"corrects_errors": True, "form": "auto", "has_token_rate": False},
        **{"half_lives": (4.0, 90.0)},
    },
    "associative": {"form": "associative"},
    "attention form": {"form": "attention"},
    "folded": {"folds_state": True, "resets_at_document": False},
}
PUBLISHED_DOCUMENTS = ("folded",)  # it has no documents


def _reach(module, ids=None, rows=2):
    """[B, T, B, T]: how an output token depends on the tokens of both inputs."""
    (both,) = draw(1, (rows, 14, 2 * D))
    return influence(lambda both: module(both[..., :D], both[..., D:], ids), both)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_token_depends_on_the_past_of_its_document_and_nothing_else(name, float64):
    """And on all of that past, which only the memory reaches, not convolutions or chunks."""
    ids = np.zeros_like(TWO_ROWS) if name in PUBLISHED_DOCUMENTS else TWO_ROWS
    reach = _reach(_module(**VARIANTS[name]), jnp.asarray(ids))
    assert not reach[~may_see(ids)].any()
    assert (reach[may_see(ids) & after_chunk(14, L)] > 0).all()
    assert (np.einsum("btbt->bt", reach) > 0).all()


@pytest.mark.parametrize("output", ["teacher", "student"])
def test_symmetric_convolutions_look_ahead_inside_the_chunk_they_read(output, float64):
    reach = _reach(_module(output=output, is_conv_causal=False), rows=1)[0, :, 0]
    later = np.triu(np.ones((14, 14), bool), 1)
    same_chunk = np.arange(14)[:, None] // L == np.arange(14)[None, :] // L
    one_ahead = np.eye(14, k=1, dtype=bool)
    np.testing.assert_array_equal(reach[later] > 0, (same_chunk & one_ahead)[later])


@pytest.mark.parametrize(
    "name", ["plain", "raw teacher output", "student output", "orthogonalised", "corrected"]
)
def test_without_a_rate_the_layer_is_frozen_exactly(name):
    """eta = 0 equals a single chunk, whatever the memory holds; so does its gradient."""
    x, t = draw(1, (2, 7, D), (2, 7, D))
    frozen = _module(Precision(), **VARIANTS[name], eta=0.0, chunk_size=8)
    single = _module(Precision(), **VARIANTS[name], eta=0.7, chunk_size=8)
    assert_same(_call(frozen, x, t), _call(single, x, t))
    many = _module(Precision(), **VARIANTS[name], eta=0.0, has_student_conv=False, chunk_size=2)
    assert np.isfinite(_call(many, x, t)).all()


def test_a_frozen_layer_that_reads_raw_features_is_the_plain_mlp_exactly():
    x, t = draw(1, (2, 11, D), (2, 11, D))
    for changes in ({"eta": 0.0}, {"eta": 0.7, "chunk_size": 16}):
        module = _module(Precision(), output="teacher_raw", **changes)
        plain = jax.jit(lambda x, m=module: SwiGLU.__call__(m, x))(x)
        assert_same(_call(module, x, t), plain)


@pytest.mark.parametrize("length", [1, 11])
def test_any_length_equals_the_padded_row(length, float64):
    module = _module()
    x, t = draw(1, (2, 12, D), (2, 12, D))

    def padded(module, x, t):
        room = ((0, 0), (0, 12 - length), (0, 0))
        return module(jnp.pad(x, room), jnp.pad(t, room))[:, :length]

    args = (x[:, :length], t[:, :length])
    ours = value_and_gradients(module, lambda m, x, t: m(x, t), *args)
    assert ours[0].shape == (2, length, D)
    assert_close(ours, value_and_gradients(module, padded, *args))


def test_the_published_memory_leaks_from_document_to_document(float64):
    """So do its convolutions: document boundaries do not exist."""
    module = _module(resets_at_document=False)
    x, t = draw(1, (2, 14, D), (2, 14, D))
    run = jax.jit(module)
    assert_same(run(x, t, jnp.asarray(TWO_ROWS)), run(x, t))


@pytest.mark.parametrize("name", ["plain", "raw teacher output"])
def test_forms_agree_with_all_gradients(name, float64):
    x, t = draw(1, (2, 15, D), (2, 15, D))
    ids = jnp.asarray(np.repeat([[3, 8], [4, 4]], [6, 9], axis=1))
    blocked, *others = (
        value_and_gradients(
            _module(**VARIANTS[name], form=form), lambda m, x, t: m(x, t, ids), x, t
        )
        for form in ("blocked", "associative", "attention")
    )
    for ours in others:
        assert_close(ours, blocked, 1e-11)


def test_from_scratch_the_layer_puts_out_zero_and_learns_its_teacher_convolution():
    """As published: at the start nothing but the teacher convolution receives gradient."""
    x, t = draw(1, (2, 11, D), (2, 11, D))
    y, gradients, d_inputs = value_and_gradients(_fresh(Precision()), lambda m, x, t: m(x, t), x, t)
    assert not np.asarray(y).any()
    moved = {name for name, value in gradients.items() if np.asarray(value).any()}
    assert moved == {"teacher_conv"}
    assert not any(np.asarray(x).any() for x in d_inputs)


@pytest.mark.parametrize("changes", [{}, {"normalizes_keys": True}], ids=["published", "unit keys"])
def test_continued_training_starts_at_the_plain_mlp_exactly(changes):
    module = _fresh(Precision(), **(CONTINUED | changes))
    x, t = draw(1, (2, 11, D), (2, 11, D))
    assert_same(_call(module, x, t), jax.jit(lambda x: SwiGLU.__call__(module, x))(x))
    _, gradients, _ = value_and_gradients(module, lambda m, x, t: m(x, t), x, t)
    assert np.asarray(gradients["student_conv"]).any()
    assert all(np.isfinite(value).all() for value in gradients.values())


def test_a_student_convolution_at_zero_does_not_rule_the_gradient():
    """The exact derivative of a normalized zero vector is a million; the default is one."""
    x, t = draw(1, (2, 11, D), (2, 11, D))

    def size(**changes):
        module = _module(Precision(), **changes)
        module.student_conv[...] = jnp.zeros_like(module.student_conv[...])
        _, gradients, _ = value_and_gradients(module, lambda m, x, t: m(x, t), x, t)
        assert all(np.isfinite(value).all() for value in gradients.values())
        return np.linalg.norm(gradients["student_conv"]) / np.linalg.norm(gradients["down"])

    assert size() < 100
    assert size(zero_slope=1e6) > 1e4


CONV_INITS = ("zeros", "identity", "previous", "normal")


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "symmetric"])
def test_convolutions_start_as_asked(is_causal):
    for teacher, student in itertools.product(CONV_INITS, CONV_INITS):
        module = _fresh(
            Precision(),
            teacher_conv_init=teacher,
            student_conv_init=student,
            is_conv_causal=is_causal,
        )
        for init, taps in (
            (teacher, module.teacher_conv[...]),
            (student, module.student_conv[...]),
        ):
            assert taps.shape == (3, F)
            if init == "normal":
                assert 0.2 < float(jnp.std(taps)) < 0.9
                continue
            expected = np.zeros((3, F))
            if init != "zeros":
                expected[(2 if is_causal else 1) - (init == "previous")] = 1
            assert_same(taps, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_conv_init": "previous", "num_taps": 1}, "num_taps=1 has no tap"),
        ({"half_lives": (8.0,) * 4}, f"4 half_lives do not divide the {D} columns"),
    ],
)
def test_layers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        _fresh(Precision(), **changes)


def test_a_half_life_is_the_number_of_tokens_after_which_half_is_left(float64):
    """Documents apart: the state after one chunk, read after more tokens that write nothing."""
    half_life, gap = 6.0, 3 * L
    module, plain = (_module(half_lives=lives) for lives in ((half_life,), ()))
    x, t = draw(1, (1, gap + 2 * L, D), (1, gap + 2 * L, D))
    # Equal inputs of teacher and student and one convolution of both: no error, nothing is written.
    for m in (module, plain):
        m.student_conv[...] = m.teacher_conv[...]
    t = x.at[:, :L].set(t[:, :L])

    def fast(m):
        y = _call(m, x, t)[:, -L:]
        frozen = IPTTCDMLP(_config(eta=0.0), rngs=nnx.Rngs(0))
        nnx.update(frozen, nnx.state(m))
        return y - _call(frozen, x, t)[:, -L:]

    assert_close(fast(module), fast(plain) * 0.5 ** (gap / half_life))


def test_gated_half_lives_start_as_constant_ones():
    x, t = draw(1, (2, 5 * L, D), (2, 5 * L, D))
    kinds = ("constant", "learned", "gated")
    first, *others = (
        _call(_fresh(Precision(), half_lives=(5.0, 70.0), decay=kind), x, t) for kind in kinds
    )
    for other in others:
        assert_same(other, first)


def test_projection_starts_as_asked():
    proj = {
        init: np.asarray(_fresh(Precision(), proj_init=init).proj[...])
        for init in ("identity", "gaussian_diagonal", "zeros", "normal")
    }
    assert_close(proj["identity"], 0.02 * np.eye(D, dtype=np.float32))
    assert not proj["zeros"].any()
    diagonal = np.diag(proj["gaussian_diagonal"])
    assert_same(proj["gaussian_diagonal"], np.diag(diagonal))
    assert diagonal.all()
    assert np.abs(diagonal).max() < 0.1
    assert proj["normal"].all()
    assert proj["normal"].std() > 0.2


def test_switched_off_parts_have_no_parameters(float64):
    def names(**memory):
        return set(nnx.to_pure_dict(nnx.state(_module(**memory), nnx.Param)))

    bare = names(**VARIANTS["nothing but the memory"])
    assert bare == {"gate", "up", "down"}
    assert names() == bare | {"proj", "rate", "teacher_conv", "student_conv"}


def test_statistics_measure_the_memory_and_the_gate(float64):
    module = _module(normalizes_keys=False, has_student_conv=False, has_teacher_conv=False)
    x, t = draw(1, (2, 12, D), (2, 12, D))
    _, stats = jax.jit(module.remember)(x, t)
    down, proj, rate = (np.asarray(w[...]) for w in (module.down, module.proj, module.rate))
    z, s = np.asarray(module.features(x)), np.asarray(module.features(t))
    beta = 1 / (1 + np.exp(-np.asarray(t) @ rate))
    error = beta[..., None] * ((z - s) @ down) @ proj
    state = np.einsum("btf,btd->bfd", s, error)
    ratio = 0.3 * np.linalg.norm(state, axis=(1, 2)).mean() / np.linalg.norm(down)
    assert_close(stats.memory_ratio, ratio, 1e-6)
    assert_close(stats.gate_mean, beta.mean(), 1e-6)
    assert jax.jit(_module(has_token_rate=False).remember)(x, t)[1].gate_mean == 1


def test_statistics_carry_no_gradient():
    module = _module(Precision())
    x, t = draw(1, (1, 9, D), (1, 9, D))
    gradient = jax.jit(jax.grad(lambda x: sum(module.remember(x, t)[1])))(x)
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("name", ["plain", "raw teacher output", "renormalised", "attention form"])
def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32(name):
    ids = jnp.asarray(np.repeat([[3, 8], [4, 4]], [6, 9], axis=1))
    assert_narrow(
        lambda precision: _module(precision, **VARIANTS[name]),
        lambda module, x, t: module(x, t, ids),
        *[(2, 15, D)] * 2,
        bound=0.1,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
        ({"num_taps": 0}, "num_taps 0 must be at least 1"),
        ({"block_chunks": 0}, "block_chunks 0 must be at least 1"),
        ({"renorm_chunks": 0}, "renorm_chunks 0 must be at least 1"),
        ({"output": "teacher_raw", "has_teacher_conv": False}, "use 'teacher'"),
        ({"folds_state": True}, "set resets_at_document=False"),
        (
            {"form": "attention", "orthogonalizes_updates": True},
            "form 'attention' does not know orthogonalizes_updates",
        ),
        ({"corrects_errors": True, "form": "blocked"}, "knows no other form"),
        ({"corrects_errors": True, "normalizes_keys": False}, "set normalizes_keys=True"),
        ({"corrects_errors": True, "renorm_chunks": 4}, "knows neither renorm_chunks"),
        ({"corrects_errors": True, "orthogonalizes_updates": True}, "nor orthogonalizes_updates"),
        ({"half_lives": (0.0,)}, "half_lives"),
        ({"half_lives": (64.0,), "renorm_chunks": 4}, "set one of them"),
        ({"decay": "gated"}, "set half_lives="),
        (
            {"half_lives": (64.0,), "folds_state": True, "resets_at_document": False},
            "set half_lives=",
        ),
    ],
)
def test_configurations_that_do_not_fit_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        MemoryConfig(**changes)
    assert "\n" not in str(caught.value)
