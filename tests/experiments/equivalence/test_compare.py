"""Two ways to compute a run: equal ones are found equal, every change is found."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import randomize
from flax import nnx
from scipy import special
from small_models import config_of

from experiments.equivalence import compare as equivalence
from experiments.equivalence.compare import (
    Distances,
    agreement,
    compare_layers,
    compare_predictions,
    distances,
    summarize,
)
from experiments.equivalence.ways import Computed, Way, parse_way
from ttcd_jax.errors import NonFiniteError, UserError
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision
from ttcd_jax.train.state import with_params

CONFIG = config_of("ipttcd", window=6, student_window=3, precision=Precision())
SHALLOW = CONFIG.replace(num_layers=1)
ROWS = {
    name: np.random.default_rng(seed).integers(0, 11, (3, 14))
    for seed, name in enumerate(("tokens", "targets"))
}
EXACT = {"equal_share": 1, "within_1_ulp": 1, "within_2_ulp": 1}
EXACT |= {"max_ulp": 0, "max_relative_error": 0}


@functools.cache
def _model(config=CONFIG):
    return randomize(Transformer, config, std=0.3)


def _computed(config=CONFIG, **way):
    return Computed(Way(**way), _model(config))


def _with_rate(eta):
    params = nnx.to_pure_dict(nnx.state(_model(), nnx.Param))
    changed = CONFIG.replace(memory=CONFIG.memory.replace(eta=eta))
    return Computed(Way(), with_params(changed, params))


def _shares(layers):
    return [row["equal_share"] for row in layers]


# --------------------------------------------------------------------------------- ways


def test_parts_name_a_way():
    assert parse_way([]) == Way()
    found = parse_way(["xla", "float32", "attention", "streamed:512"])
    assert found == Way(
        attention="xla", compute="float32", form="attention", path="streamed", piece_size=512
    )
    assert found.resolved(CONFIG) == {
        "attention": "xla",
        "form": "attention",
        "compute": "float32",
        "path": "streamed",
        "piece_size": 512,
    }
    assert Way().applied(CONFIG) == CONFIG
    plain = CONFIG.replace(method="deltanet", fast_layers=(), memory=None)
    assert Way(compute="bfloat16").resolved(plain)["form"] is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["cuda"], "'cuda' is no part of a way to compute (attention: xla, triton"),
        (["xla", "lse"], "'xla' and 'lse' are both attention: name one"),
        (["decoded", "forward"], "'decoded' and 'forward' are both path"),
        (["decoded:4"], "'decoded:4': only streamed takes a number of tokens"),
        (["streamed:x"], "'streamed:x': only streamed takes a number of tokens"),
        (["streamed:0"], "piece_size 0 must be at least 1"),
    ],
)
def test_parts_that_name_no_way_are_refused(parts, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_way(parts)


def test_a_way_that_a_run_lacks_is_refused():
    with pytest.raises(UserError, match="method 'lact' has no memory with forms"):
        Way(form="blocked").applied(CONFIG.replace(method="lact", fast_layers=(), memory=None))
    with pytest.raises(UserError, match="JAX_ENABLE_X64=1"):
        Way(compute="float64").applied(CONFIG)
    with pytest.raises(ValueError, match="implementation 'triton'"):
        _computed(attention="triton").check(1, 14, decodes=False)
    ahead = CONFIG.replace(memory=CONFIG.memory.replace(is_conv_causal=False))
    Computed(Way(), _model(ahead)).check(1, 14, decodes=False)
    with pytest.raises(UserError, match="not there yet"):
        Computed(Way(), _model(ahead)).check(1, 14, decodes=True)


def test_hidden_states_that_are_not_finite_are_named():
    params = nnx.to_pure_dict(nnx.state(_model(), nnx.Param))
    params["final_norm"] = params["final_norm"].at[3].set(jnp.inf)
    broken = Computed(Way(), with_params(CONFIG, params))
    with pytest.raises(NonFiniteError, match="row 0, position 0 is not finite"):
        broken.hidden(ROWS["tokens"])


@pytest.mark.parametrize("path", ["streamed", "decoded"])
def test_every_path_has_the_same_hidden_states(path):
    expected = _computed(SHALLOW).hidden(ROWS["tokens"])
    found = _computed(SHALLOW, path=path, piece_size=4).hidden(ROWS["tokens"])
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_every_path_writes_the_tokens_of_a_pass_per_token():
    prompts = [row[:length] for row, length in zip(ROWS["tokens"], (8, 4), strict=False)]
    expected = []
    for prompt in prompts:
        tokens = np.zeros((1, 24), np.int64)
        tokens[0, : len(prompt)] = prompt
        for position in range(len(prompt), len(prompt) + 12):
            logits = _model(SHALLOW).logits(_computed(SHALLOW).hidden(tokens))
            tokens[0, position] = logits[0, position - 1].argmax()
        expected.append(tokens[0, len(prompt) : len(prompt) + 12])
    assert np.unique(expected).size > 2
    for path in ("forward", "streamed", "decoded"):
        draft = np.zeros((2, 12), np.int32)
        found = _computed(SHALLOW, path=path, piece_size=4).greedy(prompts, 12, 24, draft)
        np.testing.assert_array_equal(found, expected)


# ------------------------------------------------------------------------------- layers


def test_units_are_those_of_the_narrower_dtype():
    x = jnp.asarray([1.0, -2.0, 3.0, 2**-126], jnp.bfloat16)
    wide = x.astype(jnp.float32) * jnp.asarray([1, 1 + 2**-7, 1 + 2**-6, -1], jnp.float32)
    for pair in ((x, wide), (wide, x)):
        found = agreement(*pair)
        assert (found["equal_share"], found["within_1_ulp"]) == (0.25, 0.5)
        # 3 has exponent 1: 3 / 64 are three of its units of 1 / 64. Signs are far apart.
        assert found["within_2_ulp"] == 0.5
        assert found["max_ulp"] == 2 * 128
    with jax.enable_x64(True):
        x = jnp.asarray([1.0, -1e300])
        assert agreement(x, x * jnp.asarray([1 + 2**-52, -1.0]))["within_1_ulp"] == 0.5


def test_a_way_and_itself_are_the_same_to_the_last_bit():
    found = compare_layers(_computed(), _computed(), ROWS["tokens"])
    assert [row | EXACT for row in found["layers"]] == found["layers"]
    assert found["whole_model"] == EXACT
    assert found["attention"] is None
    compared = compare_predictions(_computed(), _computed(), ROWS, batch_size=2)
    assert compared.kl.shape == (3, 14)
    for part in (compared.kl, compared.tv, compared.is_flip):
        assert not part.any()
    np.testing.assert_array_equal(compared.reference_nll, compared.candidate_nll)


def test_another_rate_shows_in_the_layer_that_has_it():
    found = compare_layers(_computed(), _with_rate(0.5), ROWS["tokens"])
    fast, last = _shares(found["layers"])
    assert fast < 0.9
    assert last == 1
    assert found["whole_model"]["equal_share"] < 0.9
    compared = compare_predictions(_computed(), _with_rate(0.5), ROWS, batch_size=3)
    assert not compared.kl[:, :4].any()  # the first chunk reads no memory
    assert compared.kl[:, 4:].min() > 0


def test_a_changed_weight_shows_in_its_layer():
    params = nnx.to_pure_dict(nnx.state(_model(), nnx.Param))
    group = params["group_1"]["block_0"]["mlp"]
    group["down"] = group["down"].at[0, 0, 0].add(1e-3)
    changed = Computed(Way(), with_params(CONFIG, params))
    first, last = _shares(compare_layers(_computed(), changed, ROWS["tokens"])["layers"])
    assert first == 1
    assert last < 1


def test_two_attentions_are_compared_alone():
    reference = _computed(SHALLOW, attention="reference")
    found = compare_layers(reference, _computed(SHALLOW, attention="lse"), ROWS["tokens"])
    (row,) = found["attention"]
    assert 0 < row["max_relative_error"] < 1e-5
    # What has no attention has none to compare.
    delta = SHALLOW.replace(method="deltanet", fast_layers=(), memory=None)
    reference = _computed(delta, attention="reference")
    found = compare_layers(reference, _computed(delta, attention="xla"), ROWS["tokens"])
    assert found["attention"] is None
    assert _shares(found["layers"]) == [1]


def test_narrow_layers_are_within_roundings_of_wide_ones():
    found = compare_layers(_computed(), _computed(compute="bfloat16"), ROWS["tokens"])
    for row in found["layers"]:
        assert row["within_1_ulp"] > row["equal_share"] > 0.2
        assert 1e-4 < row["max_relative_error"] < 0.1


def test_a_state_is_compared_as_a_whole():
    streamed = _computed(SHALLOW, path="streamed", piece_size=4)
    found = compare_layers(_computed(SHALLOW), streamed, ROWS["tokens"])
    assert (found["layers"], found["attention"]) == (None, None)
    assert "only the whole model" in found["note"]
    assert found["whole_model"]["max_relative_error"] < 1e-5


# ------------------------------------------------------------------------- distribution


def _expected(reference, candidate, heads, targets):
    """The definitions, on all logits, in float64."""
    log_p, log_q = (
        special.log_softmax(np.asarray(h, np.float64) @ np.asarray(head, np.float64).T, axis=-1)
        for h, head in zip((reference, candidate), heads, strict=True)
    )
    p, q = np.exp(log_p), np.exp(log_q)
    nll = (-np.take_along_axis(x, targets[..., None], -1)[..., 0] for x in (log_p, log_q))
    is_flip = p.argmax(-1) != q.argmax(-1)
    return Distances((p * (log_p - log_q)).sum(-1), np.abs(p - q).sum(-1) / 2, is_flip, *nll)


@pytest.mark.parametrize(
    ("scale", "noise", "tolerance"), [(1, 0.5, 1e-5), (1, 1e-4, 1e-2), (60, 1.0, 1e-4)]
)
def test_distances_are_those_of_all_logits_in_float64(monkeypatch, scale, noise, tolerance):
    """Also where float32 holds the distance in its last digits, and where probabilities vanish; in
    blocks of four positions, the last one incomplete."""
    jax.clear_caches()
    monkeypatch.setattr(equivalence, "_LOGITS", 4 * 37)
    rng = np.random.default_rng(0)
    h, heads = rng.standard_normal((3, 5, 8)), rng.standard_normal((2, 37, 8))
    h, heads = np.float32(scale * h), np.float32(heads)
    heads[1] = heads[0]
    other = np.float32(h + noise * rng.standard_normal(h.shape))
    targets = rng.integers(0, 37, (3, 5))
    found = distances(h, other, *heads, targets)
    for ours, theirs in zip(found, _expected(h, other, heads, targets), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-6 * noise)
    assert np.asarray(found.kl).min() >= 0


def test_the_summary_is_of_all_positions():
    rng = np.random.default_rng(0)
    kl = np.float32(10 ** rng.uniform(-10, 0, (4, 100)))
    kl[0, :3] = 0
    flips = rng.random((4, 100)) < 0.1
    found = summarize(Distances(kl, kl / 2, flips, kl + 1, kl + 2))
    assert (found["rows"], found["tokens"]) == (4, 400)
    assert found["kl"]["mean"] == pytest.approx(kl.mean())
    assert found["kl"]["50%"] == pytest.approx(np.median(kl))
    assert found["kl"]["max"] == kl.max()
    histogram = found["kl"]["histogram"]
    assert (sum(histogram["counts"]), histogram["below"], histogram["above"]) == (397, 3, 0)
    assert found["candidate_nll"] - found["reference_nll"] == pytest.approx(1)
    assert [(row["start"], row["stop"]) for row in found["by_position"]] == [
        *((0, 32), (32, 64), (64, 100))
    ]
    flipped = sum(row["flip_share"] * row["tokens"] for row in found["by_position"])
    assert flipped == pytest.approx(flips.sum())
    assert found["flip_share"] == pytest.approx(flips.mean())
