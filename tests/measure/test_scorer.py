"""Scores and likelihoods are those of one forward pass, texts those of `Generation`, in the order
of the requests; an evaluation that is killed goes on when its command is given again."""

import functools
import shutil
import signal
import sys
from pathlib import Path

import commands
import jax
import numpy as np
import pytest
from checks import assert_close, logits_of, randomize, refused
from damage import flip_bit
from devices import elsewhere
from flax import nnx
from small_models import SETTINGS, byte_model, model_of
from tiny_run import save_text_model

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError, ResourceError
from ttcd_jax.inference.generate import Generation, Request
from ttcd_jax.measure import scorer as module
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.train.state import with_params

BOUND = 1e-10  # sums in another order
LENGTHS = (3, 40, 1, 17, 9, 40, 2)
LENGTHS_ON_MESHES = (13, 5, 17, 2, 9, 16, 3, 11, 7)


# The command, killed before it computes batch `killed_at`.
PROGRAM = """
import os, runpy, signal, sys

from ttcd_jax.measure import journal
from ttcd_jax.measure.scorer import Scorer

killed_at, read = int(sys.argv.pop(1)), Scorer._in_one_pass
computed = []
journal._SECONDS = 0.0

def noted(*arguments):
    if len(computed) == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    computed.append(1)
    print("computed", file=sys.stderr, flush=True)
    return read(*arguments)

Scorer._in_one_pass = noted
runpy.run_module("experiments.evaluate", run_name="__main__", alter_sys=True)
"""


def _rows(lengths=LENGTHS, vocab_size=11):
    rng = np.random.default_rng(0)
    return [rng.integers(vocab_size, size=length) for length in lengths]


def _expected(model, row, targets=None):
    """(losses, hits) of tokens 1 .. of a row, or of targets, from all logits."""
    targets = row[1:] if targets is None else targets
    if len(row) == 1:
        return np.zeros(0), np.zeros(0, bool)
    logits = np.asarray(jax.nn.log_softmax(logits_of(model, row[None, :-1])))[0]
    return -logits[np.arange(len(row) - 1), targets], logits.argmax(-1) == targets


@functools.cache
def _model(method):
    if method == "ahead":
        memory = SETTINGS["ipttcd"].replace(is_conv_causal=False)
        return model_of("ipttcd", memory=memory)
    return model_of(method)


MODELS = [("ipttcd", 1), ("ipttcd", 16), ("ipttcd", 2048), ("full", 16), ("ahead", 16)]


@pytest.mark.parametrize(("method", "one_pass"), MODELS)
def test_losses_of_rows_of_any_length_are_those_of_one_pass(method, one_pass, float64, monkeypatch):
    monkeypatch.setattr(module, "ONE_PASS", one_pass)
    model, rows = _model(method), _rows()
    scorer, others = Scorer(model, batch_size=3), [row[:0:-1] for row in rows]
    for targets in (None, others):  # the tokens that follow; others
        for i, scores in enumerate(scorer.losses(rows, targets)):
            assert scores.losses.shape == (len(rows[i]) - 1,)
            losses, is_hit = _expected(model, rows[i], targets and targets[i])
            assert_close(scores.losses, losses, BOUND)
            np.testing.assert_array_equal(scores.is_hit, is_hit)
    others[-1] = others[-1] + 11
    refused("outside the vocabulary", scorer.losses, rows, others, error=DataError)


def test_the_states_of_a_batch_take_a_quarter_of_the_memory(float64, monkeypatch):
    model, counts = _model("full"), []
    scorer, rows = Scorer(model, batch_size=8), [row for row in _rows() if len(row) > 1]
    expected, read = scorer.losses(rows), scorer._in_one_pass
    size = module.states.state_bytes(model.config, 1, 128)["total"]  # of a short row

    def counted(tokens, lengths):
        counts.append(len(tokens))
        return read(tokens, lengths)

    monkeypatch.setattr(scorer, "_in_one_pass", counted)
    monkeypatch.setattr(module, "device_bytes", lambda: 9 * size)
    found = scorer.losses(rows)
    assert counts == [2, 2, 2]
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours.losses, theirs.losses, BOUND)
    monkeypatch.setattr(module, "device_bytes", lambda: size - 1)
    words = "the state of a row of 39 tokens takes |, and there is |: take shorter rows"
    refused(words, scorer.losses, rows, error=ResourceError)


# At 4 spare tokens of padding the 66 that continuations share are read once; so they are where a
# row is long.
@pytest.mark.parametrize(
    ("method", "spare", "one_pass", "is_shared"),
    [
        *[("ipttcd", 4, 2048, True), ("ipttcd", 5, 2048, False), ("ipttcd", 5, 16, True)],
        *[("full", 4, 2048, True), ("ahead", 4, 2048, False)],
    ],
)
def test_likelihoods_are_those_of_whole_rows_and_contexts_are_read_once(
    method, spare, one_pass, is_shared, float64, monkeypatch
):
    monkeypatch.setattr(Scorer, "_spare", spare)
    monkeypatch.setattr(module, "ONE_PASS", one_pass)
    model, num_read, stream = _model(method), [], module.stream
    contexts = _rows((5, 30, 1))
    requests = [(contexts[i % 3], rest) for i, rest in enumerate(_rows((4, 1, 5, 9, 2, 6, 3)))]
    greedy = np.asarray(logits_of(model, contexts[1][None]))[0, -1].argmax()
    requests.append((contexts[1], np.array([greedy])))

    def counted(*args, **size):
        num_read.append(int(args[3].sum()))
        return stream(*args, **size)

    monkeypatch.setattr(module, "stream", counted)
    found = Scorer(model, batch_size=2).loglikelihoods(requests)
    for (context, rest), result in zip(requests, found, strict=True):
        losses, is_hit = _expected(model, np.concatenate([context, rest]))
        part = slice(len(context) - 1, None)
        assert result.log_likelihood == pytest.approx(-losses[part].sum(), rel=BOUND)
        assert result.is_greedy == is_hit[part].all()
    assert found[-1].is_greedy
    whole = sum(len(x) - 1 for x in contexts) + sum(len(rest) for _, rest in requests)
    assert sum(num_read) == is_shared * whole


def _on_mesh(name):
    from equal_on_devices import V, config, mesh_of, placed_params

    model_config, mesh = config("ipttcd", num_layers=2, fast_layers=(0,)), mesh_of(name)
    rows = _rows(LENGTHS_ON_MESHES, V)
    pairs = [(rows[i % 3], row) for i, row in enumerate(rows)]
    params, found = placed_params(model_config, mesh), {}
    with jax.set_mesh(mesh):
        scorer = Scorer(with_params(model_config, params), batch_size=8)
        for kind, module.ONE_PASS in (("streamed", 1), ("one pass", 2048)):
            found[kind] = np.concatenate([x.losses for x in scorer.losses(rows)])
            likelihoods = scorer.loglikelihoods(pairs)
            found[f"likelihoods, {kind}"] = np.array([x.log_likelihood for x in likelihoods])
    return found


def on_meshes(*meshes):
    """Of each mesh, data x fsdp x seq x tensor, its `_on_mesh`."""
    sys.path.append(str(Path(__file__).parents[1] / "sharding"))
    return [_on_mesh(mesh) for mesh in meshes]


def test_a_mesh_changes_neither_losses_nor_likelihoods():
    """On the last, rows are cut along seq."""
    expected, *others = elsewhere(on_meshes, "1x1x1x1", "2x2x1x2", "1x2x2x2", is_wide=True)
    assert len(expected) == 4
    for found in others:
        assert all(np.abs(found[x] - expected[x]).max() < BOUND for x in expected)


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
        batches.append([(x.max_new_tokens, len(x.tokens)) for x in requests if x.max_new_tokens])
        return Generation(model, tokenizer, requests, **options)

    monkeypatch.setattr(module, "Generation", generation)
    monkeypatch.setattr(module.Progress, "report", lambda self, done, line: num_read.append(done))
    scorer = Scorer(model, tokenizer, batch_size=2, name="texts")
    found = scorer.generate(requests)
    assert batches == [[(6, 23), (6, 1)], [(5, 11), (5, 8)], [(5, 1)]]
    assert num_read[-1] == sum(len(x.tokens) + 1 + x.max_new_tokens for x in requests)
    for request, text in zip(requests, found, strict=True):
        events = Generation(scorer.inference, tokenizer, [request])
        assert text == "".join(event.text for event in events)


@pytest.mark.parametrize(
    ("count", "spare", "num_shapes"), [(200, 2**17, 1), (2000, 2**17, 2), (2000, 2**10, 9)]
)
def test_questions_have_few_programs_and_little_padding(
    count, spare, num_shapes, float64, monkeypatch
):
    """Little of the work of the model, which says what a program is worth."""
    batches = []

    def read(tokens, lengths):
        batches.append((len(tokens) * (tokens.shape[1] - 1), int(lengths.sum())))
        scores = np.zeros((len(tokens), tokens.shape[1] - 1))
        return module.Scores(scores, scores == 0)

    scorer = Scorer(_model("ipttcd"))
    params = jax.tree.leaves(nnx.state(scorer.model, nnx.Param))
    monkeypatch.setattr(module, "WORK", (spare * sum(x.size for x in params), 0))
    monkeypatch.setattr(scorer, "_in_one_pass", read)
    lengths = np.random.default_rng(0).integers(2, 300, size=count)
    questions = [(row[:1], row[1:]) for row in _rows(lengths)]
    assert len(scorer.loglikelihoods(questions)) == count
    computed, needed = np.sum(batches, axis=0)
    assert needed == sum(lengths - 1)
    assert computed - needed < num_shapes * spare + needed / 3
    assert len({size for size, _ in batches}) == num_shapes


def test_mistakes_are_refused():
    scorer, one, none = Scorer(randomize(Transformer, byte_model())), np.array([1]), np.array([])
    refused("a context is empty: give it at least one token", scorer.loglikelihoods, [(none, one)])
    requests = [(one, one), (one, none)]
    refused("continuation 1 is empty and has no likelihood", scorer.loglikelihoods, requests)
    for wrong in (9999, -1):
        refused(str(wrong), scorer.losses, [np.array([1, wrong])], error=DataError)
        refused(str(wrong), scorer.loglikelihoods, [(one, np.array([wrong]))], error=DataError)
    refused("without a tokenizer", scorer.generate, [Request(tokens=[1])])
    assert scorer.losses([]) == []


def test_answers_to_other_requests_and_damaged_ones_are_not_used(tmp_path, float64):
    model, rows, scores = _model("ipttcd"), _rows(), []

    def computed(rows=rows, model=model, identity="task"):
        """The batches that are computed."""
        scorer, batches = Scorer(model, batch_size=2, journal=Journal(tmp_path, identity)), []
        read = scorer._in_one_pass
        scorer._in_one_pass = lambda *batch: (batches.append(batch[1].tolist()), read(*batch))[1]
        scores.append(scorer.losses(rows))
        return batches

    whole = computed()
    assert len(whole) == 4
    assert computed() == []
    assert computed([*rows[:-1], rows[-1][::-1] + 1]) == whole
    assert computed(identity="other") == whole
    changed = nnx.clone(model)
    changed.embedding[...] = changed.embedding[...].at[0, 0].add(1e-3)
    assert computed(model=changed) == whole
    for path in tmp_path.iterdir():
        flip_bit(path, -1)
    assert computed() == whole
    assert computed() == []
    for found in (scores[1], scores[-1]):
        jax.tree.map(np.testing.assert_array_equal, found, scores[0])


def test_a_killed_command_goes_on_and_writes_the_same_results(tmp_path):
    program, run_dir, text = tmp_path / "program.py", tmp_path / "run", tmp_path / "text.txt"
    program.write_text(PROGRAM)
    text.write_text("a text that is measured " * 20)
    save_text_model(run_dir, byte_model())
    options = f"--run_dir={run_dir}", "--task=ppl", f"--text={text}", "--seq_len=32"

    def evaluate(killed_at, status=0):
        result = commands.run(program, str(killed_at), *options, "--batch_size=4")
        assert result.returncode == status, result.stderr
        return result.stderr.count("computed")

    def results():
        return {x.name: x.read_bytes() for x in (run_dir / "eval" / "ppl").iterdir()}

    assert evaluate(-1) == 8  # 4 with the memory, 4 without
    expected = results()
    shutil.rmtree(run_dir / "eval")
    assert evaluate(5, -signal.SIGKILL) == 5  # in the second variant
    assert not (run_dir / "eval" / "ppl" / "results.json").exists()
    assert evaluate(-1) == 3
    assert results() == expected


def test_rows_of_a_batch_divide_among_the_devices(monkeypatch):
    scorer = Scorer(model_of("ipttcd"), batch_size=16)
    for devices, rows in ((1, 16), (3, 15), (24, 24)):
        sizes = {"data": devices}
        monkeypatch.setattr(module.rules, "axis_size", lambda axis, x=sizes: x.get(axis, 1))
        assert scorer._num_rows(50, 8) == rows
