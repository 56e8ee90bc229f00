"""Numbers and lines on the terminal."""

import time

import pytest

from ttcd_jax import terminal
from ttcd_jax.units import clock, count, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (size(2**30 * 72.125), "72.12 GiB"),
        (size(4e6), "3.81 MiB"),
        (size(2**20), "1.00 MiB"),
        (size(1536), "1.50 KiB"),
        (size(1023), "1023 bytes"),
        (count(2**20), "1M"),
        (count(4096), "4K"),
        (count(512), "512"),
        (count(1600), "1,600"),
        (clock(75.0), "1:15"),
        (clock(59.6), "1:00"),
        (clock(7384), "2:03:04"),
    ],
)
def test_a_number_is_printed_in_its_unit(text, expected):
    assert text == expected


def test_a_log_gets_one_line_for_all_phases_of_the_start(capsys, monkeypatch):
    clock = iter((0.0, 1.5, 2.0, 2.01, 3.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for name in ("importing", "reading data", "compiling"):
        with terminal.phase(name):
            pass
    terminal.say_started()
    assert capsys.readouterr().out == "started in 9.5 s: importing 1.5, compiling 8.0\n"
