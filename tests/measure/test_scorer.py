"""Scores and likelihoods are those of one forward pass, texts those of `Generation`, in the order
of the requests; an evaluation that goes on computes only what is missing."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, randomize
from damage import flip_bit
from devices import run_on_devices
from flax import nnx
from small_models import SETTINGS, byte_model, config_of

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.inference.generate import Generation, Request
from ttcd_jax.measure import scorer as module
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.models.transformer import Transformer

_stream = module.stream
BOUND = 1e-10  # sums in another order
LENGTHS = (3, 40, 1, 17, 9, 40, 2)


def _rows(lengths=LENGTHS, vocab_size=11):
    rng = np.random.default_rng(0)
    return [rng.integers(vocab_size, size=length) for length in lengths]


def _expected(model, row):
    """(losses, hits) of tokens 1 .. of a row, from all logits."""
    if len(row) == 1:
        return np.zeros(0), np.zeros(0, bool)
    logits = np.asarray(jax.nn.log_softmax(model(jnp.asarray(row[None, :-1]))[0]))
    return -logits[np.arange(len(row) - 1), row[1:]], logits.argmax(-1) == row[1:]


def _model(method, **changes):
    return randomize(Transformer, config_of(method, **changes))


def _ahead():
    memory = SETTINGS["ipttcd"].replace(is_conv_causal=False)
    return _model("ipttcd", memory=memory)


@pytest.mark.parametrize("one_pass", [1, 16, 2048])
@pytest.mark.parametrize("method", ["ipttcd", "full", "ahead"])
def test_losses_of_rows_of_any_length_are_those_of_one_pass(method, one_pass, float64, monkeypatch):
    monkeypatch.setattr(module, "ONE_PASS", one_pass)
    model = _ahead() if method == "ahead" else _model(method)
    rows = _rows()
    found = Scorer(model, batch_size=3).losses(rows)
    for row, scores in zip(rows, found, strict=True):
        assert scores.losses.shape == (len(row) - 1,)
        losses, is_hit = _expected(model, row)
        assert_close(scores.losses, losses, BOUND)
        np.testing.assert_array_equal(scores.is_hit, is_hit)


@pytest.mark.parametrize("max_repeated", [70, 71])
@pytest.mark.parametrize("method", ["ipttcd", "full", "ahead"])
def test_likelihoods_are_those_of_whole_rows_and_contexts_are_read_once(
    method, max_repeated, float64, monkeypatch
):
    monkeypatch.setattr(module, "MAX_REPEATED", max_repeated)
    model = _ahead() if method == "ahead" else _model(method)
    contexts = _rows((5, 30, 1))
    requests = [(contexts[i % 3], rest) for i, rest in enumerate(_rows((4, 1, 5, 9, 2, 6, 3)))]
    greedy = np.asarray(model(jnp.asarray(contexts[1][None])))[0, -1].argmax()
    requests.append((contexts[1], np.array([greedy])))
    num_read = []
    monkeypatch.setattr(
        module,
        "stream",
        lambda *args, **size: (num_read.append(int(args[3].sum())), _stream(*args, **size))[1],
    )
    found = Scorer(model, batch_size=2).loglikelihoods(requests)
    for (context, rest), result in zip(requests, found, strict=True):
        losses, is_hit = _expected(model, np.concatenate([context, rest]))
        part = slice(len(context) - 1, None)
        assert result.log_likelihood == pytest.approx(-losses[part].sum(), rel=BOUND)
        assert result.is_greedy == is_hit[part].all()
    assert found[-1].is_greedy
    if method != "ahead":
        of_continuations = sum(max(len(rest) - 1, 0) for _, rest in requests)
        is_shared = max_repeated < 71  # tokens of contexts that continuations share
        assert sum(num_read) == is_shared * (sum(map(len, contexts)) + of_continuations)


def test_a_mesh_changes_neither_losses_nor_likelihoods():
    meshes = ("2x2x1x2", "1x2x2x2")  # on the second, rows are cut along seq
    found = run_on_devices(Path(__file__).parent / "scoring_on_devices.py", *meshes)
    assert found.keys() == {*meshes}
    for mesh, distances in found.items():
        assert max(distances.values()) < BOUND, (mesh, distances)


def test_texts_are_those_of_generation_in_the_order_of_requests(monkeypatch):
    """Batches are of requests with as many new tokens, then of prompts as long."""
    model, tokenizer = randomize(Transformer, byte_model()), ByteTokenizer()
    prompts = ("a", "a long prompt of a text", "and another", "b", "the last")
    requests = [
        Request(tokens=tokenizer.encode(text), max_new_tokens=5 + i % 2, stop_tokens=())
        for i, text in enumerate(prompts)
    ]
    batches, num_read = [], []

    def generation(model, tokenizer, requests, **options):
        sizes = [(x.max_new_tokens, len(x.tokens)) for x in requests if x.max_new_tokens]
        batches.append(sizes)
        return Generation(model, tokenizer, requests, **options)

    monkeypatch.setattr(module, "Generation", generation)
    monkeypatch.setattr(module.RowProgress, "add", lambda self, rows, work: num_read.append(work))
    scorer = Scorer(model, tokenizer, batch_size=2)
    found = scorer.generate(requests)
    assert batches == [[(6, 23), (6, 1)], [(5, 11), (5, 8)], [(5, 1)]]
    whole = sum(len(x.tokens) + 1 + x.max_new_tokens for x in requests)
    assert sum(num_read) == whole
    for request, text in zip(requests, found, strict=True):
        events = Generation(scorer.inference, tokenizer, [request])
        assert text == "".join(event.text for event in events)


@pytest.mark.parametrize(("count", "num_shapes"), [(200, 1), (2000, 2), (20000, 6)])
def test_a_task_of_short_questions_has_few_programs(count, num_shapes, float64, monkeypatch):
    model, shapes = _model("ipttcd"), set()

    def read(tokens, lengths):
        shapes.add(tokens.shape)
        scores = np.zeros((len(tokens), tokens.shape[1] - 1))
        return module.Scores(scores, scores == 0)

    scorer = Scorer(model)
    monkeypatch.setattr(scorer, "_in_one_pass", read)
    lengths = np.random.default_rng(0).integers(2, 300, size=count)
    questions = [(row[:1], row[1:]) for row in _rows(lengths)]
    assert len(scorer.loglikelihoods(questions)) == count
    assert len(shapes) == num_shapes, shapes


def test_mistakes_are_refused():
    model = randomize(Transformer, byte_model())
    with pytest.raises(UserError, match="a context is empty: give it at least one token"):
        Scorer(model).loglikelihoods([(np.array([], int), np.array([1]))])
    with pytest.raises(DataError, match="9999"):
        Scorer(model).losses([np.array([1, 9999])])
    with pytest.raises(UserError, match="without a tokenizer"):
        Scorer(model).generate([Request(tokens=[1])])
    assert Scorer(model).losses([]) == []


class _Killed(BaseException):
    pass


def _scores(model, folder, rows, most=None, identity="task"):
    """(scores, batches computed), killed before batch `most`."""
    computed = []
    scorer = Scorer(model, batch_size=2, journal=Journal(folder, identity))
    read = scorer._in_one_pass

    def noted(tokens, lengths):
        if len(computed) == most:
            raise _Killed
        computed.append(lengths.tolist())
        return read(tokens, lengths)

    scorer._in_one_pass = noted
    try:
        return scorer.losses(rows), computed
    except _Killed:
        return None, computed


def _same(found, expected):
    for pair in zip(found, expected, strict=True):
        for one, other in zip(*pair, strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_interrupted_evaluation_goes_on(tmp_path, float64):
    model, rows = _model("ipttcd"), _rows()
    expected, whole = _scores(model, tmp_path / "a", rows)
    assert len(whole) == 4
    assert _scores(model, tmp_path / "b", rows, most=2) == (None, whole[:2])
    found, computed = _scores(model, tmp_path / "b", rows)
    assert computed == whole[2:]
    _same(found, expected)
    # Everything is there now.
    found, computed = _scores(model, tmp_path / "b", rows)
    assert computed == []
    _same(found, expected)


def test_answers_to_other_requests_and_damaged_ones_are_not_used(tmp_path, float64):
    model, rows = _model("ipttcd"), _rows()
    expected, whole = _scores(model, tmp_path, rows)
    others = [*rows[:-1], rows[-1][::-1] + 1]
    assert _scores(model, tmp_path, others)[1] == whole
    assert _scores(model, tmp_path, rows, identity="other")[1] == whole
    changed = nnx.clone(model)
    changed.embedding[...] = changed.embedding[...].at[0, 0].add(1e-3)
    assert _scores(changed, tmp_path, rows)[1] == whole
    for path in tmp_path.iterdir():
        flip_bit(path, -1)
    found, computed = _scores(model, tmp_path, rows)
    assert computed == whole
    _same(found, expected)
    assert _scores(model, tmp_path, rows)[1] == []
