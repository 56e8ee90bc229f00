import json
import subprocess
import sys

import pytest


def command(*arguments):
    line = [sys.executable, "-m", "experiments.bench_mad", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_the_benchmark_writes_table_and_report(tmp_path):
    file = tmp_path / "report.json"
    result = command("--quick", "--method=swa", f"--json={file}")
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
    result = command(argument)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
