"""Evidence and needles: what is counted as a hit equals plain computations from all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import refused
from small_models import RECALL, config_of, model_of

from ttcd_jax import Precision
from ttcd_jax.data.synthetic import EvidenceConfig
from ttcd_jax.errors import NonFiniteError
from ttcd_jax.inference.model import inference_model
from ttcd_jax.measure.results import evaluate
from ttcd_jax.measure.task import Subject
from ttcd_jax.tasks.recall import Evidence, Needle, Recall, attention_reach, read_back

DATA = EvidenceConfig(num_facts=3, num_keys=4, num_values=4, num_fillers=3, num_between=6)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    model = model_of("ipttcd", precision=Precision())
    return Subject(model, None, DATA.to_dict(), tmp_path_factory.mktemp("run"), "mine")


def _likeliest(model, tokens):
    return np.asarray(jax.jit(lambda x: model(x).argmax(-1))(jnp.asarray(tokens)))


def test_hits_are_likeliest_values_at_keys_by_the_distance_back_to_them(subject):
    task = Evidence(max_rows=400)
    rows, result = task.rows(subject), evaluate(task, subject, 7)
    assert result.chance == task.chance(subject) == 1 / 3
    for (label, model), column in zip(
        subject.variants().items(), result.series.values(), strict=True
    ):
        is_hit = _likeliest(model, rows["tokens"]) == rows["targets"]
        for record in column:
            low, high = 6, 999  # two layers of windows of four reach six back
            if not record.is_total:
                low, high = map(int, record.distance.split("-"))
                low -= 1
            at = rows["loss_mask"] & (low < rows["distance"]) & (rows["distance"] <= high)
            assert (record.queries, record.accuracy) == (at.sum(), is_hit[at].mean()), label
        assert sum(x.queries for x in column if not x.is_total) == 400 * 6
    first, *_ = result.series.values()
    assert [first[0].distance, first[-1].distance] == ["1-6", "beyond 6"]
    assert 0 < first[-1].accuracy < 1


def test_needles_are_asked_for_after_the_fillers_of_a_question():
    rows = DATA.needles(seed=1, num_rows=6, num_needles=2, num_tokens=32)
    model = model_of("ipttcd", num_layers=1, precision=Precision())
    parts = [rows.facts, rows.haystack]
    answers = [
        _likeliest(model, np.concatenate([*parts, asked], axis=1))[:, -1]
        for asked in rows.questions.swapaxes(0, 1)
    ]
    rows = rows._replace(values=np.stack(answers, axis=1))
    for by in ("decode", "prefill"):
        (far,) = read_back(inference_model(model), rows, [32], "kept", by)
        assert (far.distance, far.queries, far.accuracy) == ("32", 12, 1.0)


def test_hits_of_a_model_without_numbers_are_none(subject):
    model = model_of("ipttcd", num_layers=1, precision=Precision())
    model.embedding[...] *= np.nan
    words, subject = "accuracy of mine, |is nan at step 7", subject._replace(model=model)
    for task in (Evidence(max_rows=2), Needle(distances=(2,), batch_size=1)):
        refused(words, evaluate, task, subject, 7, "nan", error=NonFiniteError)


def test_attention_reaches_as_far_as_the_stream_that_goes_on_sees():
    config = config_of("ipttcd", num_layers=3, window=9, student_window=4, fast_layers=(1,))
    assert attention_reach(config) == 3 * 8
    assert attention_reach(config.replace(method="ipttcd_stream", memory=None)) == 3 * 3
    assert attention_reach(config_of("deltanet", window=None)) == 0
    assert attention_reach(config_of("full")) is None


def test_runs_on_other_data_are_refused(subject):
    for task, data, words in (
        (Recall(), DATA.to_dict(), "was not trained on recall data: use --task=evidence"),
        (Evidence(), RECALL.to_dict(), "was not trained on evidence data: use --task=recall"),
        (Needle(), {"type": "none"}, "was not trained on synthetic data: use --task=ppl"),
    ):
        refused(words, task.rows, subject._replace(data=data))
