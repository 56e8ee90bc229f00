"""The page of runs that were trained: curves by step of what was evaluated meanwhile, the row of a
run, its settings. The directories are written here, nothing is trained."""

import html
import json
from types import SimpleNamespace

import pytest
from small_models import SETTINGS, config_of, run_config

from ttcd_jax.inference.state import state_bytes
from ttcd_jax.measure.pictures import COLOURS
from ttcd_jax.precision import Precision
from ttcd_jax.run import page
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.page import Run, settings_section, training_sections, write_report

DELTA = SETTINGS["ipttcd"].replace(form="auto", corrects_errors=True)
MODEL = config_of("ipttcd", fast_layers=(0, 1), memory=DELTA, precision=Precision())
STEPS = {  # of a step: the metrics of training
    1: {"loss": 4.0, "tokens_per_second": 1.0, "memory_ratio/0": 9.0, "memory_ratio/1": 9.0},
    2: {"loss": 3.0, "tokens_per_second": 70.0, "memory_ratio/0": 0.1, "memory_ratio/1": 0.3},
    3: {"loss": None, "tokens_per_second": 90.0, "memory_ratio/0": 0.3, "memory_ratio/1": 0.5},
}
# Of a step: memory on, off.
ACCURACIES = {2: (0.4, 0.1), 3: (0.9, 0.2), 4: (0.6, None)}


@pytest.fixture
def made(tmp_path):
    def make(label, model=MODEL, cases="a", **changes):
        directory = RunDirectory(tmp_path / label)
        directory.claim(run_config(model, **changes).to_dict(), "", {})
        records = [{"step": step} | metrics for step, metrics in STEPS.items()]
        for step, values in ACCURACIES.items():
            names = zip(("fast weights on", "off (eta = 0)"), values, strict=True)
            found = {f"recall/{model.label}, {x}": y for x, y in names}
            buckets = {f"{x}/{b}": y for x, y in found.items() for b, y in (("1", 0.0), ("far", y))}
            records.append({"step": step, "distillation/gap_on/1": step / 8} | buckets)
        files = {
            "metrics.jsonl": "".join(json.dumps(x) + "\n" for x in records),
            "evaluations.json": json.dumps({"recall {}": {"": cases}}),
            "environment.json": json.dumps(
                {
                    "command": ["/x/commands/launch.py", "--gin=a b.gin"],
                    "commit": "0123456789abcdef",
                    "devices": ["cpu", "cpu"],
                }
            ),
        }
        for name, text in files.items():
            (directory.path / name).write_text(text)
        return Run(label, directory.path)

    return make


def test_what_was_evaluated_in_training_is_a_curve_of_the_last_bucket(made, tmp_path):
    runs = [made("mine"), made("yours", seed=1), made("elsewhere", cases="b")]
    section, *_ = training_sections(runs, tmp_path)
    assert section.title == "Evaluations by step"
    layer, shared, alone = (picture.path.read_text() for picture in section.pictures)
    for expected in (
        *("mine, fast weights on\n3: 0.9", "mine, off (eta = 0)\n2: 0.1", "yours, fast weights on"),
        *(">Recall accuracy, by step<", ">step<", ">accuracy<", ">3</text>"),
    ):
        assert expected in shared
    assert "off (eta = 0)\n4" not in shared, "it was not finite"
    assert not any(x in shared for x in ("elsewhere", "on\n2: 0<", "layer 1"))
    assert "elsewhere, fast weights on\n4: 0.6" in alone, "other cases"
    assert "mine, layer 1\n4: 0.5" in layer
    assert "elsewhere, layer 1" in layer
    rows = {row["evaluated"]: row for row in section.table}
    expected = {"last step": 4, "last": 0.6, "best": 0.9, "best step": 3}
    assert rows["mine, fast weights on"].items() >= expected.items()
    assert rows["mine, fast weights on"]["measure"] == (
        "accuracy (distance from the query back to the value: far)"
    )
    assert (rows["mine, layer 1"]["best"], rows["mine, layer 1"]["best step"]) == (0.25, 2)
    for picture, better in zip(section.pictures, ("lower", "higher", "higher"), strict=True):
        assert picture.sentence.endswith(f"{better} is better.")
    once = made("once")
    once.metrics[:] = [x for x in once.metrics if x["step"] < 3 and "loss" not in x]
    assert training_sections([once], tmp_path) == []


def test_curves_have_values_at_steps_1_2_and_5(made, tmp_path):
    section = training_sections([made("mine")], tmp_path)[2]
    assert section.title == "Size of the memory, mean over layers"
    [row] = section.table
    values = {name: pytest.approx(x) for name, x in (("step 1", 9.0), ("step 2", 0.2))}
    assert row == {"run": "mine", "step": 3, "|eta S| / |W_base|": pytest.approx(0.4)} | values


def test_a_run_has_a_row_and_its_settings(made):
    mine, other = made("mine"), made("other", config_of("swa", precision=Precision()), seed=3)
    assert (mine.row["tokens/s"], mine.row["steps"], mine.row["device"]) == (70.0, 4, "cpu")
    assert mine.row["|eta S|/|W|"] == "0.3, 0.5"
    assert mine.row["training FLOPs"] == mine.row["FLOPs per token"] * mine.length * 2 * 4
    assert mine.numbers("memory_ratio") == {1: 9.0, 2: 0.2, 3: 0.4}
    assert mine.numbers("loss") == {1: 4.0, 2: 3.0}
    silent = made("silent", MODEL.replace(memory=MODEL.memory.replace(eta=0.0)))
    assert [x.facts.has_memory for x in (mine, other, silent)] == [True, False, False]
    held = state_bytes(MODEL, 1, max_length=mine.length)["total"]
    assert (mine.facts.state, mine.row["held per text"]) == (held, f"{held / 1024:.2f} KiB")
    config = json.loads((other.path / "config.json").read_text())
    config["changes"] = [{"step": 3, "field": "RunConfig.steps", "old": 4, "new": 8}]
    (other.path / "config.json").write_text(json.dumps(config))
    of_steps = ((4, "recall"), (2, "ppl"), (4, "ruler"))
    results = {"mine": [SimpleNamespace(step=step, folder=x) for step, x in of_steps]}
    section = settings_section([mine, other], results)
    settings = {row["setting"]: (row.get("mine"), row.get("other")) for row in section.table}
    assert settings["evaluated at step"][0] == "2 (ppl); 4 (recall, ruler)"
    assert settings["seed"] == ("0", "3")
    assert settings["model.method"] == ("ipttcd", "swa")
    assert settings["commit"] == ("0123456789ab",) * 2
    assert settings["model.window"] == ("4", "4")
    assert "batch_size" not in settings, "it is the same"
    assert settings["|eta S|/|W|"] == ("0.3, 0.5",) * 2
    assert section.lines[0].startswith("mine: `ttcd launch '--gin=a b.gin'`; configuration")
    assert "`, since then RunConfig.steps = 8; configuration" in section.lines[1]


def test_a_page_of_training_alone_shows_all_of_it(made, tmp_path):
    sections = write_report(tmp_path / "index.html", [made("a & b")], {}, tmp_path)
    page = html.unescape((tmp_path / "index.html").read_text())
    for section in sections:
        assert f">{section.title}</h2>" in page
        assert not section.is_detail
    assert "<summary>Settings and commands</summary>" in page
    assert f'style="background: {COLOURS["IP-TTCD"]}"></span>a & b</td>' in page
    assert page.count("<svg") == 4  # recall, distillation, loss, size of the memory
    assert "No control here:</strong> a & b." in page


def test_records_have_numbers_where_tables_have_them():
    cells = {"a": "1,234.5 ± 0.50", "b": "4.148 (no interval)", "c": "4,1 x", "d": None, "e": 7}
    assert [*map(page._number, cells.values())] == [[1234.5, 0.5], 4.148, "4,1 x", None, 7]
