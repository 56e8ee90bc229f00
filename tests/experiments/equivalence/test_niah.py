"""RULER's needles: the published wording, lengths and positions, the score, two ways compared."""

import re
import types

import numpy as np
import pytest

from experiments.equivalence.niah import (
    NOISE,
    NUM_ANSWER_TOKENS,
    TASKS,
    NIAHConfig,
    compare_answers,
    make_samples,
    prompt_text,
    score,
)
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import UserError

TOKENIZER = ByteTokenizer()
CELL = NIAHConfig(task="niah_multivalue", length=1024, num_samples=3)
ESSAY = "It was a day like any other. Who would have known? Nobody saw it coming! So it goes. " * 9
LENGTH = 2500


def _samples(task, **changes):
    facts = {"task": task, "length": LENGTH, "num_samples": 3} | changes
    return make_samples(NIAHConfig(**facts), TOKENIZER, ESSAY)


def _prompt(sample):
    return TOKENIZER.decode(sample.tokens)


def test_one_value_is_asked_for_in_the_singular_and_several_in_the_plural():
    assert prompt_text(TASKS["niah_single_1"], "TEXT", ["damp-kettle"]) == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.\nTEXT\nWhat is the special magic number for "
        "damp-kettle mentioned in the provided text? The special magic number for damp-kettle "
        "mentioned in the provided text is"
    )
    assert prompt_text(TASKS["niah_multiquery"], "TEXT", ["a", "b", "c", "d"]) == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\nTEXT\nWhat are all the special magic "
        "numbers for a, b, c, and d mentioned in the provided text? The special magic numbers for "
        "a, b, c, and d mentioned in the provided text are"
    )


@pytest.mark.parametrize("name", TASKS)
def test_what_is_asked_for_is_hidden_and_the_haystack_fills_the_room(name):
    task = TASKS[name]
    kind = {"numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    needle = re.compile(
        rf"One of the special magic {task.values} for ([a-z]+-[a-z]+) is: ({kind[task.values]})\."
    )
    for sample in _samples(name):
        found = needle.findall(_prompt(sample))
        assert len(found) == task.num_keys * task.num_values
        keys = {key for key, _ in found}
        assert len(keys) == task.num_keys
        asked = [key for key in keys if key in _prompt(sample).split("\n")[-1]]
        assert len(asked) == task.num_queries
        assert sorted(sample.answers) == sorted(value for key, value in found if key in asked)
        assert sample.tokens[0] == TOKENIZER.bos_id
        room = LENGTH - NUM_ANSWER_TOKENS - len(sample.tokens)
        assert 0 <= room <= len(NOISE)  # the longest unit that could be added, roughly
        if task.haystack == "noise":
            lines = _prompt(sample).split("\n")[1:-1]
            assert {line for line in lines if not needle.fullmatch(line)} == {NOISE}
        else:
            hay = needle.sub("", _prompt(sample).split("\n")[1])
            assert " ".join(hay.split()) in 9 * ESSAY


def test_needles_of_an_essay_are_between_sentences_anywhere():
    positions = []
    for sample in _samples("niah_single_2", num_samples=40):
        context = _prompt(sample).split("\n")[1]
        position = context.index("One of the special")
        is_last = context[position:].count(".") == 1  # after the word at which the essay ends
        assert position == 0 or context[position - 2] in ".?!" or is_last
        positions.append(position / len(context))
    assert min(positions) < 0.1
    assert max(positions) > 0.85


def test_a_sample_is_a_function_of_seed_and_index():
    many, few = _samples("niah_multikey_1"), _samples("niah_multikey_1", num_samples=2)
    assert [_prompt(sample) for sample in many[:2]] == [_prompt(sample) for sample in few]
    prompts = {_prompt(s) for seed in (0, 1) for s in _samples("niah_multikey_1", seed=seed)}
    assert len(prompts) == 6
    np.testing.assert_array_equal(many[0].tokens, few[0].tokens)


def test_mistakes_name_the_numbers():
    with pytest.raises(UserError, match=r"niah_single_1 takes \d{3} tokens .* has 300: ask for"):
        _samples("niah_single_1", length=300)
    with pytest.raises(UserError, match="pass --text"):
        make_samples(NIAHConfig(task="niah_single_2", length=LENGTH, num_samples=1), TOKENIZER, " ")


@pytest.mark.parametrize(
    ("prediction", "percent"),
    [("it is ABC and def", 100), ("  abc\x07\n", 50), ("ab c", 0), ("", 0)],
)
def test_the_score_is_the_share_of_values_that_an_answer_contains(prediction, percent):
    assert score([prediction], [["abc", "DEF"]]) == percent
    assert score([prediction, "abc def"], [["abc", "DEF"]] * 2) == (percent + 100) / 2


class _Way:
    """Answers sample i with `texts[i]`, then the end of the document, then noise."""

    def __init__(self, path, texts, noise):
        self.way = types.SimpleNamespace(path=path)
        self.texts, self.noise, self.drafts = texts, noise, []
        prompts = [sample.tokens for sample in make_samples(CELL, TOKENIZER, ESSAY)]
        self.index = {prompt.tobytes(): index for index, prompt in enumerate(prompts)}

    def greedy(self, prompts, num_tokens, length, draft):
        assert draft.shape == (len(prompts), num_tokens)
        self.drafts.append(draft)
        assert max(map(len, prompts)) + num_tokens <= length == CELL.length
        found = np.full((len(prompts), num_tokens), self.noise)
        for row, prompt in zip(found, prompts, strict=True):
            ids = TOKENIZER.encode(self.texts[self.index[prompt.tobytes()]])
            row[: len(ids) + 1] = [*ids, TOKENIZER.eos_id]
        return found


def test_a_cell_has_both_scores_and_the_share_of_equal_answers():
    values = [sample.answers for sample in make_samples(CELL, TOKENIZER, ESSAY)]
    right = [" ".join(answers) for answers in values]
    half = [right[0], " ".join(values[1][:2]), right[2]]
    reference, candidate = _Way("forward", right, 1), _Way("streamed", half, 2)
    row = compare_answers(reference, candidate, CELL, TOKENIZER, ESSAY, batch_size=2)
    assert row == {
        "task": "niah_multivalue",
        "length": 1024,
        "samples": 3,
        "reference_score": 100.0,
        "candidate_score": pytest.approx(100 * 2.5 / 3),
        "identical_share": pytest.approx(2 / 3),  # tokens after the end do not count
    }
    # A way with a state answers first; the forward passes begin with its answer.
    assert not candidate.drafts[0].any()
    assert TOKENIZER.decode(reference.drafts[0][1]).startswith(half[1])
