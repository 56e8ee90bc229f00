"""Lines on the terminal."""

import contextlib
import io
import os
import pty
import termios
import time

from ttcd_jax import terminal
from ttcd_jax.commands.cli import _shown


def test_a_log_gets_one_line_for_all_phases_of_the_start(capsys, monkeypatch):
    clock = iter((0.0, 1.5, 2.0, 2.01, 3.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for name in ("importing", "reading data", "compiling"):
        with terminal.phase(name):
            pass
    terminal.say_started()
    assert capsys.readouterr().out == "started in 9.5 s: importing 1.5, compiling 8.0\n"


def test_the_time_left_is_by_work_since_the_first_report(monkeypatch):
    """That takes five minutes of compilation, which tell nothing of the others; the second is too
    early for a line."""
    monkeypatch.setattr(time, "monotonic", iter((0.0, 300.0, 305.0, 320.0, 350.0)).__next__)
    progress = terminal.Progress(log := io.StringIO(), 600)
    for done in (100, 200, 400, 600):
        progress.report(done, f"{done} of 600")
    lines = ["100 of 600", "400 of 600, 0:13 left", "600 of 600, 0:00 left"]
    assert log.getvalue().splitlines() == lines


def test_a_terminal_gets_a_coloured_bar_that_fits_and_a_log_plain_lines(capsys):
    """Control characters are escaped in the line, not in what draws the bar."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 48))
    with open(its, "w") as stream:
        stream.write = lambda text: type(stream).write(stream, _shown(text))  # as commands have it
        for is_kept in (True, False):
            progress = terminal.Progress(stream, 10)
            for done in (5, 10):
                progress.left(done)
                progress.show(f"row {done}\x1b[2J {'long ' * 20}", is_last=is_kept and done == 10)
            progress.end()
    drawn = b""
    with contextlib.suppress(OSError):  # the end
        while part := os.read(ours, 10_000):
            drawn += part
    kept, cleared = drawn.decode().split("\r\n")
    frames = [frame for frame in kept.split("\r") if "row" in frame]
    assert ["█" * 10 + " " * 10 in x for x in frames] == [True, False, False]
    assert all(x.startswith("\x1b[32m") and "\\x1b[2J long" in x for x in frames)
    assert max(len(x.replace("\x1b[32m", "").replace("\x1b[0m", "")) for x in frames) <= 48
    assert cleared.split("\r")[-2].strip() == ""
    log = io.StringIO()
    terminal.Progress(log, 10).show("row 5\x1b[2J")
    assert log.getvalue() == "row 5\\x1b[2J\n"
