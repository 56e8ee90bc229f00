"""Pictures are real PNGs, the page lists everything and escapes it."""

import struct
import sys
from pathlib import Path

import pytest

from ttcd_jax.errors import UserError
from ttcd_jax.eval.report import Picture, Section, plot_bars, plot_lines, write_page

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


def _page(path: Path, **changes) -> str:
    arguments = {"title": "Run", "summary": "", "sections": [], "next_steps": []}
    write_page(path, **(arguments | changes))
    return path.read_text(encoding="utf-8")


def test_lines_are_drawn(tmp_path):
    path = tmp_path / "new" / "loss.png"
    _lines(path)
    assert _png_size(path) == (1600, 900)
    assert [file.name for file in path.parent.iterdir()] == ["loss.png"]


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
    with pytest.raises(AssertionError, match="IP-TTCD: 2 x values for 1 y values"):
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


def test_the_page_lists_everything(tmp_path):
    table = [{"window": 64, "ppl": 3.25}, {"window": 128, "note": "short"}]
    page = _page(
        tmp_path / "report.html",
        title="Quickstart",
        summary="First. Run `make test`.",
        sections=[
            Section("Perplexity", table, [Picture(Path("pictures/loss 1.png"), "Lower is better.")])
        ],
        next_steps=["`python -m experiments.evaluate --run_dir=runs/q`"],
    )
    for expected in (
        "<title>Quickstart</title>",
        "<p>First.",
        "<code>make test</code>",
        "<h2>Perplexity</h2>",
        '<td class="number">3.250</td>',
        "<td>short</td>",
        '<td class="number">-</td>',
        '<img src="pictures/loss%201.png" alt="Perplexity"',
        "<figcaption>Lower is better.</figcaption>",
        "<code>python -m experiments.evaluate --run_dir=runs/q</code>",
    ):
        assert expected in page
    assert "<h2>" not in _page(tmp_path / "empty.html")


def test_the_page_escapes_all_it_is_given(tmp_path):
    attack = "\"><script>alert('x')</script>`<script>`"
    attacked = Section(attack, [{attack: attack}], [Picture(Path(attack), attack)])
    link = Section("link", [], [Picture(Path("javascript:alert(1)"), "")])
    arguments = {"title": attack, "summary": attack, "next_steps": [attack]}
    page = _page(tmp_path / "report.html", sections=[attacked, link], **arguments)
    assert "<script" not in page
    assert "javascript:" not in page
    assert page.count("&lt;script&gt;alert") >= 8


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"matplotlib; install ttcd_jax\[report\]"):
        _lines(tmp_path / "loss.png")
    with pytest.raises(UserError, match=r"jinja2; install ttcd_jax\[report\]"):
        _page(tmp_path / "report.html")
