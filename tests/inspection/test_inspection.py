"""Inspections of small models: their losses are the scorer's, their controls those of the task,
text is escaped, and what has no such memory is refused by name."""

import io
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, randomize, refused
from commands import ROOT, output
from flax import nnx
from small_models import CHUNK, SETTINGS, byte_model, config_of
from tiny_run import save_text_model

from ttcd_jax import Transformer, inspect
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.inspection import reading, with_stream_memory
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.models.config import switched_off
from ttcd_jax.precision import Precision
from ttcd_jax.train.loss import token_scores
from ttcd_jax.train.state import with_params

DELTA = SETTINGS["ipttcd"].replace(form="auto", corrects_errors=True)
TEXTS = ["<b>&p;\nab, ab", "a longer second text"]
PAGE = ROOT / "docs" / "inspect.md"


def _run(config):
    model = randomize(Transformer, config, std=0.5)
    return SimpleNamespace(model=model, config=config, tokenizer=ByteTokenizer())


@pytest.fixture(scope="module")
def seen():
    """Two layers with the delta rule, a row of 24 tokens in parts of 8."""
    config = config_of("ipttcd", memory=DELTA, fast_layers=(0, 1), vocab_size=258)
    run = _run(config.replace(precision=byte_model().precision))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PART", 2 * CHUNK)
        found = inspect(run, (TEXTS[0] * 2)[:23])
        found.loss_off, found.with_shuffled_keys()  # in parts too
    return found


def test_losses_are_those_of_a_scorer_with_and_without_controls(seen):
    rows, config = [seen.tokens], seen.run.config
    params = nnx.to_pure_dict(nnx.state(seen.run.model, nnx.Param))

    def scored(config):
        return Scorer(with_params(config, params)).losses(rows)[0].losses

    assert np.isnan(seen.loss_on[0])
    assert_close(seen.loss_on[1:], scored(config), 1e-5)
    assert_close(seen.loss_off[1:], scored(switched_off(config, 40)), 1e-5)
    other = np.roll(seen.tokens, 3)
    scorer = Scorer(seen.run.model)
    for name, found in {
        "shuffled": seen.with_shuffled_keys(),
        "foreign": seen.with_memory_of(other),
    }.items():
        both = [seen.tokens, other]
        expected = scorer.controlled(both, name, [x[1:] for x in both])[0].losses
        assert_close(found[1:], expected, 1e-5)
    assert np.abs(seen.without_layer(1) - seen.loss_on)[1:].max() > 1e-4
    assert np.abs(seen.without_layer(1) - seen.without_layer(0))[1:].max() > 1e-4


def test_what_bfloat16_computes_is_summed_and_saved_in_float32():
    config = config_of("ipttcd", memory=DELTA, fast_layers=(0, 1), vocab_size=258)
    found = inspect(_run(config.replace(precision=Precision(compute="bfloat16"))), TEXTS[0] * 60)
    file = io.BytesIO()
    np.savez(file, **found.arrays())
    file.seek(0)
    gate = np.load(file)["gate"]
    assert gate.dtype == np.float32
    assert found.table()[0]["gate"] == pytest.approx(gate[0].mean(dtype=float), rel=1e-4)
    assert found.memory(0).walk.writes.dtype == float


def test_arrays_reads_and_pictures_fit_each_other(seen, tmp_path):
    found, count = seen.arrays(), len(seen.tokens)
    reads = seen.reads(range(count))
    assert_close(np.linalg.norm(reads.read, axis=-1), seen.read_norm, 1e-5)
    total = reads.share.sum(-1)
    assert_close(total[:, CHUNK:], np.ones_like(total[:, CHUNK:]))
    assert not total[:, :CHUNK].any()  # a chunk reads the chunks before it
    parts = sum(seen.contribution(1, count - 1, writer) for writer in range(count))
    assert_close(parts, reads.read[1, -1])
    assert np.abs(seen.removal(1, count - 1, 5) - seen.contribution(1, count - 1, 5)).max() > 0
    assert found["loudness"].shape == (2, len(found["window_share"][0]) + 1)
    assert (found["loudness"][:, 0] == 0).all()
    assert "".join(seen.texts) == (TEXTS[0] * 2)[:23]
    assert seen.find("ab").tolist() == [8, 12, 21]
    best = seen.writers(count - 1)
    assert (best.positions < count - 1).all()
    assert best.shares[0] == max(best.shares)
    assert all(text.isprintable() for text in best.texts)
    np.savez(io.BytesIO(), **found)
    shown = "".join(seen.show(x)._repr_html_() for x in ("gain", "gate", "write", "loudness"))
    shown += seen.show("reads", layer=1)._repr_html_() + seen._repr_html_() + best._repr_html_()
    assert not re.search(r"<b>|<script|https?:", shown)
    assert "&lt;" in shown
    refused("by the name 'x': there are gain", seen.show, "x")
    refused("layer 7 is none of the inspected", seen.show, "gate", layer=7)
    refused("queries 99 .. 99 of a row", seen.reads, [99])
    refused("has 2 tokens: give 24 or more", seen.with_memory_of, [3, 4])


@pytest.mark.parametrize("is_stream", [True, False])
def test_documents_of_a_row_have_losses_and_reads_of_their_own(is_stream, float64):
    """Of a plain model that is given a memory of its stream, and of IP-TTT, which forgets."""
    run = _run(config_of("full" if is_stream else "ipttt", vocab_size=258))
    run._replace, plain = lambda **fields: SimpleNamespace(**vars(run) | fields), run
    if is_stream:
        run = with_stream_memory(run, window=3, layer=0, sinks=1)
    seen, begin = inspect(run, TEXTS), len(TEXTS[0]) + 1
    tokens, ids = jnp.asarray(seen.tokens)[None], jnp.asarray(seen.segments)[None]

    def check(found, model):
        hidden, _ = model.forward(tokens, ids)
        expected = token_scores(hidden, model.head_weight(), jnp.roll(tokens, -1, axis=1))[0][0]
        assert np.flatnonzero(np.isnan(found)).tolist() == [0, begin]
        is_inside = np.isfinite(found)[1:]
        assert_close(found[1:][is_inside], expected[:-1][is_inside])

    check(seen.loss_on, run.model)
    reads, share = seen.reads(), seen.window_share[0]
    across = (reads.queries[:, None] >= begin) != (np.arange(len(seen.tokens)) >= begin)
    assert not reads.weight[0][across].any()
    assert np.abs(reads.weight).max() > 0
    assert np.allclose(share[share == share], 1) if is_stream else np.isnan(share).all()
    if is_stream:  # without its memory it is the plain model under the window
        fields = {"window": 3, "sink_tokens": 1}
        windowed = plain.config.overridden(vars(plain.config) | fields, fields)
        params = nnx.to_pure_dict(nnx.state(plain.model, nnx.Param))
        check(seen.loss_off, with_params(windowed, params))
        assert np.nanmax(np.abs(seen.gain)) > 1e-4
        other = SimpleNamespace(model=plain.model, config=windowed)
        refused("is not below the model's, 3", with_stream_memory, other, window=3)
        refused("has its own memory", with_stream_memory, run)


@pytest.mark.parametrize("method", ["swa", "lact", "deltanet", "ipttcd_ideal", "orthogonal"])
def test_what_is_no_sum_of_errors_is_refused_by_name(method):
    changes = {}
    if method == "orthogonal":
        method = "ipttcd"
        changes = {"memory": SETTINGS[method].replace(orthogonalizes_updates=True)}
    refused(f"method '{method}'", inspect, _run(config_of(method, **changes)), [1, 2, 3])


def test_the_page_and_the_command(tmp_path, monkeypatch):
    save_text_model(tmp_path / "examples/model", byte_model())
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, namespace)
    assert all(np.isfinite(x) for x in namespace["more"].values())
    (tmp_path / "text").write_text(TEXTS[0] * 3)
    line = (f"--run_dir={tmp_path / 'examples/model'}", f"--text={tmp_path / 'text'}")
    line = (*line, f"--output={tmp_path / 'out'}", "--query=ab, ab", f"--query={TEXTS[0] * 2}")
    printed = output("inspect_text", *line, "--max_tokens=30")
    assert re.search(r"(?m)^no gap +\d", printed)
    assert "Who answered 'ab, ab', token" in printed
    assert f"Who answered {TEXTS[0] * 2!r}, token 1\nnothing was read\n" in printed
    page = (tmp_path / "out/index.html").read_text()
    assert "<svg" in page
    assert "&lt;" in page
    assert "<b>" not in page
    assert np.load(tmp_path / "out/arrays.npz")["loss_on"].shape == (30,)
