"""MLPs that write into their down projection: definition, start, and what they measure."""

import functools

import checks
import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import value_and_gradients as with_gradients
from devices import elsewhere
from flax import nnx
from small_models import FLOAT64, config_of, outside_method
from ttcd_kernels import launch

from ttcd_jax import IPTTCDMLP, IPTTCDConfig, MemoryConfig, MLPConfig, Piece, Precision, Transformer
from ttcd_jax.memory.distillation import Distillation
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.ideal import IdealConfig, IdealMemoryConfig, IdealMLP
from ttcd_jax.methods.ip_ttt import IPTTTMLP, IPTTTConfig, TargetMemoryConfig
from ttcd_jax.models.config import block_configs
from ttcd_jax.nn.block import Block
from ttcd_jax.nn.row import Row

D, F, L = 6, 8, 4
KINDS = {
    MemoryConfig: (IPTTCDMLP, IPTTCDConfig),
    TargetMemoryConfig: (IPTTTMLP, IPTTTConfig),
    IdealMemoryConfig: (IdealMLP, IdealConfig),
}
CONTINUED = {"output": "teacher_raw", "normalizes_keys": False}
CONTINUED |= {"teacher_conv_init": "identity", "student_conv_init": "zeros"}
BARE = dict.fromkeys(("has_teacher_conv", "has_student_conv", "has_proj", "has_token_rate"), False)
SIZES = {"chunk_size": L, "num_taps": 3, "block_chunks": 2}


def _ipttcd(**changes):
    return MemoryConfig(**SIZES | changes)


def _ipttt(**changes):
    return TargetMemoryConfig(**SIZES | changes)


VARIANTS = {
    "plain": _ipttcd(form="blocked"),
    "student output": _ipttcd(output="student"),
    "continued": _ipttcd(**CONTINUED),
    "symmetric": _ipttcd(is_conv_causal=False),
    "student output, symmetric": _ipttcd(is_conv_causal=False, output="student"),
    "nothing but the memory": _ipttcd(**BARE),
    "no keys of norm one": _ipttcd(**BARE, normalizes_keys=False),
    "normalized errors": _ipttcd(normalizes_errors=True),
    "renormalized": _ipttcd(renorm_chunks=2),
    "orthogonalized": _ipttcd(orthogonalizes_updates=True),
    "orthogonalized, associative": _ipttcd(orthogonalizes_updates=True, form="associative"),
    "gated half-lives": _ipttcd(half_lives=(4.0, 90.0), decay="gated"),
    "learned half-lives": _ipttcd(half_lives=(1.5, 40.0), decay="learned"),
    "half-lives of orthogonalized": _ipttcd(half_lives=(9.0,), orthogonalizes_updates=True),
    "corrected": _ipttcd(corrects_errors=True),
    "corrected, the teacher's features": _ipttcd(corrects_errors=True, error="teacher"),
    "the gap alone": _ipttcd(error="gap"),
    "corrected, learned values": _ipttcd(corrects_errors=True, error="learned", has_proj=False),
    "the student's features, the teacher's gate": _ipttcd(error="student", gate="teacher"),
    "corrected, with half-lives": _ipttcd(corrects_errors=True, half_lives=(4.0, 90.0)),
    "associative": _ipttcd(form="associative"),
    "attention": _ipttcd(form="attention"),
    "leaking": _ipttcd(resets_at_document=False),
    "folded": _ipttcd(folds_state=True, resets_at_document=False),
    "folded, associative": _ipttcd(folds_state=True, form="associative", resets_at_document=False),
    "targets": _ipttt(has_activation_conv=True, is_conv_causal=True),
    "targets, symmetric": _ipttt(has_activation_conv=True),
    "targets, plain features": _ipttt(),
    "targets, corrected": _ipttt(has_activation_conv=True, corrects_errors=True),
    "ideal": IdealMemoryConfig(chunk_size=L),
}


def _layer(settings, precision=FLOAT64, **changes):
    """(class, its configuration)."""
    layer, config = KINDS[type(settings)]
    mlp = MLPConfig(dim=D, hidden_dim=F, precision=precision, init_std=0.5)
    return layer, config(mlp=mlp, memory=settings.replace(**changes))


def _module(name, precision=FLOAT64, **changes):
    """Without parameters of zero or one."""
    return checks.randomize(*_layer(VARIANTS[name], precision, **changes))


def _fresh(**changes):
    """As initialized, in float32."""
    layer, config = _layer(_ipttcd(form="blocked"), Precision(), **changes)
    return layer(config, rngs=nnx.Rngs(0))


def _call(module, x, t, ids=None):
    return jax.jit(lambda x, t: module(x, t, ids))(x, t)


def _against_definition(settings, dtype, ids, rng):
    """The largest relative error of value and gradients of a row with these documents; and the
    size of the memory after it, which is measured in float32, is checked."""
    precision = Precision(param=dtype, compute=dtype, state=dtype)
    graph, params = nnx.split(checks.randomize(*_layer(settings, precision)))
    x, t, dy = (rng.standard_normal((len(ids), D)) for _ in range(3))

    def run(params, x, t):
        row = Row.of(x[None], None, jnp.asarray(ids[None]))
        y, stats = nnx.merge(graph, params).remember(x[None], t[None], row)
        return y[0], stats.memory_ratio

    @jax.jit
    def ours(params, *inputs):
        y, pull, ratio = jax.vjp(run, params, *inputs, has_aux=True)
        return y, ratio, pull(jnp.asarray(dy, dtype))

    found, ratio, d_found = ours(params, *(jnp.asarray(a, dtype) for a in (x, t)))
    wide = jax.tree.map(lambda a: a.astype(float), nnx.to_pure_dict(params))
    define = functools.partial(definitions.in_place, settings, ids=ids)
    y, pull, end = jax.vjp(define, wide, jnp.asarray(x), jnp.asarray(t), has_aux=True)
    norm = jnp.linalg.norm
    np.testing.assert_allclose(ratio, norm(end - wide["down"]) / norm(wide["down"]), rtol=1e-4)
    wanted = pull(jnp.asarray(dy))
    # Where a gradient is mere rounding it is compared with that of x.
    largest = float(jnp.abs(wanted[1]).max()) or 1.0
    ours = jax.tree.leaves((nnx.to_pure_dict(d_found[0]), d_found[1:]))
    error = checks.distance(found, y)
    for a, b in zip(ours, jax.tree.leaves((wanted[0], wanted[1:])), strict=True):
        size = max(float(jnp.abs(b).max()), 1e-3 * largest)
        error = max(error, float(np.abs(np.asarray(a, float) - np.asarray(b)).max()) / size)
    return error


BOUND = {"float64": 1e-11, "float32": 1e-4}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_is_its_definition_with_every_gradient(name, float64):
    """Of documents of several chunks, of a token, and of a ragged end."""
    ids = np.repeat([5, 2, 9], [10, 1, 7]).astype(np.int32)
    rng = np.random.default_rng(0)
    assert _against_definition(VARIANTS[name], "float64", ids, rng) < BOUND["float64"]


# Settings, dtype and lengths of documents. At the default level a clamp at 0 lost gradient of the
# first's decay; the memory of the second became float64 at documents.
FORGETS = {"half_lives": (1.5, 40.0), "decay": "learned", "form": "attention", "chunk_size": 1}
RAW = {"output": "student", "normalizes_keys": False, "has_token_rate": False, "num_taps": 1}
COMPILED = {
    "forgets": (_ipttt(**FORGETS, has_proj=False, has_target_conv=False), "float64", [14]),
    "raw": (_ipttcd(**RAW, form="blocked", chunk_size=2), "float32", [3, 3]),
    "corrected": (VARIANTS["corrected, with half-lives"], "float64", [7, 1, 4]),
}


def compiled_errors():
    from tests.inference import test_reading

    for method in ("ipttcd", "ipttt", "lact", "gated_deltanet", "swa"):
        test_reading.test_any_way_to_read_rows_gives_what_one_pass_gives(method, {})
    errors = {}
    for name, (settings, dtype, lengths) in COMPILED.items():
        ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
        errors[name] = _against_definition(settings, dtype, ids, np.random.default_rng(60))
    return errors


def test_layers_compiled_as_users_compile_them_equal_their_definition():
    """The suite's processes compile at optimization level 0."""
    errors = elsewhere(compiled_errors, count=1, is_wide=True, XLA_FLAGS="")
    assert {x: e for x, e in errors.items() if not e < BOUND[COMPILED[x][1]]} == {}


def test_from_scratch_the_layer_puts_out_zero_and_learns_its_teacher_convolution():
    """As published: at the start nothing but the teacher convolution receives gradient."""
    x, t = checks.draw(1, (2, 11, D), (2, 11, D))
    y, gradients, d_inputs = with_gradients(_fresh(), lambda m, x, t: m(x, t), x, t)
    assert not np.asarray(y).any()
    moved = {name for name, value in gradients.items() if np.asarray(value).any()}
    assert moved == {"teacher_conv"}
    assert not any(np.asarray(x).any() for x in d_inputs)


def test_continued_training_starts_at_the_plain_mlp_exactly():
    module = _fresh(**CONTINUED)
    x, t = checks.draw(1, (2, 11, D), (2, 11, D))
    checks.assert_same(_call(module, x, t), jax.jit(module.plain)(x))
    _, gradients, _ = with_gradients(module, lambda m, x, t: m(x, t), x, t)
    assert np.asarray(gradients["student_conv"]).any()
    # Whatever the keys, values begin at zero.
    learned = {"has_proj": False, "student_conv_init": "previous", "normalizes_keys": True}
    module = _fresh(**CONTINUED | learned, error="learned")
    checks.assert_same(_call(module, x, t), jax.jit(module.plain)(x))
    _, gradients, _ = with_gradients(module, lambda m, x, t: m(x, t), x, t)
    assert np.asarray(gradients["value"]).any()


def test_published_targets_start_by_writing_nothing(float64):
    layer, config = _layer(_ipttt())
    module, (x, targets) = layer(config, rngs=nnx.Rngs(0)), checks.draw(1, (2, 14, D), (2, 14, D))
    y, stats = jax.jit(module.remember)(x, targets, Row.of(x))
    checks.assert_close(y, module.plain(x))
    assert stats.memory_ratio == 0
    with pytest.raises(ValueError, match="pass embeddings"):
        _module("targets", target="embedding").forward(x, Row.of(x))


def test_a_student_convolution_at_zero_does_not_rule_the_gradient():
    """The exact derivative of a normalized zero vector is a million; the default is one."""
    x, t = checks.draw(1, (2, 11, D), (2, 11, D))

    def size(**changes):
        module = _module("plain", Precision(), **changes)
        module.student_conv[...] = jnp.zeros_like(module.student_conv[...])
        _, gradients, _ = with_gradients(module, lambda m, x, t: m(x, t), x, t)
        assert all(np.isfinite(value).all() for value in gradients.values())
        return np.linalg.norm(gradients["student_conv"]) / np.linalg.norm(gradients["down"])

    assert size() < 100
    assert size(zero_slope=1e6) > 1e4


def test_the_convolutions_run_as_the_settings_say():
    x, t = checks.draw(1, (2, 11, D), (2, 11, D))
    with launch.compiling_for(75), pytest.raises(ValueError, match="'triton': the GPU has compute"):
        _module("plain", Precision(), conv_implementation="triton")(x, t)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "symmetric"])
def test_convolutions_start_as_asked(is_causal):
    inits = ("zeros", "identity", "previous", "normal")
    for teacher, student in zip(inits, np.roll(inits, 1).tolist(), strict=True):
        names = {"teacher_conv_init": teacher, "student_conv_init": student}
        module = _fresh(**names, is_conv_causal=is_causal)
        for init, taps in ((teacher, module.teacher_conv), (student, module.student_conv)):
            here = (2 if is_causal else 1) - (init == "previous")
            expected = np.zeros((3, F))
            expected[here] = init != "zeros"
            if init == "normal":
                assert 0.2 < float(jnp.std(taps[...])) < 0.9
            else:
                checks.assert_same(taps[...], expected)


def test_the_projection_starts_as_asked():
    inits = ("identity", "gaussian_diagonal", "zeros", "normal")
    proj = {init: np.asarray(_fresh(proj_init=init).proj[...]) for init in inits}
    checks.assert_close(proj["identity"], 0.02 * np.eye(D, dtype=np.float32))
    assert not proj["zeros"].any()
    diagonal = np.diag(proj["gaussian_diagonal"])
    checks.assert_same(proj["gaussian_diagonal"], np.diag(diagonal))
    assert 0 < np.abs(diagonal).min() <= np.abs(diagonal).max() < 0.1
    assert {*np.sign(diagonal)} == {-1, 1}
    assert proj["normal"].all()
    assert proj["normal"].std() > 0.2


def test_gated_half_lives_start_as_constant_ones():
    x, t = checks.draw(1, (2, 5 * L, D), (2, 5 * L, D))
    first, *others = (
        _call(_fresh(half_lives=(5.0, 70.0), decay=kind), x, t)
        for kind in ("constant", "learned", "gated")
    )
    for other in others:
        checks.assert_same(other, first)


def test_statistics_measure_the_gate_and_carry_no_gradient(float64):
    """That of the memory is the definition's."""
    module, (x, t) = _module("plain"), checks.draw(1, (2, 12, D), (2, 12, D))
    beta = 1 / (1 + np.exp(-np.asarray(t) @ np.asarray(module.rate[...])))
    row, ungated = Row.of(x), _module("plain", has_token_rate=False)
    checks.assert_close(jax.jit(module.remember)(x, t, row)[1].gate_mean, beta.mean(), 1e-6)
    assert jax.jit(ungated.remember)(x, t, row)[1].gate_mean == 1
    gradient = jax.jit(jax.grad(lambda x: sum(module.remember(x, t, row)[1])))(x)
    assert not np.asarray(gradient).any()


def _window_share(module, x, t, ids=None):
    return jax.jit(module.remember)(x, t, Row.of(x, None, ids))[1].window_share


@pytest.mark.parametrize("name", ["plain", "symmetric", "nothing but the memory"])
def test_the_share_of_the_windows_is_that_of_the_definition(name, float64):
    """|conv_S(z_T - z_S) W P beta|^2 over |e|^2 of the document that the last chunk writes: here
    its tokens 1 and 2 of 4, the last one padding; taps reach no other document."""
    module, (x, t) = _module(name), checks.draw(1, (1, 11, D), (1, 11, D))
    ids = np.repeat([[7, 4]], [9, 2], axis=1)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def convolved(name, rows):
        z = module.features(rows[:, 8:])[0]
        if name not in params:
            return z[1:]
        args = module.settings, np.asarray([7, 4, 4]), z, params[name]
        return jnp.stack([definitions.conv_at(*args, p) for p in (1, 2)])

    def errors(seen):  # by the student
        difference = convolved("teacher_conv", x) - convolved("student_conv", seen)
        gate = jax.nn.sigmoid(t[0, 9:] @ params["rate"]) if "rate" in params else np.ones(2)
        return difference @ params["down"] @ params.get("proj", np.eye(D)) * gate[:, None]

    made = errors(t) - errors(x)
    expected = (made**2).sum() / (errors(t) ** 2).sum()
    checks.assert_close(_window_share(module, x, t, jnp.asarray(ids)), expected, 1e-6)


def test_the_share_of_the_windows_is_none_of_equal_views_and_all_of_equal_taps(float64):
    x, t = checks.draw(1, (2, 12, D), (2, 12, D))
    assert _window_share(_module("plain"), x, x) == 0
    assert _window_share(_module("nothing but the memory"), x, t) == 1
    assert _window_share(_module("ideal"), x, t) == 1
    assert _window_share(_module("ideal"), x, x) == 0  # nothing is written
    assert _window_share(_module("plain"), 0 * x, 0 * t) == 0
    for name in ("targets", "corrected, learned values"):  # no teacher
        assert _window_share(_module(name), x, t) is None


@pytest.mark.parametrize("name", ["plain", "continued", "renormalized", "attention", "folded"])
def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32(name):
    ids = jnp.asarray(np.repeat([[3, 8], [4, 4]], [6, 9], axis=1))
    build, shape = functools.partial(_module, name), (2, 15, D)
    checks.assert_narrow(build, lambda module, x, t: module(x, t, ids), shape, shape, bound=0.1)


def _measured(module, x, t):
    row = Row.of(x, None, jnp.asarray(checks.TWO_ROWS))._replace(measures=True)
    return jax.jit(lambda x, t: module.remember(x, t, row))(x, t)


def _distances(module, x, t, ids):
    """Of one row, from how the definition reads every token."""
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    w, found, args = params["down"], [], (module.settings, params, x, t, ids)
    without = definitions.in_place_reads(*args, has_gap=False)[0]
    for read, other in zip(definitions.in_place_reads(*args)[0], without, strict=True):
        target, gap = read.teacher @ w, (read.teacher - read.student) @ w
        rows = target, gap, target - read.student @ read.weight
        rows += (read.teacher - read.student) @ read.weight, read.z_out @ (read.weight - w)
        move = read.student @ (read.weight - w)
        sizes = np.linalg.norm(gap) * np.linalg.norm(move)
        cosine = gap @ move / sizes if read.has_memory else 0.0
        windows = np.linalg.norm(read.z_out @ (read.weight - other.weight))
        found.append([*map(np.linalg.norm, rows), read.has_memory, cosine, windows])
    return np.array(found, float).T


MEASURED = ["continued", "student output", "leaking", "ideal", "corrected", "normalized errors"]


@pytest.mark.parametrize("name", MEASURED)
def test_distances_to_the_teacher_are_those_of_the_definition(name, float64):
    """Several documents in a row, the last chunk ragged."""
    module = _module(name)
    x, t = checks.draw(1, (2, 14, D), (2, 14, D))
    rows = [_distances(module, x[i], t[i], checks.TWO_ROWS[i]) for i in (0, 1)]
    y, found = _measured(module, x, t)
    expected = Distillation(*np.stack(rows, axis=1))
    checks.assert_close(found._replace(is_moved=found.is_moved.astype(float)), expected)
    assert 0 < found.is_moved.mean() < 1
    row = Row.of(x, None, jnp.asarray(checks.TWO_ROWS))
    checks.assert_close(y, jax.jit(module.remember)(x, t, row)[0])


def test_without_a_gap_nothing_is_moved(float64):
    (x,) = checks.draw(1, (2, 14, D))
    _, found = _measured(_module("ideal"), x, x)
    assert not found.off.any()
    assert found.on.max() < 1e-14
    assert not found.is_moved.any()


def test_a_memory_that_reads_other_shapes_is_refused(float64, monkeypatch):
    monkeypatch.setitem(METHODS, "hebbian", outside_method())
    config = block_configs(config_of("hebbian"))[0].mlp
    layer = checks.randomize(config.layer, config)
    monkeypatch.setattr(type(layer.memory(4)), "read", lambda self, state, z: self.w_base + state)
    words = "Hebbian.read gives y [2, 3, |and the layer needs [2, 3, 4, 8]"
    checks.refused(words, layer, *checks.draw(0, (2, 10, 8), (2, 10, 8)))


def test_the_size_of_a_memory_is_of_rows_that_end_in_a_token_where_some_do():
    """Padding, segment 0, would reset it, and be all that it measures."""
    config = config_of("ipttcd", memory=_ipttcd(form="blocked"))
    model = checks.randomize(Transformer, config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 12)))
    ids = jnp.ones((2, 12), jnp.int32)

    def stats(ids):
        return model.forward(tokens[: len(ids)], ids)[1]

    padded = ids.at[1, 9:].set(0)
    both, first = stats(padded), stats(ids[:1])
    for name in ("memory_ratio", "window_share"):
        checks.assert_close(getattr(both, name), getattr(first, name))
        assert np.abs(getattr(stats(ids), name) - getattr(first, name)).max() > 1e-6
        assert np.isfinite(getattr(stats(padded[1:]), name)).all()


@pytest.mark.parametrize("memory", [_ipttcd(form="blocked"), _ipttcd(half_lives=(4.0, 90.0))])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_narrow_types_take_wide_streams_and_documents(memory, state):
    """Where the stream of a caller is float32, and where states are bfloat16."""
    precision = Precision(compute="bfloat16", state=state)
    config = config_of("ipttcd", memory=memory, precision=precision)
    block = checks.randomize(Block, block_configs(config)[0])
    h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, config.dim)), jnp.float32)
    ids = jnp.repeat(jnp.arange(4), 6)[None].repeat(2, 0)

    def loss(h, ids=None):
        return block(h, segment_ids=ids).astype(jnp.float32).sum()

    for given in ((h,), (h, ids)):
        assert np.isfinite(jax.grad(loss)(*given)).all()
    states = block.start(2, None)
    piece = Piece.of(h[:, :1], 0, chunk_size=L, window=config.window)
    after = jax.eval_shape(lambda state: block.extend(h[:, :1], piece, state)[1], states)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, states)
