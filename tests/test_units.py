"""Numbers and lines on the terminal."""

import time

from ttcd_jax import terminal
from ttcd_jax.units import clock, count, size


def test_a_number_is_printed_in_its_unit():
    sizes = {2**30 * 72.125: "72.12 GiB", 4e6: "3.81 MiB", 2**20: "1.00 MiB", 1536: "1.50 KiB"}
    counts = {2**20: "1M", 4096: "4K", 512: "512", 1600: "1,600"}
    times = {75.0: "1:15", 59.6: "1:00", 7384: "2:03:04"}
    for printed, expected in (
        (size, sizes | {1023: "1023 bytes"}),
        (count, counts),
        (clock, times),
    ):
        assert {x: printed(x) for x in expected} == expected


def test_a_log_gets_one_line_for_all_phases_of_the_start(capsys, monkeypatch):
    clock = iter((0.0, 1.5, 2.0, 2.01, 3.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for name in ("importing", "reading data", "compiling"):
        with terminal.phase(name):
            pass
    terminal.say_started()
    assert capsys.readouterr().out == "started in 9.5 s: importing 1.5, compiling 8.0\n"
