"""An evaluation that is killed goes on when its command is given again; it shows its progress."""

import shutil
import signal
import sys
import time

import commands
from small_models import byte_model
from tiny_run import save_text_model

from ttcd_jax.measure.journal import RowProgress

# The command, killed before it computes batch `killed_at`.
PROGRAM = """
import os, runpy, signal, sys

from ttcd_jax.measure import journal
from ttcd_jax.measure.scorer import Scorer

killed_at, read = int(sys.argv.pop(1)), Scorer._in_one_pass
computed = []
journal._SECONDS = 0.0

def noted(*arguments):
    if len(computed) == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    computed.append(1)
    print("computed", file=sys.stderr, flush=True)
    return read(*arguments)

Scorer._in_one_pass = noted
runpy.run_module("experiments.evaluate", run_name="__main__", alter_sys=True)
"""


def test_a_killed_command_goes_on_and_writes_the_same_results(tmp_path):
    program, run_dir, text = tmp_path / "program.py", tmp_path / "run", tmp_path / "text.txt"
    program.write_text(PROGRAM)
    text.write_text("a text that is measured " * 20)
    save_text_model(run_dir, byte_model())
    options = (f"--run_dir={run_dir}", "--task=ppl", f"--text={text}", "--seq_len=32")

    def evaluate(killed_at, status=0):
        result = commands.run(program, str(killed_at), *options, "--batch_size=4")
        assert result.returncode == status, result.stderr
        return result.stderr.count("computed")

    def results():
        return {x.name: x.read_bytes() for x in (run_dir / "eval" / "ppl").iterdir()}

    num_batches = evaluate(-1)
    assert num_batches == 8  # 4 with the memory, 4 without
    expected = results()
    shutil.rmtree(run_dir / "eval")
    assert evaluate(2, -signal.SIGKILL) == 2
    assert evaluate(3, -signal.SIGKILL) == 3  # in the second variant
    assert not (run_dir / "eval" / "ppl" / "results.json").exists()
    assert evaluate(-1) == num_batches - 5
    assert results() == expected


def test_the_time_left_is_by_work_since_the_first_batch(capsys, monkeypatch):
    clock = iter((0.0, 300.0, 305.0, 320.0, 350.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = RowProgress("ppl, on", 4, 10, 600)
    progress.add(1, 100)  # five minutes of compilation, which tell nothing of the others
    progress.add(1, 100)  # too early for a line
    progress.add(2, 200)
    progress.add(2, 200)
    progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "ppl, on: 5 of 10 rows",
        "ppl, on: 8 of 10 rows, 0:13 left",
        "ppl, on: 10 of 10 rows, 0:00 left",
    ]


def test_progress_at_a_terminal_is_one_line_that_is_cleared(capsys, monkeypatch):
    clock = iter((0.0, 1.0, 2.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = RowProgress("ppl", 0, 2, 20)
    progress.add(1, 10)
    progress.add(1, 10)
    progress.end()
    lines = ("ppl: 0 of 2 rows", "ppl: 1 of 2 rows", "ppl: 2 of 2 rows, 0:00 left", "")
    assert capsys.readouterr().err == "".join(f"\r\x1b[K{line}" for line in lines)


def test_an_evaluation_without_a_name_shows_nothing(capsys, monkeypatch):
    clock = iter((0.0, 1000.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    RowProgress("", 0, 2, 20).add(1, 10)
    assert capsys.readouterr().err == ""
