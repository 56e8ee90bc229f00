"""The page lists everything, escapes it, and needs no other file."""

import base64
import re
import sys
from pathlib import Path

import pytest

from ttcd_jax.measure.page import Published, Section, write_page
from ttcd_jax.measure.pictures import Picture

CONTENT = b"\x89PNG\r\n\x1a\npicture"


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
        "<title>Quickstart</title>",
        '<span class="chip" style="background: #0072B2"></span>SWA</td>',
        "<td>other</td>",
        ">Perplexity</h2>",
        '<td class="number">3.250</td>',
        "<td>short</td>",
        '<td class="number">-</td>',
        f'src="data:image/png;base64,{base64.b64encode(CONTENT).decode()}"',
        "<code>ppl</code>",
        "<summary>Published: Table 1</summary>",
        "not measured here",
        '<td class="number">44.88</td>',
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


def test_the_page_refers_to_no_other_file(tmp_path, picture):
    sections = [Section(f"S{i}", [], [Picture(picture, "Shown.")]) for i in range(3)]
    page = _page(tmp_path / "report.html", sections=sections)
    links = [part.split('"')[0] for part in page.split('href="')[1:]]
    sources = [part.split('"')[0] for part in page.split('src="')[1:]]
    assert links == ["#s1", "#s2", "#s3"]
    assert all(source.startswith("data:") for source in sources)
    assert len(sources) == 3
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_escapes_all_it_is_given(tmp_path, picture):
    attack = "\"><script>alert('x')</script>`<script>`"
    table = [{attack: attack}]
    section = Section(attack, table, [Picture(picture, attack)], [Published(attack, table)])
    arguments = {"title": attack, "runs": table, "next_steps": [attack]}
    page = _page(tmp_path / "report.html", sections=[section], **arguments)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert") >= 11


def test_without_jinja2_there_is_no_page_and_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (tmp_path / "report.html").write_text("of an earlier report")
    write_page(tmp_path / "report.html", title="x")
    assert not (tmp_path / "report.html").exists()
    assert "jinja2 is missing, install ttcd_jax[report]" in caplog.text
