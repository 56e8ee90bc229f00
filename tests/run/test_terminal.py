import sys
import time

from ttcd_jax.run import terminal


def _start(monkeypatch):
    clock = iter((0.0, 1.5, 2.0, 2.01, 3.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for name in ("importing", "reading data", "compiling"):
        with terminal.phase(name):
            pass
    terminal.say_started()


def test_a_log_gets_one_line_for_all_phases_of_the_start(capsys, monkeypatch):
    _start(monkeypatch)
    assert capsys.readouterr().out == "started in 9.5 s: importing 1.5, compiling 8.0\n"


def test_a_terminal_shows_each_phase_while_it_lasts(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _start(monkeypatch)
    names = ("importing ...", "reading data ...", "compiling ...")
    shown = "".join(f"\r\x1b[K{name}\r\x1b[K" for name in names)
    assert capsys.readouterr().out == f"{shown}started in 9.5 s: importing 1.5, compiling 8.0\n"
