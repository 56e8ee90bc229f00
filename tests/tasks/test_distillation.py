"""The distance to the teacher as an evaluation: rows, buckets, layers, several runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, randomize, refused
from small_models import byte_model, config_of

from ttcd_jax import MemoryConfig, Precision, Transformer
from ttcd_jax.data.synthetic import RecallConfig
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import NonFiniteError
from ttcd_jax.measure.results import evaluate, merged
from ttcd_jax.measure.task import Subject
from ttcd_jax.memory.distillation import summary
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh
from ttcd_jax.tasks.distillation import StudentTeacher, distances

MODEL = byte_model(num_layers=2, fast_layers=(1,))


def _subject(folder, model=MODEL, label="a run", data=None):
    trained = randomize(Transformer, model)
    return Subject(trained, ByteTokenizer(), data or {"type": "TextConfig"}, folder, label)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a text of some length, " * 9)
    return StudentTeacher(text=str(path), seq_len=48, batch_size=2)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return _subject(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def result(task, subject):
    return evaluate(task, subject, 3)


def test_a_record_is_the_summary_of_its_positions_and_layer(result, task, subject):
    """Whatever the batches and the mesh."""
    rows = task.rows(subject)
    ids = jnp.asarray(rows["segment_ids"])
    assert result.rows == len(ids) == 5
    assert not np.asarray(ids).all(), "the last row is padded"
    found = jax.jit(subject.model.distillation)(jnp.asarray(rows["tokens"]), ids)
    (records,) = result.series.values()
    assert [record.context for record in records] == ["0-31", "32-47", "all"]
    for record in records:
        part = np.s_[..., record.start : record.stop]
        counted = ids[part] > 0
        assert (record.layer, record.tokens) == (1, int(counted.sum()))
        expected = summary(jax.tree.map(lambda x, part=part: x[part], found), counted)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(record, name), value[0], rtol=1e-5)
    with jax.set_mesh(build_mesh(MeshConfig(fsdp=1), jax.devices()[:1])):
        parts = distances(subject.model, rows, 2)
    assert (found.is_moved == parts.is_moved).all()
    numbers = ("teacher", "off", "on", "both", "change")
    assert_close(*([np.asarray(getattr(x, name)) for name in numbers] for x in (parts, found)))


def test_runs_of_other_layers_share_table_and_pictures(result, task, tmp_path):
    model = MODEL.replace(fast_layers=(0, 1))
    other = evaluate(task, _subject(tmp_path, model, "other"), 3)
    (alone,) = task.table(result.series)
    assert [*alone][:3] == ["layer", "gap", "gap_on"]
    series = merged([result, other]).series
    first, second = task.table(series)
    assert (first["layer"], first["a run: gap"], second["layer"]) == (0, None, 1)
    assert second["a run: gap"] == alone["gap"]
    names = [f"distillation_{layer}.svg" for layer in (0, 1)]
    assert [x.path.name for x in task.pictures(tmp_path, series, None)] == names
    assert (tmp_path / names[1]).stat().st_size > 1000
    elsewhere = dataclasses.replace(other, measured_on={"": "another"})
    refused("not measured on the same text", merged, [result, elsewhere])


def test_runs_on_recall_data_are_measured_on_such_rows(subject):
    data = RecallConfig(num_slots=8, num_keys=4, num_values=4)
    subject = subject._replace(data=data.to_dict())
    rows = StudentTeacher(max_rows=3).rows(subject)
    assert rows["tokens"].shape == (3, data.seq_len)
    records = StudentTeacher(max_rows=3).series(subject, rows)["a run"]
    assert records[0].tokens == 3 * data.seq_len
    refused("--seq_len has no effect: ", StudentTeacher(seq_len=64).rows, subject)


def test_a_teacher_of_zero_has_no_gap_to_report(tmp_path, task):
    """As a from-scratch model starts: the teacher convolution at zero."""
    subject = _subject(tmp_path)
    subject.model.group_1.block_0.mlp.teacher_conv[...] *= 0
    (records,) = task.series(subject, task.rows(subject)).values()
    assert records[-1].gap is None
    assert records[-1].loss > 0
    subject.model.embedding[...] *= np.nan
    refused("gap of a run is nan at step 3", evaluate, task, subject, 3, error=NonFiniteError)


@pytest.mark.parametrize("method", ["swa", "ipttt"])
def test_a_method_without_a_teacher_is_refused(method, task, tmp_path):
    subject = _subject(tmp_path, config_of(method, precision=Precision()))
    words = f"method '{method}' has no student and teacher to compare"
    refused(words, task.rows, subject)


def test_a_gap_before_the_convolutions_is_measured_there():
    """So equal windows have none, whatever the taps."""
    memory = MemoryConfig(chunk_size=4, error="gap", teacher_conv_init="normal")
    model = randomize(Transformer, config_of("ipttcd", memory=memory, window=4, student_window=4))
    found = summary(jax.jit(model.distillation)(jnp.arange(10)[None]))
    assert np.isnan(found["gap"]).all() or not np.asarray(found["gap"]).any()
