"""Controls of trained memories: what each takes from a model, by what it changes and what not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, refused
from flax import nnx
from small_models import CHUNK, FLOAT64, RECALL, SETTINGS, model_of

from ttcd_jax.data.synthetic import HELD_OUT, EvidenceConfig, SyntheticRows
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.measure.by_document import Selection
from ttcd_jax.measure.results import evaluate
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Subject
from ttcd_jax.memory.prefix import Writes
from ttcd_jax.methods.in_place import controlled
from ttcd_jax.sharding import rules
from ttcd_jax.tasks.controls import Controls

LENGTH = 8 * CHUNK
EVIDENCE = EvidenceConfig(num_facts=3, num_keys=4, num_values=4, num_fillers=3, num_between=6)
OTHERS = ["memory off", "layer 0 off", "another document's memory", "shuffled keys", "no gap"]
CASES = {
    "ipttcd": OTHERS,
    "delta rule": OTHERS,
    "ipttt": OTHERS[:-1],
    "ipttcd_ideal": [OTHERS[0], OTHERS[2], OTHERS[4]],
}


DELTA = {"memory": SETTINGS["ipttcd"].replace(form="auto", corrects_errors=True)}


def _model(name, **changes):
    name, changes = ("ipttcd", changes | DELTA) if name == "delta rule" else (name, changes)
    fields = {"vocab_size": 258, "init_std": 0.5, "precision": FLOAT64}
    return model_of(name, **fields | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for number in range(5):
        (folder / f"{number}.txt").write_bytes(bytes(rng.choice([*b"abcd "], 50).tolist()))
    return folder


def _subject(folder, model):
    return Subject(model, ByteTokenizer(), {"type": "none"}, folder, "mine")


def _measured(folder, model, **options):
    subject = _subject(folder, model)
    task = Controls(text=str(folder), seq_len=LENGTH + 1, batch_size=4, **options)
    result = evaluate(task, subject, 3)
    found = {}
    for x in result.series["mine"]:
        found.setdefault(x.control, []).append(x.nll)
    return {x: np.array(nll) for x, nll in found.items()}, result, task.rows(subject).documents


@pytest.mark.parametrize("name", CASES)
def test_every_control_of_a_method_changes_every_document(name, folder, tmp_path, float64):
    """As trained, off and without a gap a model's losses are those of its variants."""
    model = _model(name)
    found, result, documents = _measured(folder, model)
    assert [*found] == ["as trained", *CASES[name]]
    for control in CASES[name]:
        assert (np.abs(found[control] - found["as trained"]) > 1e-9).all(), control
    variants = _subject(folder, model).variants().values()
    for control, variant in zip(["as trained", "memory off"], variants, strict=True):
        losses = [x.losses.sum() for x in Scorer(variant).losses(documents)]
        assert_close(found[control], np.array(losses), 1e-6)
    if "layer 0 off" in found:  # its only memory
        assert_close(found["layer 0 off"], found["memory off"], 1e-6)
    table = {row["control"]: row for row in result.table}
    mean = (found["memory off"] - found["as trained"]).sum() / (5 * LENGTH)
    assert table["memory off"]["less as trained"].startswith(f"{mean:.3f} ± ")
    assert table["as trained"]["less as trained"] is None
    (picture,) = result.task.pictures(tmp_path, result.series, None)
    assert (tmp_path / picture.path).stat().st_size > 1000


def test_each_memory_alone_is_one_of_two(folder, float64):
    found, *_ = _measured(folder, _model("ipttcd", fast_layers=(0, 1)), controls=("layers", "off"))
    assert [*found] == ["as trained", "memory off", "layer 0 off", "layer 1 off"]
    assert len({np.round(x, 9).tobytes() for x in found.values()}) == 4


def test_without_a_gap_there_is_none_to_lose(folder, float64):
    model = _model("ipttcd", student_window=4)  # the teacher's
    found, *_ = _measured(folder, model, controls=("no_gap",))
    assert (found["no gap"] == found["as trained"]).all()


@pytest.mark.parametrize("name", ["ipttcd", "delta rule"])
def test_a_foreign_memory_is_that_of_the_row_before(name, float64):
    """A token is changed in row 0 of three: far behind it only what row 1 reads changes."""
    model, tokens = _model(name), np.random.default_rng(1).integers(0, 258, (3, LENGTH))
    other = tokens.copy()
    other[0, 1] += 1 if other[0, 1] < 257 else -1

    @nnx.jit(static_argnums=2)
    def hidden(model, tokens, control):
        return model.forward(tokens, control=control)[0]

    def moved(control):
        first, second = (hidden(model, jnp.asarray(x), control) for x in (tokens, other))
        return np.abs(np.asarray(first - second))[:, -CHUNK:].max(axis=(1, 2)) > 1e-12

    assert moved(None).tolist() == [True, False, False]
    assert moved("foreign").tolist() == [False, True, False]


@pytest.mark.parametrize(("count", "batch", "devices"), [(5, 2, 1), (3, 16, 4), (2, 9, 1)])
def test_no_row_of_a_batch_is_left_to_read_its_own(count, batch, devices, monkeypatch, float64):
    """Batches are filled with other rows, also to the number of devices."""
    scorer, seen = Scorer(_model("ipttcd"), batch_size=batch), []
    monkeypatch.setattr(rules, "axis_size", lambda name: devices if name == "data" else 1)

    def noted(pairs, lengths, control):
        seen.append(pairs[:, 0, 0].tolist())
        return np.zeros((2, *pairs.shape[:2]))

    monkeypatch.setattr(scorer, "_in_one_pass", noted)
    rows = [np.full(9, n) for n in range(count)]
    assert len(scorer.controlled(rows, "foreign", [x[1:] for x in rows])) == count
    assert {n for rows in seen for n in rows} == {*range(count)}
    assert all(len(rows) % devices == 0 for rows in seen)
    assert all((np.roll(rows, 1) != rows).all() for rows in seen)


def test_shuffled_keys_are_those_of_other_tokens_of_their_chunk():
    keys = jnp.arange(2 * 3 * 5.0).reshape(2, 3, 5, 1)
    found = controlled(Writes(keys, -keys), "shuffled")
    assert (found.errors == -keys).all()
    assert (found.keys != keys).all()
    assert (jnp.sort(found.keys, axis=2) == keys).all()


@pytest.mark.parametrize("data", [RECALL, EVIDENCE], ids=lambda x: x.kind)
def test_of_drawn_rows_what_is_asked_is_measured(data, tmp_path, float64):
    """Of evidence that is not the token that comes next."""
    model = _model("delta rule", vocab_size=data.vocab_size)
    subject = Subject(model, None, data.to_dict(), tmp_path, "mine")
    result = evaluate(Controls(max_rows=6, batch_size=4), subject, 3)
    rows = [*SyntheticRows(data, seed=HELD_OUT, num_rows=6)]
    tokens, targets, mask = (
        np.stack([row[name] for row in rows]) for name in ("tokens", "targets", "loss_mask")
    )
    odds = jax.nn.log_softmax(jax.jit(lambda x: model(x))(jnp.asarray(tokens)))
    losses = -np.take_along_axis(np.asarray(odds), targets[..., None], axis=2)[..., 0]
    found = {}
    for x in result.series["mine"]:
        found.setdefault(x.control, []).append((x.tokens, x.nll))
    assert [*found] == ["as trained", *OTHERS]
    assert_close(np.array(found["as trained"]).T[1], (losses * mask).sum(axis=1), 1e-6)
    for name, records in found.items():
        assert [x for x, _ in records] == mask.sum(axis=1).tolist(), name
        assert name == "as trained" or records != found["as trained"]
    refused("--seq_len has no effect", Controls(seq_len=9).rows, subject)


def test_what_has_no_such_control_is_refused_by_name(folder, tmp_path, float64):
    def refuse(words, name, text=folder, **options):
        refused(words, _measured, text, _model(name), **options)

    refuse("method 'swa' has no in-place memory", "swa")
    refuse("method 'lact' has no in-place memory", "lact")
    refuse("method 'ipttt' cannot have control 'no_gap': no teacher", "ipttt", controls=("no_gap",))
    for name in ("shuffled", "layers"):
        refuse(f"cannot have control '{name}': no", "ipttcd_ideal", controls=(name,))
    tokens = jnp.zeros((2, LENGTH), int)
    refused("nothing under keys", _model("ipttcd_ideal").forward, tokens, control="shuffled")
    subject, path = _subject(folder, _model("ipttcd")), tmp_path / "documents.npz"
    uneven = Selection([np.arange(40), np.arange(9)], {}, subject.tokenizer.digest)
    path.write_bytes(uneven.manifest())
    words = "documents of 9 to 40 tokens: task controls reads rows of one"
    refused(words, Controls(manifest=str(path)).rows, subject)
    (tmp_path / "one.txt").write_bytes(b"abcd " * 20)
    refuse("1 documents in batches of 4: another document's memory needs two", "ipttcd", tmp_path)
