"""Two variants of a run: equal ones are found equal, every change is found; the command."""

import functools
import json

import commands
import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from checks import randomize, refused
from flax import nnx
from scipy import special
from small_models import byte_model, config_of
from ttcd_kernels.dispatch import Candidate
from ttcd_kernels.dual_window import api

from experiments.studies.equivalence import tasks
from experiments.studies.equivalence.tasks import FLIPS, KL, Distances, Kernel, Variant, agreement
from ttcd_jax import MemoryConfig, Precision, Transformer
from ttcd_jax.errors import NonFiniteError
from ttcd_jax.train.state import with_params

CONFIG = config_of("ipttcd", window=6, student_window=3, precision=Precision())
SHALLOW = CONFIG.replace(num_layers=1)
DELTA = SHALLOW.replace(method="deltanet", fast_layers=(), memory=None)
ROWS = {
    name: np.random.default_rng(seed).integers(0, 11, (3, 14))
    for seed, name in enumerate(("tokens", "targets"))
}
EXACT = {"equal_share": 1, "within_1_ulp": 1, "within_2_ulp": 1}
EXACT |= {"max_ulp": 0, "max_relative_error": 0}


@functools.cache
def _model(config=CONFIG):
    return randomize(Transformer, config, std=0.3)


def _computed(text="forward", config=CONFIG):
    return tasks.Computed(Variant.parse(text), _model(config))


def _changed(change, config=CONFIG):
    """The run with parameters that `change` changed in place."""
    params = nnx.to_pure_dict(nnx.state(_model(), nnx.Param))
    change(params)
    return tasks.Computed(Variant(), with_params(config, params))


def _by_row(cells):
    rows = {}
    for row, column, value in cells:
        rows.setdefault(row, {})[column] = value
    return rows


def _layers(*pair):
    return _by_row(tasks.layers(pair, ROWS["tokens"]))


def _predictions(*pair):
    return tasks.predictions(pair, ROWS, batch_size=2)


def test_parts_name_a_variant():
    assert Variant.parse("forward") == Variant()
    found = Variant.parse("xla,float32,attention,streamed:512")
    assert found == ("xla", "attention", "float32", 512)
    assert str(found) == "xla, attention, float32, streamed:512"
    applied = found.applied(CONFIG)
    assert (applied.attention_implementation, applied.memory.form) == ("xla", "attention")
    assert applied.precision.compute == "float32"
    assert Variant().applied(CONFIG) == CONFIG
    assert str(Variant.parse("streamed:1")) == "decoded"


def test_what_names_no_variant_or_one_that_a_run_lacks_is_refused():
    only_streamed = "only streamed takes a number of tokens"
    for parts, message in {
        "cuda": "'cuda' is not a part of a variant (attention: xla, triton",
        "xla,mosaic": "'xla' and 'mosaic' are both attention: name one",
        "decoded,forward": "'decoded' and 'forward' are both path",
        **{x: f"{x!r}: {only_streamed}" for x in ("decoded:4", "streamed:x", "streamed:0")},
    }.items():
        refused(message, Kernel, candidate=parts)
    lact, tokens = DELTA.replace(method="lact"), ROWS["tokens"]
    refused("method 'lact' has no memory with forms", Variant(form="blocked").applied, lact)
    refused("JAX_ENABLE_X64=1", Variant(compute="float64").applied, CONFIG)
    for parts in ("triton", "streamed:8,mosaic"):
        refused("implementation '", _computed(parts).hidden, tokens, error=ValueError)
    ahead = CONFIG.replace(memory=CONFIG.memory.replace(is_conv_causal=False))
    refused("not there yet", _computed("streamed", ahead).hidden, tokens)
    same = Kernel(reference="xla,blocked", candidate="xla,blocked,float32")
    refused("the same variant, xla, blocked, float32, forward", same.pair, _model())
    broken = _changed(lambda params: params.update(final_norm=jnp.full(8, jnp.inf)))
    refused("row 0, position 0 is not finite", broken.hidden, tokens, error=NonFiniteError)


def test_units_are_those_of_the_narrower_dtype():
    x = jnp.asarray([1.0, -2.0, 3.0, 2**-126], jnp.bfloat16)
    wide = x.astype(jnp.float32) * jnp.asarray([1, 1 + 2**-7, 1 + 2**-6, -1], jnp.float32)
    for pair in ((x, wide), (wide, x)):
        found = _by_row(agreement("x", *pair))["x"]
        assert (found["equal_share"], found["within_1_ulp"]) == (0.25, 0.5)
        # 3 has exponent 1: 3 / 64 are three of its units of 1 / 64. Signs are far apart.
        assert found["within_2_ulp"] == 0.5
        assert found["max_ulp"] == 2 * 128
    with jax.enable_x64(True):
        x = jnp.asarray([1.0, -1e300])
        found = _by_row(agreement("x", x, x * jnp.asarray([1 + 2**-52, -1.0])))["x"]
        assert found["within_1_ulp"] == 0.5


def test_a_variant_and_itself_are_the_same_to_the_last_bit():
    same = _layers(_computed(), _computed())
    assert same == dict.fromkeys(("layer 0", "layer 1", "whole model"), EXACT)
    compared = _predictions(_computed(), _computed())
    assert compared.kl.shape == (3, 14)
    for part in (compared.kl, compared.tv, compared.is_flip):
        assert not part.any()
    np.testing.assert_array_equal(compared.reference_nll, compared.candidate_nll)


@pytest.mark.parametrize("variant", ["xla,attention", "decoded", "streamed:5"])
def test_forms_and_paths_agree(variant):
    pair = _computed("xla,blocked"), _computed(variant)
    kl, tv, is_flip, *losses = _predictions(*pair)
    assert kl.max() < 1e-9
    assert tv.max() < 1e-5
    assert not is_flip.any()
    np.testing.assert_allclose(*losses, atol=1e-5)
    found = _layers(*pair)
    layers = ["layer 0", "layer 1"] if variant == "xla,attention" else []
    assert [*found] == [*layers, "whole model"]
    assert found["whole model"]["max_relative_error"] < 1e-5


def test_another_rate_weight_or_precision_shows_in_the_layers_that_have_it():
    faster = _changed(lambda _: None, CONFIG.replace(memory=CONFIG.memory.replace(eta=0.5)))
    found = _layers(_computed(), faster)
    assert max(found["layer 0"]["equal_share"], found["whole model"]["equal_share"]) < 0.9
    assert found["layer 1"] == EXACT
    compared = _predictions(_computed(), faster)
    assert not compared.kl[:, :4].any()  # the first chunk reads no memory
    assert compared.kl[:, 4:].min() > 0

    def change(params):
        mlp = params["group_1"]["block_0"]["mlp"]
        mlp["down"] = mlp["down"].at[0, 0, 0].add(1e-3)

    found = _layers(_computed(), _changed(change))
    assert found["layer 0"] == EXACT
    assert found["layer 1"]["equal_share"] < 1
    found = _layers(_computed(), _computed("bfloat16"))
    for layer in ("layer 0", "layer 1"):
        assert found[layer]["within_1_ulp"] > found[layer]["equal_share"] > 0.2
        assert 1e-4 < found[layer]["max_relative_error"] < 0.1


def test_another_attention_shows_where_there_is_one(monkeypatch):
    another = Candidate(definitions.dual_window)
    monkeypatch.setitem(api.CANDIDATES, "mosaic", another)
    found = _layers(_computed("xla", config=SHALLOW), _computed("mosaic", config=SHALLOW))
    assert 0 < found["layer 0"]["max_relative_error"] < 1e-5
    found = _layers(_computed("mosaic", config=DELTA), _computed("xla", config=DELTA))
    assert found == {"layer 0": EXACT, "whole model": EXACT}


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
    monkeypatch.setattr(tasks, "_LOGITS", 4 * 37)
    rng = np.random.default_rng(0)
    h, heads = rng.standard_normal((3, 5, 8)), rng.standard_normal((2, 37, 8))
    h, heads = np.float32(scale * h), np.float32(heads)
    heads[1] = heads[0]
    other = np.float32(h + noise * rng.standard_normal(h.shape))
    targets = rng.integers(0, 37, (3, 5))
    found = tasks.distances([h, other], [*heads], targets)
    for ours, theirs in zip(found, _expected(h, other, heads, targets), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-6 * noise)
    assert np.asarray(found.kl).min() >= 0


def test_the_summary_is_of_all_positions():
    rng = np.random.default_rng(0)
    kl = np.float32(10 ** rng.uniform(-10, 0, (4, 100)))
    flips = rng.random((4, 100)) < 0.1
    found = _by_row(tasks.summarize(Distances(kl, kl / 2, flips, kl + 1, kl + 2)))
    assert found[KL]["mean"] == pytest.approx(kl.mean())
    assert found[KL]["50%"] == pytest.approx(np.median(kl))
    assert found[KL]["max"] == kl.max()
    assert found["the candidate's loss less it"]["mean"] == pytest.approx(1, rel=1e-6)
    places = {"0-31": 32, "32-63": 32, "64-99": 36}
    assert found.keys() >= places.keys()
    flipped = sum(4 * found[place][FLIPS] * size for place, size in places.items())
    assert flipped == pytest.approx(flips.sum())
    assert found[FLIPS]["mean"] == found["all"][FLIPS] == pytest.approx(flips.mean())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run at step 7, whose memory is not zero, beside a text."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    text = "".join(f"Sentence {i} of a text. And another one.\n" for i in range(500))
    run_dir.with_name("text.txt").write_text(text)
    memory = MemoryConfig(chunk_size=8, teacher_conv_init="identity")
    tiny_run.save_text_model(run_dir, byte_model(memory=memory, init_std=0.5))
    return run_dir


def _compare(run_dir, candidate, *options):
    names = f"--run_dir={run_dir}", "--reference=xla,blocked", f"--candidate={candidate}"
    sizes = "--max_rows=3", "--batch_size=2", f"--text={run_dir.with_name('text.txt')}"
    return commands.run("equivalence", *names, *sizes, *options)


def test_a_mistake_is_one_line_before_anything_is_computed(run_dir):
    for candidate, option, status, message in (
        ("triton", "--seq_len=32", 2, "implementation 'triton': "),
        ("bfloat16", "--lengths=64", 2, "no option '--lengths=64': it takes batch_size="),
        ("bfloat16", "--seq_len=50000", 3, "no document fills a row: the longest"),
    ):
        result = _compare(run_dir, candidate, option)
        assert result.stdout == ""
        assert message in commands.mistake(result, status)
    assert not (run_dir / "eval").exists()


def test_precision_shows_at_both_levels_a_limit_stops_and_the_report_shows_all(run_dir, tmp_path):
    result = _compare(run_dir, "xla,blocked,bfloat16,streamed:16", "--max_kl=1e-9")
    assert result.returncode == 1
    assert _compare(run_dir, "xla,attention", "--max_flip_share=1").returncode == 0
    tables = {}
    for file in run_dir.glob("eval/*bfloat16*/results.json"):
        stored = json.loads(file.read_text())
        assert f"written to {file.parent}\n" in result.stdout
        assert (stored["step"], stored["facts"]["environment"]["device"]) == (7, "cpu")
        assert file.with_name(f"{stored['task']}.svg").read_text().startswith("<svg")
        assert file.with_suffix(".csv").exists()
        tables[stored["task"]] = stored["table"]
    kl, *_ = tables["equivalence_distribution"]
    assert 0 < kl["50%"] < 1e-2
    assert result.stderr == f"KL mean {kl['mean']:.3g} is above --max_kl 1e-09\n"
    (whole,) = tables["equivalence_kernel"]
    assert 0 < whole["equal_share"] < 1
    (form,) = run_dir.glob("eval/*distribution*attention*/results.json")
    assert 0 < json.loads(form.read_text())["table"][0]["max"] < 1e-9
    printed = commands.output("report", f"--run_dir={run_dir}", f"--output={tmp_path}")
    assert printed.count("IP-TTCD, xla, attention, forward against xla, blocked, forward") == 2 + 6
    for title in ("Units in the last place", "Next tokens"):
        assert f"\n{title}" in printed
    assert (tmp_path / "equivalence_kernel.svg").exists()
