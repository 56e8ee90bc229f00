import json

import commands
import pytest


def test_the_benchmark_writes_table_and_report(tmp_path):
    file = tmp_path / "report.json"
    result = commands.run("bench_mad", "--quick", "--method=swa", f"--json={file}", is_forked=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert report["environment"]["device"] in result.stdout
    assert [row["program"] for row in report["rows"]] == [
        "all runs at once",
        "one after another, epoch by epoch",
        "one after another, step by step",
    ]
    assert all(row["run-steps per s"] > 0 for row in report["rows"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--task=recall", "--task=recall is not one of in-context-recall"),
        ("--method=gpt", "--method=gpt is not one of ipttcd"),
        ("--json=/no/such/file", "--json: no folder /no/such"),
    ],
)
def test_a_users_mistake_is_one_line(argument, message):
    result = commands.run("bench_mad", argument)
    assert commands.mistake(result).startswith(f"error: {message}")
