"""The page lists everything, escapes it, and needs no other file; pictures are real PNGs, in which
a run has one colour."""

import base64
import re
import struct
import sys
import warnings
from pathlib import Path

import pytest

from ttcd_jax.measure.page import Published, Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run, looks, plot_bars, plot_lines

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CONTENT = PNG_SIGNATURE + b"picture"


def _page(path: Path, **changes) -> str:
    write_page(path, **({"title": "Run"} | changes))
    return path.read_text(encoding="utf-8")


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "loss 1.png"
    path.write_bytes(CONTENT)
    return path


def test_the_page_lists_everything(tmp_path, picture):
    table = [{"window": 64, "ppl": 3.25}, {"window": 128, "note": "short"}]
    published = Published("Table 1", [{"model": "SWA", "4K": 44.88}])
    section = Section("Perplexity", table, [Picture(picture, "Lower, by `ppl`.")], [published])
    page = _page(
        tmp_path / "report.html",
        title="Quickstart",
        runs=[{"run": "SWA", "steps": 250}, {"run": "other", "steps": 3}],
        colours={"SWA": "#0072B2"},
        sections=[section],
        next_steps=["`python -m experiments.evaluate --run_dir=runs/q`"],
    )
    for expected in (
        '<span class="chip" style="background: #0072B2"></span>SWA</td>',
        *("<title>Quickstart</title>", "<td>other</td>", ">Perplexity</h2>", "<td>short</td>"),
        *(f'<td class="number">{x}</td>' for x in ("3.250", "-", "44.88")),
        f'src="data:image/png;base64,{base64.b64encode(CONTENT).decode()}"',
        *("<code>ppl</code>", "<summary>Published: Table 1</summary>", "not measured here"),
        "<code>python -m experiments.evaluate --run_dir=runs/q</code>",
    ):
        assert expected in page
    assert page.count("<img") == 1
    assert "<h2" not in _page(tmp_path / "empty.html")


def test_columns_of_a_run_are_below_its_name(tmp_path):
    table = [{"task": "vt", "A, on": 1.0, "A, off": 2.0, "A, b, on": 3.0, "note": "x"}]
    colours = {"A": "#0072B2", "A, b": "#D55E00"}
    sections = [Section("RULER", table, [])]
    page = _page(tmp_path / "report.html", colours=colours, sections=sections)
    runs = re.findall(r'<th colspan="(\d)" scope="colgroup" class="run">.*?</span>(.*?)</th>', page)
    assert runs == [("2", "A"), ("1", "A, b")]
    names = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page)
    assert names == ["task", "on", "off", "on", "note"]
    table = [{"task": "vt", "A": 1.0, "A, b": 3.0}]
    sections = [Section("RULER", table, [])]
    assert "<th colspan" not in _page(tmp_path / "plain.html", colours=colours, sections=sections)


def test_the_page_escapes_all_it_is_given_and_refers_to_no_other_file(tmp_path, picture):
    attack = "\"><script>alert('x')</script>`<script>`"
    table = [{attack: attack}]
    section = Section(attack, table, [Picture(picture, attack)], [Published(attack, table)])
    arguments = {"title": attack, "runs": table, "next_steps": [attack]}
    page = _page(tmp_path / "report.html", sections=[section] * 3, **arguments)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert") >= 23
    assert re.findall('href="(.*?)"', page) == ["#s1", "#s2", "#s3"]
    assert [source[:5] for source in re.findall('src="(.*?)"', page)] == ["data:"] * 3
    assert "url(" not in page
    assert "@import" not in page


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


def test_lines_are_drawn_without_a_warning_and_replace_the_old_ones_when_whole(tmp_path):
    """A long legend makes the picture higher, not its panel smaller."""
    path, name = tmp_path / "new" / "loss.png", "IP-TTCD (a run with a long name), fast weights on"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a legend that leaves no room, too
        _lines(path, series={f"{name} {run}": ([1, 2], [3.0, 2.0]) for run in range(24)})
        assert _png_size(path) == (1600, 900 + 21 * 50)
        for points in (([], []), ([1024, 4096], [None, None]), ([0], [1.0])):
            _lines(path, series={"SWA": points})  # no point
        _lines(path)
    assert _png_size(path) == (1600, 900)
    old = path.read_bytes()
    for points, error in (([1], [object()]), TypeError), (([1, 2], [3.0]), ValueError):
        with pytest.raises(error):
            _lines(path, series={"SWA": points})
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == ["loss.png"]


def test_bars_are_drawn_with_missing_values(tmp_path):
    path, labels = tmp_path / "tasks.png", dict.fromkeys(("title", "x_label", "y_label"), "task")
    series = {"SWA": [0.2, None], "IP-TTCD": [0.9, 0.5]}
    plot_bars(path, groups=["recall", "copy"], series=series, chance=0.1, **labels)
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


def test_without_the_packages_there_is_nothing_old_and_the_extra_is_named(
    tmp_path, monkeypatch, caplog
):
    for name, path, write in (
        ("matplotlib", tmp_path / "loss.png", _lines),
        ("jinja2", tmp_path / "report.html", lambda path: write_page(path, title="x")),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        path.write_bytes(b"of another evaluation")
        write(path)
        assert not path.exists()
        assert f"{name} is missing, install ttcd_jax[report]" in caplog.text
