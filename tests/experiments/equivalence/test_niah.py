"""The score of needles, and two ways cell by cell, on ways that answer by the book."""

import types

import numpy as np
import pytest

from experiments.equivalence.niah import compare_answers, score
from ttcd_jax.data.synthetic.niah import NIAHConfig, make_samples
from ttcd_jax.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
CELL = NIAHConfig(task="niah_multivalue", length=1024, num_samples=3)
ESSAY = "A sentence of the essay. " * 20


@pytest.mark.parametrize(
    ("prediction", "percent"),
    [
        ("it is ABC and def", 100),
        ("  abc\x07\n", 50),
        ("ab c", 0),
        ("", 0),
    ],
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


def test_cells_tell_both_scores_and_how_many_answers_are_the_same():
    values = [sample.answers for sample in make_samples(CELL, TOKENIZER, ESSAY)]
    right = [" ".join(answers) for answers in values]
    half = [right[0], " ".join(values[1][:2]), right[2]]
    reference, candidate = _Way("forward", right, 1), _Way("streamed", half, 2)
    (row,) = compare_answers(reference, candidate, [CELL], TOKENIZER, ESSAY, batch_size=2)
    assert row == {
        "task": "niah_multivalue",
        "length": 1024,
        "samples": 3,
        "reference_score": 100.0,
        "candidate_score": pytest.approx(100 * 2.5 / 3),
        "identical_share": pytest.approx(2 / 3),  # what comes behind the end does not count
    }
    # What has a state writes first; the forward passes begin with what it wrote.
    assert not candidate.drafts[0].any()
    assert TOKENIZER.decode(reference.drafts[0][1]).startswith(half[1])
