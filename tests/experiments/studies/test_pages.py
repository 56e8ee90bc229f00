"""The pages: their measured tables and pictures are those that `make pages` draws from records."""

import re

import pytest
from checks import refused
from commands import ROOT

from experiments.studies import pages

SPECS = pages.specs()
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
MEASURED = re.compile(r"\d\.\d\d|±")  # in a cell


def _without_blocks(page):
    return re.sub(r"<!-- table: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_command_draws(page):
    assert page.read_text() == pages.drawn(page), "run `make pages`"
    tables = [x for x in _without_blocks(page).splitlines() if x.startswith("|")]
    assert [x for x in tables if MEASURED.search(x)] == []


@pytest.mark.parametrize("name", SPECS["picture"])
def test_a_picture_is_what_the_command_draws(name, tmp_path):
    pytest.importorskip("matplotlib")
    pages.draw(SPECS["picture"][name], path := tmp_path / f"{name}.svg")
    assert (ROOT / "docs" / path.name).read_text() == path.read_text(), "run `make pages`"


def test_pages_show_every_table_and_no_other_picture():
    text = "".join(page.read_text() for page in pages.PAGES)
    assert sorted(re.findall(r"<!-- table: (\S+) -->", text)) == sorted(SPECS["table"])
    assert {x.stem for x in (ROOT / "docs").glob("*.svg")} == {*SPECS["picture"], "method"}
    assert {x.stem for x in pages.RECORDS.glob("*.jsonl")} <= {
        *(spec.get("records", name) for kind in SPECS.values() for name, spec in kind.items()),
        *re.findall(r"records/(\w+)\.jsonl\)", text),
    }


def test_numbers_in_sentences_and_printed_lines_are_in_records():
    code = r"```(?!text).*?\n(?s:.*?)```|`[^`\n]+`"
    files = [x.read_text() for x in pages.RECORDS.glob("*.jsonl")]
    known = [abs(float(x)) for file in files for x in re.findall(r"-?\d+\.\d+", file)]
    found = [{f"{x:.{digits}f}" for x in known} for digits in range(6)]
    strange, count = [], 0
    for page in pages.PAGES:
        text = _without_blocks(page)
        text = re.sub(rf"{code}|(?m:^\|.*)|(?:jax|Python|arXiv:) ?[\d.]+|\]\(.*?\)", "", text)
        numbers = {*NUMBER.findall(text)}
        count += len(numbers)
        strange += [(page.name, x) for x in numbers if x not in found[len(x.partition(".")[2])]]
    assert count > 200
    assert strange == []


def test_a_table_has_the_rows_and_columns_of_its_spec(tmp_path):
    lines = [
        '{"command": "RUN", "commit": "abc", "device": "cpu", "seeds": [0, 1], "interval": "x"}',
        '{"row": "b", "text": "t", "|1|": [0.5, 0.25], "n": 1200, "by seed": [1.5, 2.5], '
        '"c: d: n": 8}',
        '{"row": "a", "text": "t", "|1|": 0.125}',
        '{"row": "a", "text": "u", "|1|": 1.0}',
    ]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    (tmp_path / "more.jsonl").write_text("\n".join(lines[:2]).replace("1200", "7"))
    (tmp_path / "pages.toml").write_text(
        '[table.one]\nrecords = "some"\nwhere = {text = "t"}\nrows = ["a", "b"]\nfirst = "name"\n'
        'columns = ["|1|", ["n", "{n} of {|1|:.1f}"], ["seeds", "by seed", " "]]\n'
        '[table.two]\nrecords = "some"\ncolumns = ["text"]\n'
        '[table.three]\ncommand = "LATER"\ncolumns = []\n[picture]\n'
        '[table.parts]\nrecords = "some"\nrows = ["b"]\nparts = ["e", "c: d"]\ncolumns = ["n"]\n'
        '[table.joined]\ncolumns = ["some n", "more n"]\n[table.joined.of]\n'
        'x = {some = {row = "a", text = "u"}, more = {row = "b"}}\ny = {more = {row = "b"}}\n'
    )
    page = tmp_path / "page.md"
    marks = [f"Text. <!-- table: {x} -->\nold <!-- end -->\n" for x in ("one", "two", "three")]
    page.write_text("\n".join(marks))
    for _ in range(2):  # drawn again it is the same
        page.write_text(pages.drawn(page, tmp_path))
    assert page.read_text().splitlines() == [
        *("Text. <!-- table: one -->", "", r"| name | \|1\| | n | seeds |", "|---|---|---|---|"),
        "| a | 0.125 | - of 0.1 | - |",
        "| b | 0.500 ± 0.250 | 1,200 of 0.5 ± 0.2 | 1.500 2.500 |",
        "",
        "`RUN`: seed 0, 1; cpu; commit abc; ± is half of a 95 % interval over x; "
        "[record](some.jsonl). <!-- end -->",
        *("", "Text. <!-- table: two -->", "", "|  | text |", "|---|---|"),
        *("| b | t |", "| a | t |", "| a | u |", "<!-- end -->"),
        *("", "Text. <!-- table: three -->", "", "No record yet: `LATER`. <!-- end -->"),
    ]
    tables = {
        "joined": "|  | some n | more n |\n|---|---|---|\n| x | - | 7 |\n| y | - | 7 |\n",
        "parts": "|  | n |\n|---|---|\n| e | - |\n| c: d | 8 |\n",
    }
    for name, table in tables.items():
        page.write_text(f"<!-- table: {name} -->\n<!-- end -->")
        assert f"-->\n\n{table}" in pages.drawn(page, tmp_path)
    # A recipe of some seeds alone says so beside means, not beside the seeds themselves.
    lines += ['{"row": "a, on", "seed 0": 1.0}', '{"row": "b, on", "seed 0": 1.0, "seed 1": 2.0}']
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    page.write_text("<!-- table: two -->\n<!-- end -->")
    assert "| b | t |\n| a (seed 0) | t |\n" in pages.drawn(page, tmp_path)
    page.write_text("<!-- table: one -->\n<!-- end -->")
    assert "\n| a | 0.125 |" in pages.drawn(page, tmp_path)
    page.write_text("<!-- table: four -->\n<!-- end -->")
    refused("a table four that pages.toml lacks", pages.drawn, page, tmp_path)


def test_a_table_joins_the_sections_of_a_recipe(tmp_path):
    lines = ['{"command": "RUN", "commit": "abc", "device": "cpu"}']
    sections = [
        '{"row": "a", "section": "s", "n": 1}',
        '{"row": 0, "section": "v", "a: n": 3}',
        '{"row": "a, on", "section": "t", "n": 2}',
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines + sections))
    with (tmp_path / "pages.toml").open("w") as file:
        for name, row in (("of_runs", "a"), ("of_none", "c")):
            file.write(f'[table.{name}]\nrecords = "runs"\nrows = ["{row}"]\n')
            file.write('sections = {x = "s", y = "t", z = "u", w = "v"}\n')
            file.write('columns = ["x n", "y n", "z n", "w n"]\n')
    page = tmp_path / "page.md"
    page.write_text("<!-- table: of_runs -->\n<!-- end -->")
    assert "\n| a | 1 | 2 | - | 3 |\n" in pages.drawn(page, tmp_path)
    page.write_text("<!-- table: of_none -->\n<!-- end -->")
    refused("runs.jsonl has no row c", pages.drawn, page, tmp_path)
