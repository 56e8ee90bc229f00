"""Pictures are real PNGs, in which a run has one colour."""

import struct
import sys
import warnings
from pathlib import Path

import pytest

from ttcd_jax.measure.pictures import coloured_by_run, looks, plot_bars, plot_lines

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(PNG_SIGNATURE)
    return struct.unpack(">II", data[16:24])


def _lines(path: Path, **changes) -> None:
    arguments = {
        "title": "Loss by position, $5 each",
        "x_label": "context",
        "y_label": "loss",
        "series": {"IP-TTCD": ([1024, 4096, 16384], [3.0, None, 2.5]), "SWA": ([1024], [3.1])},
    }
    plot_lines(path, **(arguments | changes))


def test_lines_are_drawn(tmp_path):
    path = tmp_path / "new" / "loss.png"
    _lines(path)
    assert _png_size(path) == (1600, 900)
    assert [file.name for file in path.parent.iterdir()] == ["loss.png"]


def test_lines_without_a_point_give_no_warning(tmp_path):
    for points in (([], []), ([1024, 4096], [None, None]), ([0], [1.0])):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _lines(tmp_path / "loss.png", series={"SWA": points})


def test_a_long_legend_makes_the_picture_higher_not_its_panel_smaller(tmp_path):
    path, name = tmp_path / "loss.png", "IP-TTCD (a run with a long name), fast weights on"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a legend that leaves no room
        _lines(path, series={f"{name} {run}": ([1, 2], [3.0, 2.0]) for run in range(24)})
    assert _png_size(path) == (1600, 900 + 21 * 50)


def test_bars_are_drawn_with_missing_values(tmp_path):
    path = tmp_path / "tasks.png"
    plot_bars(
        path,
        title="Accuracy",
        x_label="task",
        y_label="accuracy",
        groups=["recall", "copy"],
        series={"SWA": [0.2, None], "IP-TTCD": [0.9, 0.5]},
        chance=0.1,
    )
    assert _png_size(path) == (1600, 900)


def test_series_of_other_lengths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="x and y must have same first dimension"):
        _lines(tmp_path / "loss.png", series={"IP-TTCD": ([1, 2], [3.0])})
    assert list(tmp_path.iterdir()) == []


def test_a_picture_replaces_the_old_one_only_when_whole(tmp_path):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        _lines(path, series={"SWA": ([1], [object()])})
    assert path.read_bytes() == b"old"
    _lines(path)
    assert _png_size(path) == (1600, 900)


def test_the_series_of_a_run_share_its_colour():
    names = ["SWA, long, off", "SWA", "IP-TTCD, on", "IP-TTCD, off", "other"]
    with coloured_by_run(["SWA", "IP-TTCD", "SWA, long"]) as colours:
        long, swa, on, off, other = looks(names)
        (alone,) = looks(["IP-TTCD, off"])
    assert colours["SWA"] == swa.colour != long.colour == colours["SWA, long"]
    assert on.colour == off.colour == alone.colour == colours["IP-TTCD"]
    assert on.dashes != off.dashes
    assert on.hatch != off.hatch
    assert other.colour not in colours.values()
    assert len({look.colour for look in looks(names)}) == 5  # without runs, all differ


def test_missing_packages_name_the_extra(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    old = tmp_path / "loss.png"
    old.write_bytes(b"of another evaluation")
    _lines(old)
    assert not old.exists()
    assert "matplotlib is missing, install ttcd_jax[report]" in caplog.text
