"""The distance to the teacher as an evaluation: rows, buckets, layers, several runs; the effective
rank of keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw, randomize, refused
from small_models import byte_model, config_of

from experiments.studies.mad.models import mad_config
from experiments.studies.mad.tasks import BASELINES
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.measure.results import evaluate, merged
from ttcd_jax.measure.task import Subject
from ttcd_jax.memory.distillation import summary
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh
from ttcd_jax.tasks.distillation import StudentTeacher, distances, effective_rank, key_ranks

MODEL = byte_model(num_layers=2, fast_layers=(1,))


def _subject(folder, model=MODEL, label="a run", data=None):
    trained = randomize(Transformer, model)
    return Subject(trained, ByteTokenizer(), data or {"type": "TextConfig"}, folder, label)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a text of some length, " * 9)
    return str(path)


@pytest.fixture(scope="module")
def result(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    return evaluate(StudentTeacher(text=text, seq_len=48, batch_size=2), _subject(folder), 3)


def test_a_record_is_the_summary_of_its_positions_and_layer(result, text, tmp_path):
    task = StudentTeacher(text=text, seq_len=48, batch_size=2)
    subject = _subject(tmp_path)
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
        assert (record.key_rank is not None) == (record.context == "all")
    np.testing.assert_allclose(record.key_rank, key_ranks(subject.model, rows["tokens"][:2]))


def test_batches_and_a_mesh_change_nothing(text, tmp_path):
    model = _subject(tmp_path).model
    rows = StudentTeacher(text=text, seq_len=48).rows(_subject(tmp_path))
    whole = distances(model, rows, 5)
    with jax.set_mesh(build_mesh(MeshConfig(fsdp=1), jax.devices()[:1])):
        parts = distances(model, rows, 2)
    assert (whole.is_moved == parts.is_moved).all()
    assert whole.off.shape == (1, *rows["tokens"].shape)
    numbers = ("teacher", "off", "on", "both", "change")
    assert_close(*([getattr(x, name) for name in numbers] for x in (whole, parts)))


def test_runs_of_other_layers_share_table_and_pictures(result, text, tmp_path):
    other = evaluate(
        StudentTeacher(text=text, seq_len=48, batch_size=2),
        _subject(tmp_path, MODEL.replace(fast_layers=(0, 1)), "other"),
        3,
    )
    (alone,) = StudentTeacher.table(result.series)
    assert [*alone][:3] == ["layer", "gap", "gap_on"]
    series = merged([result, other]).series
    first, second = StudentTeacher.table(series)
    assert (first["layer"], first["a run: gap"], second["layer"]) == (0, None, 1)
    assert second["a run: gap"] == alone["gap"]
    assert [x.path.name for x in StudentTeacher.pictures(tmp_path, series, None)] == [
        "distillation_0.png",
        "distillation_1.png",
    ]
    folder = other.write()
    assert (folder / "distillation_1.png").stat().st_size > 1000
    elsewhere = dataclasses.replace(other, measured_on={"": "another"})
    refused("not measured on the same text", merged, [result, elsewhere])


def test_runs_on_recall_data_are_measured_on_such_rows(tmp_path):
    data = RecallConfig(num_slots=8, num_keys=4, num_values=4)
    subject = _subject(tmp_path, data=data.to_dict())
    rows = StudentTeacher(max_rows=3).rows(subject)
    assert rows["tokens"].shape == (3, data.seq_len)
    records = StudentTeacher(max_rows=3).series(subject, rows)["a run"]
    assert records[0].tokens == 3 * data.seq_len
    refused("--seq_len has no effect: ", StudentTeacher(seq_len=64).rows, subject)


def test_a_teacher_of_zero_has_no_gap_to_report(tmp_path, text):
    """As a from-scratch model starts: the teacher convolution at zero."""
    subject = _subject(tmp_path)
    subject.model.group_1.block_0.mlp.teacher_conv[...] *= 0
    task = StudentTeacher(text=text, seq_len=48, max_rows=2)
    (records,) = task.series(subject, task.rows(subject)).values()
    assert records[-1].gap is None
    assert records[-1].loss > 0


@pytest.mark.parametrize("method", ["swa", "ipttt"])
def test_a_method_without_a_teacher_is_refused(method, text, tmp_path):
    subject = _subject(tmp_path, config_of(method, precision=Precision()))
    words = f"method '{method}' has no student and teacher to compare"
    refused(words, StudentTeacher(text=text).rows, subject)


def test_effective_rank_of_known_matrices():
    (x,) = draw(0, (50, 6))
    orthogonal, _ = np.linalg.qr(x)
    assert effective_rank(jnp.asarray(orthogonal)) == pytest.approx(6, rel=1e-3)
    assert effective_rank(jnp.ones((9, 4))) == pytest.approx(1, rel=1e-3)
    assert effective_rank(jnp.zeros((9, 4))) == 1
    sizes = np.array([4.0, 2.0, 1.0, 1.0])
    shares = sizes / sizes.sum()
    expected = np.exp(-(shares * np.log(shares)).sum())
    assert effective_rank(jnp.diag(jnp.asarray(sizes))) == pytest.approx(expected, rel=1e-4)


def _small(method):
    config = mad_config(method, BASELINES["in-context-recall"], window=4, dim=16, mlp_dim=12)
    return randomize(Transformer, config)


@pytest.mark.parametrize("method", ["ipttcd", "ipttt"])
def test_keys_are_those_of_each_layer(method):
    model = _small(method)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, 11)), jnp.int32)
    ranks_of = jax.jit(lambda tokens: key_ranks(model, tokens))
    ranks = np.asarray(ranks_of(tokens))
    assert ranks.shape == (2,)
    assert ((ranks > 1) & (ranks <= 12)).all()
    # Equal tokens differ by their neighbours alone.
    same = np.asarray(ranks_of(jnp.zeros_like(tokens)))
    assert (same < ranks).all()


def test_a_model_without_an_in_place_memory_has_none():
    model = _small("lact")
    assert jax.eval_shape(lambda x: key_ranks(model, x), jnp.zeros((1, 4), jnp.int32)) is None
