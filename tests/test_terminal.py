"""Lines on the terminal."""

import time

from ttcd_jax import terminal


def test_a_log_gets_one_line_for_all_phases_of_the_start(capsys, monkeypatch):
    clock = iter((0.0, 1.5, 2.0, 2.01, 3.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for name in ("importing", "reading data", "compiling"):
        with terminal.phase(name):
            pass
    terminal.say_started()
    assert capsys.readouterr().out == "started in 9.5 s: importing 1.5, compiling 8.0\n"
