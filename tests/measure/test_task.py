"""A task of somebody else's gets all that an evaluation is from one class: options, batches of
rows, results, table, picture, its section of the report."""

import dataclasses
import json
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import logits_of, refused
from small_models import config_of, model_of

from ttcd_jax import MemoryConfig, Precision
from ttcd_jax.commands.cli import parse_options
from ttcd_jax.config import Positive
from ttcd_jax.errors import DataError, NonFiniteError, UserError
from ttcd_jax.files import write_json
from ttcd_jax.measure.results import evaluate, merged, read_all_results, read_results, task_sections
from ttcd_jax.measure.task import RowTask, Subject, find_task, register, row_scores
from ttcd_jax.methods.ipttcd_stream import StreamMemoryConfig
from ttcd_jax.models.config import switched_off
from ttcd_jax.run.bindings import rebound
from ttcd_jax.tasks import TASKS

NUM_ROWS = 5


class Half(NamedTuple):
    half: str | int
    rows: int
    loss: float | None


@pytest.fixture(scope="module", autouse=True)
def toy():
    @register
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Halves(RowTask):
        """The loss of made-up rows by the half of the row. `length`: tokens of a row. `sizes` and
        `names` are only options."""

        name = "halves"
        title = "Loss by half of the row"
        record = Half
        key = "half"
        x_label = "half"
        value = "loss"

        length: Positive = 8
        text: str = "none"
        sizes: tuple[Positive, ...] = ()
        names: tuple[str, ...] = ()

        def source(self, subject):
            tokens = np.random.default_rng(0).integers(11, size=(NUM_ROWS, self.length + 1))
            segments = np.ones(self.length, np.int32)
            return [
                {"tokens": row[:-1], "targets": row[1:], "segment_ids": segments} for row in tokens
            ]

        def measure(self, scorer, rows, subject):
            halves = np.split(row_scores(scorer, rows).losses, 2, axis=1)
            return [
                Half(name, len(half), float(half.mean()))
                for name, half in zip(("first", "second"), halves, strict=True)
            ]

        def chance(self, subject):
            return float(np.log(11))

    yield Halves
    del TASKS["halves"]


def _subject(run_dir, label=None, **changes):
    model = model_of("ipttcd", precision=Precision(), **changes)
    return Subject(model, None, {"type": "none"}, run_dir, label)


@pytest.fixture(scope="module")
def result(toy, tmp_path_factory):
    return evaluate(toy(batch_size=2), _subject(tmp_path_factory.mktemp("run"), "mine"), 7)


def test_rows_are_scored_in_batches_and_none_counts_twice(toy, result, tmp_path):
    assert result.rows == NUM_ROWS
    subject = _subject(tmp_path)
    rows = toy().rows(subject)
    logits = jax.nn.log_softmax(logits_of(subject.model, rows["tokens"]))
    losses = -np.take_along_axis(np.asarray(logits), rows["targets"][:, :, None], axis=2)
    assert [*result.series] == ["mine, fast weights on", "mine, off (eta = 0)"]
    on, off = result.series.values()
    assert [record.rows for record in on] == [NUM_ROWS, NUM_ROWS]
    expected = [losses[:, :4].mean(), losses[:, 4:].mean()]
    np.testing.assert_allclose([record.loss for record in on], expected, rtol=1e-6)
    # The first half is the first chunk, which has no memory to read.
    assert on[0] == off[0]
    assert on[1] != off[1]
    assert len(toy(max_rows=2).rows(subject)["tokens"]) == 2


def test_records_are_of_the_task_in_numbers_of_python_one_of_a_bucket(toy, tmp_path, monkeypatch):
    subject, record = _subject(tmp_path, "mine"), Half(np.int64(3), jnp.asarray(2), np.float32(0.5))
    for records, words, error in (
        ([tuple(record)], "task halves measures |: return a list of Half", UserError),
        ([Half("a", 1, np.nan)], "task halves: loss of mine, | is nan at step 7", NonFiniteError),
        ([], "task halves finds nothing to measure", UserError),
    ):
        monkeypatch.setattr(toy, "measure", lambda *_, records=records: records)
        refused(words, evaluate, toy(), subject, 7, error=error)
    assert not list(tmp_path.rglob("results.json"))
    monkeypatch.setattr(toy, "measure", lambda *_: iter([record]))
    found = read_results(evaluate(toy(), subject, 7).write() / "results.json")
    assert found.series["mine, off (eta = 0)"] == [Half(3, 2, 0.5)]
    series = {"a run": [Half("first", 1, 1.0), Half("first", 1, 3.0)]}
    refused("task halves has several records of one half", toy.table, series)


def test_results_are_written_read_and_reported(toy, result, tmp_path):
    folder = result.write()
    assert {path.name for path in folder.iterdir()} == {"results.json", "results.csv", "halves.svg"}
    assert (folder / "halves.svg").read_text().startswith("<svg")
    records = result.series["mine, fast weights on"]
    line = f'"mine, fast weights on",first,{NUM_ROWS},{records[0].loss}'
    assert (folder / "results.csv").read_text().splitlines()[:2] == ["series,half,rows,loss", line]
    run_dir = folder.parents[1]
    assert read_all_results([run_dir]) == {"mine": [result]}
    other, cut = (dataclasses.replace(result, series={"other": x}) for x in (records, records[:1]))
    assert [*merged([result, other]).series] == [*result.series, "other"]
    refused("other buckets", merged, [result, cut])
    (section,) = task_sections({"mine": [result]}, tmp_path)
    assert section.title == toy.title
    words = "no task has losses of both |: name two of mine, fast weights on, mine, off"
    refused(words, task_sections, {"mine": [result]}, tmp_path, [*result.series])
    refused("both a and b: evaluate the runs first", task_sections, {"x": []}, tmp_path, "ab")
    losses = {name: records[0].loss for name, records in result.series.items()}
    less = {
        "mine, on - off": f"{losses['mine, fast weights on'] - losses['mine, off (eta = 0)']:+.3f}"
    }
    assert section.table[0] == {"half": "first"} | losses | less
    assert [(tmp_path / picture.path).name for picture in section.pictures] == ["halves.svg"]
    for fields in ({"half": "first", "rows": 1}, {"half": 1, "rows": "1", "loss": 1.0}, 3):
        path = folder / "results.json"
        write_json(path, result.to_dict() | {"series": {"mine": [fields]}})
        refused(f"{path} is damaged |Half", read_results, path, error=DataError)
    path.write_text(json.dumps(result.to_dict())[:-5])
    refused("results.json is not JSON", read_all_results, [run_dir])


def test_runs_of_one_label_are_named_by_their_folders(result, tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, label in zip(folders, ("mine", "mine", "its"), strict=True):
        series = {f"{label}, long": [Half("first", 1, None)]}
        fields = {"run_dir": folder, "folder": "x", "label": label, "series": series}
        dataclasses.replace(result, **fields).write()
    names = ["mine (a)", "mine (b)", "its"]
    found = read_all_results(folders)
    assert [*found] == names
    assert [*read_all_results([folders[0]] * 2)] == [f"mine ({folders[0]})"]
    assert [[*x.series] for (x,) in found.values()] == [[f"{name}, long"] for name in names]


def test_labels_say_the_rule(toy, tmp_path):
    subject = _subject(tmp_path, memory=MemoryConfig(chunk_size=4, corrects_errors=True))
    names = [f"IP-TTCD + delta rule, {x}" for x in ("fast weights on", "off (eta = 0)")]
    assert [*evaluate(toy(), subject, 7).series] == names
    nothing = _subject(tmp_path, memory=MemoryConfig(chunk_size=4, eta=0.0), student_window=4)
    assert [*nothing.variants()] == ["IP-TTCD, eta = 0, no gap"]  # nothing to switch off
    alone = config_of("ipttcd_stream", memory=StreamMemoryConfig(is_frozen=True), window=2)
    assert switched_off(alone, length=8) == alone  # nothing is written


def test_a_bucket_may_be_a_number_and_results_are_there_before_pictures(
    toy, result, tmp_path, monkeypatch
):
    """A table for spreadsheets holds no formula."""
    series = {"mine": [Half(1, 1, 2.0), Half(2, 1, None)], "=cmd()": [Half("-1+1", 1, -2.0)]}
    written = dataclasses.replace(result, run_dir=tmp_path, series=series)
    folder = written.write()
    assert (folder / "halves.svg").stat().st_size > 1000
    assert (folder / "results.csv").read_text().splitlines()[3] == "'=cmd(),'-1+1,1,-2.0"
    monkeypatch.setattr(toy, "pictures", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dataclasses.replace(written, step=8).write()
    assert read_all_results([tmp_path])["mine"][0].step == 8


def test_other_cases_are_not_the_same_measure(toy, result, tmp_path, caplog):
    assert [*result.measured_on] == [""]
    again = evaluate(toy(batch_size=5), _subject(tmp_path, "mine"), 7)
    assert again.measured_on == result.measured_on  # by the cases, not by how they are read
    for digests, options in (({"": "older"}, {}), (3, {}), (again.measured_on, {"length": 16})):
        old = again.to_dict() | {"measured_on": digests, "facts": 3}
        write_json(tmp_path / "eval/halves.mine/results.json", old)
        longer = evaluate(toy(batch_size=5, **options), _subject(tmp_path, "mine"), 7)
        message = "halves.mine/results.json was measured on other text, or other rows of it: it is"
        assert caplog.text.count(message) == 1
        caplog.clear()
    refused("halves was not measured on the same text in |halves.mine", merged, [result, longer])
    again.write()
    evaluate(toy(), _subject(tmp_path, "mine"), 7)
    assert not caplog.text
    other = toy(), _subject(tmp_path, "its"), 7, "halves.mine"
    refused("is of label 'mine', not 'its': choose", evaluate, *other)


def test_a_measure_that_depends_on_the_batch_is_measured_again_in_another(
    toy, tmp_path, monkeypatch
):
    monkeypatch.setattr(toy, "is_by_batch", True)
    evaluate(toy(), subject := _subject(tmp_path), 7).write()
    measured = mock.Mock(wraps=toy.measure)
    monkeypatch.setattr(toy, "measure", lambda *arguments: measured(*arguments))
    for size, count in ((toy().batch_size, 0), (3, 1)):
        evaluate(toy(batch_size=size), subject, 7)
        assert (measured.call_count > 0) == count


def test_what_is_measured_is_not_measured_again(toy, tmp_path, monkeypatch, capsys):
    subject, measured = _subject(tmp_path), mock.Mock(wraps=toy.measure)
    first = evaluate(toy(), subject, 7)
    first.write()
    monkeypatch.setattr(toy, "measure", lambda *arguments: measured(*arguments))
    again = evaluate(toy(batch_size=3), subject, 7)
    assert (again.series, again.rows, measured.call_count) == (first.series, NUM_ROWS, 0)
    assert f"measured before: remove {first.path} to measure it again" in capsys.readouterr().out
    elsewhere = str(tmp_path / "a folder" / "of mine")
    for _ in range(2):
        written = evaluate(toy(), subject, 7, elsewhere).write()
        assert (written, measured.call_count) == (tmp_path / "a folder" / "of mine", 2)
    path = first.path / "results.json"
    path.write_bytes(path.read_bytes()[:-9])
    for task, step in ((toy(), 7), (toy(), 8), (toy(length=4), 7), (toy(max_rows=2), 7)):
        measured.reset_mock()
        evaluate(task, subject, step)
        assert measured.call_count == 2  # with the memory and without


def test_a_refusal_names_both_results_where_they_lie_now(result, tmp_path):
    written = dataclasses.replace(result, run_dir=tmp_path / "original")
    other = {"measured_on": {"": "of other text"}, "folder": "halves.other"}
    for x in (written, dataclasses.replace(written, **other)):
        x.write()
    run_dir = (tmp_path / "original").rename(tmp_path / "moved")
    folders = [str(run_dir / "eval" / name) for name in ("halves.mine", "halves.other")]
    words = "|".join((*folders, "same options and text, or remove one"))
    refused(words, task_sections, read_all_results([run_dir]), tmp_path)


def test_options_are_those_of_the_task(toy):
    def parsed(name, *options):
        return parse_options(find_task(name), f"task {name}", options)

    options = ("--length=4", "--text=12", "--sizes=4,8", "--names=a,b", "--names=c")
    expected = toy(length=4, text="12", sizes=(4, 8), names=("a,b", "c"))
    assert (found := parsed("halves", *options)) == expected
    assert rebound(found, ["Halves.sizes = (3,)"]) == expected.replace(sizes=(3,))
    refused("Halves has no field 'lenght'; did you", rebound, toy(), ["Halves.lenght = 3"])
    for name, option, words in [
        ("halves", "--title=x", "no option '--title=x': it takes batch_size=VALUE, max_rows"),
        ("needle", "--distances=4,4", "distances"),
        ("halves", "--length", "task halves has no option '--length': | length=VALUE"),
        ("halves", "--length=four", "length must be int, got 'four' (str)"),
        ("halve", "--length=4", "no evaluation task is called 'halve'; did you mean 'halves'"),
    ]:
        refused(words, parsed, name, option)
