"""The page shows what any command has measured."""

import json

import commands
import pytest
from checks import refused
from ttcd_kernels import measure

from experiments.studies.kernels import runner
from ttcd_jax.commands.report.sections import write_report
from ttcd_jax.errors import DataError


def test_the_tables_of_measurements_are_on_the_page(tmp_path):
    kernels, case = tmp_path / "kernels.json", tmp_path / "step.json"
    store, job = runner.Store(None, kernels, 9), runner.Job("times", "decode", "300/100 H6")
    store[job] = job._asdict() | {"forward time ms": 0.5, "note": ""}
    store.write()
    rows = [{"gin": "recall.gin", "step ms": 2.5, "note": "<b>"}]
    case.write_text(json.dumps({"environment": measure.environment(), "rows": rows}))
    given = f"--run_dir={kernels}", f"--run_dir={case}", f"--records={tmp_path}/x.jsonl"
    printed = commands.output("report", *given)
    head, *found = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    assert ("--run_dir=DIR" in head["command"], len(found) > 1) == (True, True)
    assert rows[0].items() < found[-1].items()
    page = (tmp_path / "report" / "index.html").read_text()
    for text in ("kernels rows (cpu, ", "step rows (cpu, "):
        assert text in printed
        assert text in page
    assert "&lt;b&gt;" in page
    assert "300/100 H6" in page


@pytest.mark.parametrize("content", ["{}", '{"environment": {"device": "cpu", "commit": 1}}', "["])
def test_a_file_without_tables_is_one_line(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    refused(str(path), write_report, [path], tmp_path, [], error=DataError)


def test_a_headroom_is_between_two():
    arguments = "--run_dir=x", "--headroom=a", "--headroom=a"
    assert "a control and a ceiling, got a, a: give two" in commands.refused("report", *arguments)
