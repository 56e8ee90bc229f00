import numpy as np
import pytest

from experiments.studies.mad.picture import draw_curves, mean_curve
from experiments.studies.mad.report import best_run, footnotes, memory_table, score_table
from experiments.studies.mad.tasks.settings import PUBLISHED


def run(accuracy, rate=1e-3, decay=0.0, seed=1, curve=(), **metrics):
    points = [{"epoch": 1 + i, "macro_accuracy": x} for i, x in enumerate(curve)]
    run = {"rate": rate, "weight_decay": decay, "seed": seed, "curve": points}
    if accuracy is None:
        return run | {"failed_at": 7, "metrics": None}
    metrics = {"macro_accuracy": accuracy, "micro_accuracy": accuracy / 2, "loss": 1.0} | metrics
    return run | {"failed_at": None, "metrics": metrics}


def record(task, setting, method, *runs, schedule="cosine"):
    return {
        "task": task,
        "setting": setting,
        "method": method,
        "num_train": 640,
        "num_test": 320,
        "published_num_train": 12_800,
        "epochs": 2,
        "steps": 40,
        "recipe": {"batch_size": 32, "schedule": schedule},
        "model": {"precision": {"compute": "float32"}, "init_std": 0.1},
        "environment": {"device": "a chip"},
        "runs": list(runs),
    }


RECORDS = [
    record("compression", "default", "ipttcd", run(0.2), run(0.6, rate=1e-4), run(None, rate=1.0)),
    record("compression", "vocab_size=32", "ipttcd", run(0.4)),
    record("memorization", "default", "ipttcd", run(0.9)),
    record("compression", "default", "swa", run(0.25)),
    record("memorization", "default", "swa", run(None)),
]


def test_a_score_is_the_mean_over_settings_of_the_best_run():
    ipttcd, swa = score_table(RECORDS)
    assert ipttcd["method"] == "IP-TTCD"
    assert ipttcd["compression"] == "50.0 / 25.0 (50.0)"
    assert ipttcd["memorization"] == "90.0 / 45.0 (88.9)"
    assert ipttcd["mean"] == "70.0 (69.5)"
    assert list(ipttcd) == ["method", "memorization", "compression", "mean"]
    assert (swa["compression"], swa["memorization"], swa["mean"]) == ("25.0 / 12.5", "-", "25.0")


def test_seeds_are_averaged_before_the_best_is_taken():
    runs = [run(0.9, seed=1), run(0.1, seed=2), run(0.6, 1e-4, seed=1), run(0.6, 1e-4, seed=2)]
    best = best_run(record("compression", "default", "swa", *runs))
    assert best["rate"] == 1e-4
    assert best["metrics"]["macro_accuracy"] == pytest.approx(0.6)
    half_failed = [run(0.9, seed=1), run(None, seed=2)]
    assert best_run(record("compression", "default", "swa", *half_failed)) is None


def test_a_curve_is_the_mean_over_the_seeds_of_the_best_pair_in_steps():
    other = run(0.1, rate=1e-4, curve=(0.0, 0.1))
    pair = [run(0.5, seed=1, curve=(0.1, 0.5)), run(0.7, seed=2, curve=(0.3,))]
    curve = mean_curve([record("compression", "default", "swa", other, *pair)])
    np.testing.assert_allclose(curve, [[20, 0.2]])  # both seeds have it; 40 steps in 2 epochs
    assert mean_curve([record("compression", "default", "swa", run(None))]).shape == (0, 2)


def test_the_picture_has_a_panel_per_task_also_where_a_method_failed(tmp_path):
    tasks = ("compression", "memorization", "selective-copying", "in-context-recall")
    records = [record(task, "default", "ipttcd", run(0.5, curve=(0.1, 0.5))) for task in tasks]
    records.append(record("compression", "default", "swa", run(None)))
    sizes = []
    for count in (1, 5):
        draw_curves(tmp_path / "curves.png", records[:count])
        image = (tmp_path / "curves.png").read_bytes()
        assert image.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(image[20:24]))
    assert sizes[1] > 1.7 * sizes[0]  # four tasks take a second row


def test_footnotes_tell_the_budget_the_options_and_what_failed():
    text = "\n".join(footnotes(RECORDS))
    assert "memorization 1 of 6, compression 2 of 11" in text
    budget = "40 steps (2 epochs) of 32 rows, 640 training rows (published: 12,800), 320 test rows"
    assert f"budget of memorization, compression: {budget}" in text
    longer = record("selective-copying", "default", "swa", run(0.1)) | {"steps": 80}
    text_of_both = "\n".join(footnotes([*RECORDS, longer]))
    assert f"budget of memorization, compression: {budget}" in text_of_both
    assert "budget of selective-copying: 80 steps" in text_of_both
    assert "2 of 7 not finite" in text
    assert "schedule cosine, score of the last epoch (published code: constant" in text
    assert "initial standard deviation 0.1 (published: 0.02)" in text
    assert "float32 on a chip" in text
    odd = record("compression", "default", "swa", run(0.1), schedule="constant")
    assert "schedule constant, cosine" in "\n".join(footnotes([*RECORDS, odd]))


def test_the_memory_table_has_the_accuracy_without_it():
    held = {"macro_accuracy_off": 0.1, "memory_ratio": [0.5, 1.0], "gate_mean": [0.5, 0.25]}
    with_memory = record("compression", "default", "ipttcd", run(0.2, **held, key_rank=[3.0, 9.5]))
    (row,) = memory_table([with_memory, RECORDS[3]])
    assert (row["on"], row["off"]) == ("20.0", "10.0")
    assert (row["|eta S|/|W|"], row["beta"], row["key rank"]) == ("0.5 1", "0.5 0.25", "3 9.5")


def test_the_published_table():
    assert PUBLISHED["ipttcd"]["fuzzy-in-context-recall"] == 56.2
    assert PUBLISHED["deltanet"]["compression"] == 42.3
    mean = sum(PUBLISHED["ipttcd"].values()) / 6
    assert mean == pytest.approx(82.07, abs=0.01)
