"""Records, read from and written to files, and what is shown of them."""

import dataclasses
import json

import numpy as np
from checks import refused
from damage import fuzz_file

from experiments.studies.mad import records
from experiments.studies.mad.records import Measures, Point, RecipeConfig, Record, Run
from experiments.studies.mad.sweep import mad_config
from experiments.studies.mad.tasks import BASELINES
from ttcd_jax.errors import DataError
from ttcd_jax.nn.block import MemoryStats
from ttcd_jax.precision import Precision

PRECISION = Precision(compute="float32")


def run(accuracy, rate=1e-3, decay=0.0, seed=1, curve=(), **measures):
    losses = {"loss": 1.0, "training_loss": None}
    points = [Point(epoch=1 + i, macro_accuracy=x, **losses) for i, x in enumerate(curve)]
    facts = {"rate": rate, "weight_decay": decay, "seed": seed, "curve": points}
    if accuracy is None:
        return Run(**facts, failed_at=7, metrics=None)
    scores = {"macro_accuracy": accuracy, "micro_accuracy": accuracy / 2, "loss": 1.0}
    return Run(**facts, failed_at=None, metrics=Measures(**scores | measures))


def record(task, setting, method, *runs, schedule="cosine", **changes):
    data = BASELINES[task]
    facts = {"task": task, "setting": setting, "method": method, "data": data}
    facts |= {"num_train": 640, "num_test": 320, "published_num_train": 12_800, "epochs": 2}
    facts |= {"steps": 40, "recipe": RecipeConfig(batch_size=32, schedule=schedule)}
    facts |= {"model": mad_config(method, data, init_std=0.1, precision=PRECISION)}
    facts |= {"environment": {"device": "a chip"}, "seconds": 1.5, "runs": runs}
    return Record(**facts | changes)


RECORDS = [
    record("compression", "default", "ipttcd", run(0.2), run(0.6, rate=1e-4), run(None, rate=1.0)),
    record("compression", "vocab_size=32", "ipttcd", run(0.4)),
    record("memorization", "default", "ipttcd", run(0.9)),
    record("compression", "default", "swa", run(0.25)),
    record("memorization", "default", "swa", run(None)),
]
HELD = {"macro_accuracy_off": 0.1, "memory_ratio": (0.5, 1.0), "gate_mean": (0.5, 0.25)}
HELD |= {"window_share": (0.25, 0.0)}
WITH_MEMORY = record("compression", "default", "ipttcd", run(0.2, **HELD, curve=(0.1, 0.2)))


def test_a_record_has_a_field_for_all_that_a_memory_measures():
    fields = {field.name for field in dataclasses.fields(Measures)}
    assert {*MemoryStats._fields} <= fields


def test_a_score_is_the_mean_over_settings_of_the_best_run():
    ipttcd, swa = records.score_table(RECORDS)
    assert [*ipttcd.items()] == [
        *(("method", "IP-TTCD"), ("memorization", "90.0 / 45.0 (88.9)")),
        *(("compression", "50.0 / 25.0 (50.0)"), ("mean", "70.0 (69.5)")),
    ]
    assert (swa["compression"], swa["memorization"], swa["mean"]) == ("25.0 / 12.5", "-", "25.0")
    model = mad_config("ipttcd_delta", RECORDS[0].data)
    found = [WITH_MEMORY.replace(model=model)]
    for (row,) in (records.score_table(found), records.memory_table(found)):
        assert row["method"] == "IP-TTCD + delta rule"


def test_seeds_are_averaged_before_the_best_is_taken():
    runs = [run(0.9, seed=1), run(0.1, seed=2), run(0.6, 1e-4, seed=1), run(0.6, 1e-4, seed=2)]
    found = record("compression", "default", "swa", *runs)
    assert records.best_text(found) == "accuracy 0.600 at rate 0.0001, decay 0"
    half_failed = found.replace(runs=[run(0.9, seed=1), run(None, seed=2)])
    assert records.best_text(half_failed) == "no run stayed finite"


def test_a_curve_is_the_mean_over_the_seeds_of_the_best_pair_in_steps():
    other = run(0.4, rate=1e-4, curve=(0.9, 0.9))
    pair = [run(0.5, seed=1, curve=(0.1, 0.5)), run(0.7, seed=2, curve=(0.3,))]
    found = records.scores([record("compression", "default", "swa", other, *pair), RECORDS[4]])
    # Both seeds have it; 40 steps in 2 epochs.
    np.testing.assert_allclose(found["compression", "swa"].curve, [[20, 0.2]])
    assert found["memorization", "swa"].means == {}


def test_the_section_has_a_picture_per_task_also_where_a_method_failed(tmp_path):
    found = [
        record("compression", "default", "ipttcd", run(0.5, curve=(0.1, 0.5))),
        *(record(task, "default", "swa", run(None)) for task in ("compression", "memorization")),
    ]
    for each in found:
        records.write(records.record_path(tmp_path, each), each)
    section = records.sweep_section(tmp_path, tmp_path / "mad.svg")
    assert section.table == records.score_table(found)
    assert section.lines == records.footnotes(found)
    failed, shown = ((tmp_path / picture.path).read_text() for picture in section.pictures)
    assert "40: 50" in shown
    assert failed.startswith("<svg")


def test_the_tables_tell_the_budget_the_options_what_failed_and_the_accuracy_without_memory():
    longer = [record("selective-copying", x, "swa", run(0.1), steps=80) for x in ("default", "x")]
    longer[1] = longer[1].replace(steps=1600, recipe=RecipeConfig(schedule="constant"))
    text = records.tables([*RECORDS, *longer])
    budget = "40 steps (2 epochs) of 32 rows, 640 training rows (published: 12,800), 320 test rows"
    for part in (
        "memorization 1 of 6, compression 2 of 11",
        f"budget of memorization, compression: {budget}",
        "budget of selective-copying: 80 to 1,600 steps",
        "2 of 9 not finite",
        "schedule constant, cosine, score of the last epoch (published code: constant",
        "initial standard deviation 0.1 (published: 0.02)",
        "float32 on a chip",
    ):
        assert part in text
    assert "The memory" not in text
    (row,) = records.memory_table([WITH_MEMORY, RECORDS[3]])
    *_, on, off, ratio, gate, share = row.values()
    assert (on, off, ratio, gate, share) == ("20.0", "10.0", "0.5 1", "0.5 0.25", "0.25 0")


def test_a_file_has_the_record_and_nothing_that_does_not_exist(tmp_path):
    for found in (WITH_MEMORY, RECORDS[0]):
        records.write(tmp_path / "record.json", found)
        assert records.read(tmp_path / "record.json") == found
    source = json.loads((tmp_path / "record.json").read_text())
    assert list(source)[:4] == ["task", "setting", "method", "data"]
    assert source["runs"][2]["metrics"] is None
    assert source["runs"][0] == {
        "rate": 1e-3, "weight_decay": 0.0, "seed": 1, "failed_at": None, "curve": [],
        "metrics": {"loss": 1.0, "macro_accuracy": 0.2, "micro_accuracy": 0.1},
    }  # fmt: skip


def test_a_record_with_changed_values_is_read_or_named_in_one_line(tmp_path):
    path = tmp_path / "damaged.json"
    records.write(path, WITH_MEMORY)
    fuzz_file(path, lambda: records.tables([records.read(path)]), 500, named=f"{path} is damaged")
    path.write_text('{"task":')
    refused("damaged.json is not JSON", records.read, path, error=DataError)


def test_sweeps_of_several_folders_are_one_file_of_records_and_a_job_of_two_is_refused(tmp_path):
    folders, given = (tmp_path / "a", tmp_path / "b"), (WITH_MEMORY, RECORDS[4], RECORDS[2])
    for folder, found in zip((folders[0], *folders), given, strict=True):
        records.write(records.record_path(folder, found), found)
    found = [x.replace(environment={"device": "a chip", "commit": "abc"}) for x in given]
    assert {x.name for x in records.gather(folders)} == {x.name for x in given}
    records.write_records(str(tmp_path / "all.jsonl"), found, "python -m experiments.mad")
    head, *rows = map(json.loads, (tmp_path / "all.jsonl").read_text().splitlines())
    assert (head["commit"], head["seeds"]) == ("abc", [1])
    on, _, off, details, _ = rows
    assert on | {"section": ""} == {
        "row": "IP-TTCD", "section": "", "method": "IP-TTCD", "memorization": [90.0, 88.9],
        "compression": [20.0, 50.0], "mean": [55.0, 69.5],
    }  # fmt: skip
    assert (off["row"], off["compression"]) == ("IP-TTCD, off at evaluation", 10.0)
    assert details["compression"]["memory_ratio"] == [0.5, 1.0]
    records.write(records.record_path(folders[1], WITH_MEMORY), WITH_MEMORY)
    refused("have the same job: give folders of other tasks", records.gather, folders)
