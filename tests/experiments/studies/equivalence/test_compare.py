"""Two ways to compute a run: equal ones are found equal, every change is found."""

import functools
import re
import types

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import randomize
from flax import nnx
from scipy import special
from small_models import config_of
from ttcd_kernels.dispatch import Candidate
from ttcd_kernels.dual_window import api

from experiments.studies.equivalence import compare
from experiments.studies.equivalence.compare import Distances, agreement, compare_layers
from experiments.studies.equivalence.ways import Computed, Way, parse_way
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import NonFiniteError, UserError
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision
from ttcd_jax.tasks.ruler.samples import Sample
from ttcd_jax.train.state import with_params

CONFIG = config_of("ipttcd", window=6, student_window=3, precision=Precision())
SHALLOW = CONFIG.replace(num_layers=1)
DELTA = SHALLOW.replace(method="deltanet", fast_layers=(), memory=None)
ROWS = {
    name: np.random.default_rng(seed).integers(0, 11, (3, 14))
    for seed, name in enumerate(("tokens", "targets"))
}
TOKENIZER = ByteTokenizer()
EXACT = {"equal_share": 1, "within_1_ulp": 1, "within_2_ulp": 1}
EXACT |= {"max_ulp": 0, "max_relative_error": 0}


@functools.cache
def _model(config=CONFIG):
    return randomize(Transformer, config, std=0.3)


def _computed(*parts, config=CONFIG):
    return Computed(parse_way(parts), _model(config))


def _changed(change, config=CONFIG):
    """The run with parameters that `change` changed in place."""
    params = nnx.to_pure_dict(nnx.state(_model(), nnx.Param))
    change(params)
    return Computed(Way(), with_params(config, params))


def _layers(reference, candidate):
    """The rows of `compare_layers` by what they are of."""
    rows = compare_layers(reference, candidate, ROWS["tokens"])
    return {row.pop("outputs of"): row for row in rows}


def _predictions(reference, candidate):
    return compare.compare_predictions(reference, candidate, ROWS, batch_size=2)


# --------------------------------------------------------------------------------- ways


def test_parts_name_a_way():
    assert parse_way([]) == Way()
    found = parse_way(["xla", "float32", "attention", "streamed:512"])
    assert found == Way(attention="xla", compute="float32", form="attention", piece_size=512)
    assert found.resolved(CONFIG) == {
        "attention": "xla",
        "form": "attention",
        "compute": "float32",
        "path": "streamed",
        "piece_size": 512,
    }
    assert Way().applied(CONFIG) == CONFIG
    assert parse_way(["bfloat16", "decoded"]).resolved(DELTA)["form"] is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["cuda"], "'cuda' is no part of a way to compute (attention: xla, triton"),
        (["xla", "mosaic"], "'xla' and 'mosaic' are both attention: name one"),
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
        Way(form="blocked").applied(DELTA.replace(method="lact"))
    with pytest.raises(UserError, match="JAX_ENABLE_X64=1"):
        Way(compute="float64").applied(CONFIG)
    with pytest.raises(ValueError, match="implementation 'triton'"):
        _computed("triton").check(1, 14, decodes=False)
    ahead = CONFIG.replace(memory=CONFIG.memory.replace(is_conv_causal=False))
    _computed(config=ahead).check(1, 14, decodes=False)
    with pytest.raises(UserError, match="not there yet"):
        _computed(config=ahead).check(1, 14, decodes=True)


def test_hidden_states_that_are_not_finite_are_named():
    broken = _changed(lambda params: params.update(final_norm=jnp.full(8, jnp.inf)))
    with pytest.raises(NonFiniteError, match="row 0, position 0 is not finite"):
        broken.hidden(ROWS["tokens"])


def test_every_path_writes_the_tokens_of_a_pass_per_token():
    prompts = [row[:length] for row, length in zip(ROWS["tokens"], (8, 4), strict=False)]
    expected = []
    for prompt in prompts:
        tokens = np.zeros((1, 24), np.int64)
        tokens[0, : len(prompt)] = prompt
        for position in range(len(prompt), len(prompt) + 12):
            logits = _model(SHALLOW).logits(_computed(config=SHALLOW).hidden(tokens))
            tokens[0, position] = logits[0, position - 1].argmax()
        expected.append(tokens[0, len(prompt) : len(prompt) + 12])
    assert np.unique(expected).size > 2
    for path in ("forward", "streamed:4", "decoded"):
        draft = np.zeros((2, 12), np.int32)
        found = _computed(path, config=SHALLOW).greedy(prompts, 12, 24, draft)
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
    same = _layers(_computed(), _computed())
    assert same == dict.fromkeys(("layer 0", "layer 1", "whole model"), EXACT)
    compared = _predictions(_computed(), _computed())
    assert compared.kl.shape == (3, 14)
    for part in (compared.kl, compared.tv, compared.is_flip):
        assert not part.any()
    np.testing.assert_array_equal(compared.reference_nll, compared.candidate_nll)


def test_another_rate_shows_in_the_layer_that_has_it():
    faster = CONFIG.replace(memory=CONFIG.memory.replace(eta=0.5))
    changed = _changed(lambda params: None, faster)
    found = _layers(_computed(), changed)
    assert found["layer 0"]["equal_share"] < 0.9
    assert found["layer 1"] == EXACT
    assert found["whole model"]["equal_share"] < 0.9
    compared = _predictions(_computed(), changed)
    assert not compared.kl[:, :4].any()  # the first chunk reads no memory
    assert compared.kl[:, 4:].min() > 0


def test_a_changed_weight_shows_in_its_layer():
    def change(params):
        mlp = params["group_1"]["block_0"]["mlp"]
        mlp["down"] = mlp["down"].at[0, 0, 0].add(1e-3)

    found = _layers(_computed(), _changed(change))
    assert found["layer 0"] == EXACT
    assert found["layer 1"]["equal_share"] < 1


def test_another_attention_shows_where_there_is_one(monkeypatch):
    another = Candidate(definitions.dual_window)
    monkeypatch.setitem(api.CANDIDATES, "mosaic", another)
    found = _layers(_computed("xla", config=SHALLOW), _computed("mosaic", config=SHALLOW))
    assert 0 < found["layer 0"]["max_relative_error"] < 1e-5
    found = _layers(_computed("mosaic", config=DELTA), _computed("xla", config=DELTA))
    assert found == {"layer 0": EXACT, "whole model": EXACT}


def test_narrow_layers_are_within_roundings_of_wide_ones():
    found = _layers(_computed(), _computed("bfloat16"))
    for layer in ("layer 0", "layer 1"):
        assert found[layer]["within_1_ulp"] > found[layer]["equal_share"] > 0.2
        assert 1e-4 < found[layer]["max_relative_error"] < 0.1


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
    monkeypatch.setattr(compare, "_LOGITS", 4 * 37)
    rng = np.random.default_rng(0)
    h, heads = rng.standard_normal((3, 5, 8)), rng.standard_normal((2, 37, 8))
    h, heads = np.float32(scale * h), np.float32(heads)
    heads[1] = heads[0]
    other = np.float32(h + noise * rng.standard_normal(h.shape))
    targets = rng.integers(0, 37, (3, 5))
    found = compare.distances(h, other, *heads, targets)
    for ours, theirs in zip(found, _expected(h, other, heads, targets), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-6 * noise)
    assert np.asarray(found.kl).min() >= 0


def test_the_summary_is_of_all_positions():
    rng = np.random.default_rng(0)
    kl = np.float32(10 ** rng.uniform(-10, 0, (4, 100)))
    flips = rng.random((4, 100)) < 0.1
    found = compare.summarize(Distances(kl, kl / 2, flips, kl + 1, kl + 2))
    assert (found["rows"], found["tokens"]) == (4, 400)
    assert found["kl"]["mean"] == pytest.approx(kl.mean())
    assert found["kl"]["50%"] == pytest.approx(np.median(kl))
    assert found["kl"]["max"] == kl.max()
    assert found["candidate_nll"] - found["reference_nll"] == pytest.approx(1)
    buckets = found["by_position"]
    assert [(row["start"], row["stop"]) for row in buckets] == [(0, 32), (32, 64), (64, 100)]
    flipped = sum(row["flip_share"] * row["tokens"] for row in buckets)
    assert flipped == pytest.approx(flips.sum())
    assert found["flip_share"] == pytest.approx(flips.mean())


# --------------------------------------------------------------------------------- answers


class _Way:
    """Answers sample i with `texts[i]`, then the end of the document, then noise."""

    def __init__(self, path, texts, noise):
        self.way = types.SimpleNamespace(path=path)
        self.texts, self.noise, self.drafts = texts, noise, []

    def greedy(self, prompts, num_tokens, length, draft):
        assert draft.shape == (len(prompts), num_tokens) == (len(prompts), 128)
        assert length == 400
        self.drafts.append(draft)
        found = np.full((len(prompts), num_tokens), self.noise)
        for row, prompt in zip(found, prompts, strict=True):
            assert prompt[0] == TOKENIZER.bos_id
            ids = TOKENIZER.encode(self.texts[TOKENIZER.decode(prompt)])
            row[: len(ids) + 1] = [*ids, TOKENIZER.eos_id]
        return found


def test_answers_have_both_scores_and_the_share_that_is_equal():
    samples = [Sample(f"text {i}", " is", ("One", "two"), 9, i) for i in range(3)]
    prompts = [sample.prompt for sample in samples]
    reference = _Way("forward", dict.fromkeys(prompts, "one TWO"), 1)
    candidate = _Way("streamed", reference.texts | {prompts[1]: "one"}, 2)
    sizes = {"length": 400, "batch_size": 2}
    ways = reference, candidate
    assert compare.compare_answers(*ways, "niah_multivalue", samples, TOKENIZER, **sizes) == {
        "samples": 3,
        "reference_score": 100.0,
        "candidate_score": pytest.approx(100 * 2.5 / 3),
        "identical_share": pytest.approx(2 / 3),  # tokens after the end do not count
    }
    # A way with a state answers first; the forward passes begin with its answer.
    assert not candidate.drafts[0].any()
    assert TOKENIZER.decode(reference.drafts[0][1]).startswith("one")
