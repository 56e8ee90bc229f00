"""The page answers by its records, lists everything, escapes it, and needs no other file; pictures
are SVG, in which a method has one colour."""

import math
import re
import sys
import warnings
from pathlib import Path

import pytest

from ttcd_jax.measure.answers import Facts, Measured, answers, compared, controls, with_differences
from ttcd_jax.measure.page import Answer, Section, write_page
from ttcd_jax.measure.pictures import (
    COLOURS,
    Picture,
    coloured_by_run,
    looks,
    plot_bars,
    plot_lines,
)
from ttcd_jax.methods import METHODS
from ttcd_jax.tasks.controls import TRAINED, ControlLoss, Controls
from ttcd_jax.tasks.documents import Position, PositionLoss, Recurrence, SliceLoss
from ttcd_jax.tasks.recall import DistanceAccuracy, Evidence

CONTENT = '<svg><style>svg { color: red }</style><g id="a"/><use xlink:href="#a"/></svg>'


def _page(path: Path, **changes) -> str:
    write_page(path, **({"title": "Run"} | changes))
    return path.read_text(encoding="utf-8")


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "loss 1.svg"
    path.write_text(CONTENT)
    return path


def test_the_page_lists_everything(tmp_path, picture):
    table = [{"window": 64, "ppl": 3.25}, {"window": 128, "note": "short"}]
    published = Section("Table 1", [{"model": "SWA", "4K": 44.88}])
    drawn = [Picture(picture, "Lower, by `ppl`.")] * 2
    section = Section("Perplexity", table, drawn, [published], ["run: `ttcd launch`"])
    folded = Section("Speed", table, is_detail=True)
    page = _page(
        tmp_path / "report.html",
        title="Quickstart",
        runs=[{"run": "SWA", "steps": 250}, {"run": "other", "steps": 3}],
        colours={"SWA": "#0072B2"},
        sections=[folded, section],
        answers=[Answer("SWA is better.", "By 1.")],
        next_steps=["`python -m experiments.evaluate --run_dir=runs/q`"],
    )
    for expected in (
        '<span class="chip" style="background: #0072B2"></span>SWA</td>',
        *("<title>Quickstart</title>", "<td>other</td>", ">Perplexity</h2>", "<td>short</td>"),
        *(f'<td class="number">{x}</td>' for x in ("3.250", "-", "44.88")),
        *('<svg><g id="f1-a"/><use xlink:href="#f1-a"/></svg>', '<g id="f2-a"/>'),
        *("<strong>SWA is better.</strong> By 1.", "run: <code>ttcd launch</code>"),
        *("<dt>gap</dt>", "<summary>Speed</summary>"),
        *("<code>ppl</code>", "<summary>Published: Table 1</summary>", "not measured here"),
        "<code>python -m experiments.evaluate --run_dir=runs/q</code>",
    ):
        assert expected in page
    assert page.index(">Perplexity</h2>") < page.index("<summary>Speed")
    assert "<h2" not in _page(tmp_path / "empty.html")


def test_what_is_much_is_folded_and_a_picture_may_be_missing_or_a_png(tmp_path):
    (tmp_path / "x.png").write_bytes(b"pixels")
    pictures = [Picture(tmp_path / name, f"of {name}") for name in ("none.svg", "x.png")]
    sections = [Section(f"S{i}", [], pictures[:2]) for i in range(3)]
    answers = [Answer(f"A{i}", "") for i in range(5)]
    runs = [{"run": f"R{i}"} for i in range(7)]
    page = _page(tmp_path / "much.html", sections=sections, answers=answers, runs=runs)
    order = "<strong>A3<", "<summary>More answers<", "<strong>A4<", "<summary>7 runs<", "<td>R6<"
    places = [page.index(x) for x in (*order, '<a href="#s3">S2</a>', ">S0</h2>")]
    assert places == sorted(places)
    assert page.count('<img src="data:image/png;base64,cGl4ZWxz" alt="of x.png">') == 3
    assert page.count("<figure>") == 3
    few = {"sections": sections[:2], "answers": answers[:4], "runs": runs[:6]}
    page = _page(tmp_path / "few.html", **few)
    assert not re.search(r"More answers|\d runs|<nav>", page)


def test_columns_of_a_run_are_below_its_name(tmp_path):
    table = [{"task": "vt", "A, on": 1.0, "A, off": 2.0, "A, b, on": 3.0, "note": "x"}]
    colours = {"A": "#0072B2", "A, b": "#D55E00"}
    sections = [Section("RULER", table)]
    page = _page(tmp_path / "report.html", colours=colours, sections=sections)
    runs = re.findall(r'<th colspan="(\d)" scope="colgroup" class="run">.*?</span>(.*?)</th>', page)
    assert runs == [("2", "A"), ("1", "A, b")]
    names = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page)
    assert names == ["task", "on", "off", "on", "note"]
    table = [{"task": "vt", "A": 1.0, "A, b": 3.0}]
    sections = [Section("RULER", table)]
    assert "<th colspan" not in _page(tmp_path / "plain.html", colours=colours, sections=sections)


def test_the_page_escapes_all_it_is_given_and_refers_to_no_other_file(tmp_path, picture):
    attack = "\"><script>alert('x')</script>`<script>`"
    table = [{attack: attack}]
    section = Section(attack, table, [Picture(picture, attack)], [Section(attack, table)])
    arguments = {"title": attack, "runs": table, "next_steps": [attack]}
    page = _page(tmp_path / "report.html", sections=[section] * 3, **arguments)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert") >= 20
    assert {x[0] for x in re.findall(r'(?:href="|src="|url\()(.*?)["\)]', page)} == {"#"}
    assert "@import" not in page


def _lines(path: Path, **changes) -> None:
    arguments = {
        "title": "Loss by position, $5 each",
        "x_label": "context",
        "y_label": "loss",
        "series": {"IP-TTCD": ([1024, 4096, 16384], [3.0, None, 2.5]), "SWA": ([1024], [3.1])},
    }
    plot_lines(path, **(arguments | changes))


def _height(path: Path) -> float:
    return float(re.search(r'height="([\d.]+)pt"', path.read_text())[1])


def test_lines_are_drawn_without_a_warning_and_replace_the_old_ones_when_whole(tmp_path):
    """Names stand at the ends of lines; a long legend makes the picture higher, not its panel
    smaller. What a point is can be read; the colour is that of the text around the picture."""
    path, name = tmp_path / "new" / "loss.svg", "IP-TTCD (a run with a long name), fast weights on"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a legend that leaves no room, too
        _lines(path, series={f"{name} {run}": ([1, 2], [3.0, 2.0]) for run in range(24)})
        assert _height(path) == pytest.approx(252 + 23 * 0.2 * 72)
        _lines(path, series={f"{name * 3} {run}": ([1, 2], [3.0, 2.0]) for run in range(5)})
        assert _height(path) == pytest.approx(252 + 14 * 0.2 * 72)  # three lines of legend a name
        assert all(float(x) > 0 for x in re.findall(r'x="(-?[\d.]+)"', path.read_text()))
        for points in (([], []), ([1024, 4096], [None, None]), ([0], [1.0])):
            _lines(path, series={"SWA": points})  # no point
        _lines(path)
    assert _height(path) == 252
    old = path.read_text()
    for expected in ("<title>IP-TTCD\n1,024: 3</title>", ">IP-TTCD</text>", "$5 each"):
        assert expected in old
    assert "fill: currentColor" in old
    assert "4,096" not in old
    assert not re.search("font-family: '|<metadata|#1f2328", old)
    for points, error in (([1], [object()]), TypeError), (([1, 2], [3.0]), ValueError):
        with pytest.raises(error):
            _lines(path, series={"SWA": points})
    assert path.read_text() == old
    labels = {"title": "t", "x_label": "x", "y_label": "y"}
    plot_bars(path, series={"SWA": {"near": 0.5}, "LaCT": {"near": None}}, **labels)
    assert "<title>SWA\nnear: 0.5</title>" in path.read_text()
    assert "<title>LaCT\nnear: n/a</title>" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["loss.svg"]


def test_a_method_has_one_colour_and_its_memory_off_is_dashed():
    assert {method.label for _, method in METHODS.items()} == {*COLOURS}
    assert len({*COLOURS.values()}) == len(COLOURS)
    names = "mine, off (eta = 0)", "mine, fast weights on"
    methods = {"SWA": "SWA", "mine": "IP-TTCD + delta rule", "other": "IP-TTCD"}
    with coloured_by_run(methods) as found:
        off, on, other, swa, changed = looks([*names, "other", "SWA", "mine, b=8, memory off"])
    assert on.colour == off.colour == changed.colour == found["mine"] == COLOURS["IP-TTCD"]
    assert (swa.colour, swa.dashes, on.dashes) == (COLOURS["SWA"], "-", "-")
    assert off.dashes == changed.dashes == "--"
    assert other.colour not in COLOURS.values()  # a shade
    (alone,) = looks(["IP-TTCD, memory published"])
    assert (alone.colour, alone.dashes) == (on.colour, "--")


FACTS = {"has_memory": True, "data": "books", "window": 64, "steps": 9, "device": "cpu"}
MINE = FACTS | {"method": "IP-TTCD", "tokens_per_second": 100.0, "flops": 2e6, "state": 2048}
SWA = FACTS | {"method": "SWA", "has_memory": False, "tokens_per_second": 200.0}
SWA |= {"flops": 1e6, "state": 1024}


def _losses(*by_bucket: float) -> list[PositionLoss]:
    """Of eight documents of different difficulty, and of about the given losses."""
    buckets = ("1-31", 1, 32), ("32-63", 32, 64), ("64-127", 64, 128)
    return [
        PositionLoss(*bucket, x, 32, 32 * (loss + x + 0.01 * math.sin(17 * x + 9 * loss)))
        for x in range(8)
        for bucket, loss in zip(buckets, by_bucket, strict=True)
    ]


def _answers(on: list, off: list, swa: list | None = None) -> list[Answer]:
    runs = {"mine": {0: {"mine, fast weights on": on, "mine, off (eta = 0)": off}}}
    facts = {"mine": Facts(**MINE)}
    if swa is not None:
        runs, facts = runs | {"SWA": {0: {"SWA": swa}}}, facts | {"SWA": Facts(**SWA)}
    return answers([Measured(Position, "Text", runs)], facts)


def test_the_answer_is_what_the_records_say():
    off, swa = _losses(2, 2, 2), _losses(1.9, 1.9, 1.9)
    first, *rest = _answers(_losses(2, 1.5, 1.0), off, [x._replace(nll=x.nll + 1) for x in swa])
    assert first.verdict == "mine: better than SWA; better with its memory on than off."
    for expected in (
        *(
            "Text: 0.499 ± 0.007 nats per token ",
            "lower with the memory on than off, better from 32 on",
        ),
        *(
            "0.50 times the tokens/s, 2.00 times the FLOPs per token of SWA",
            "2.00 KiB held per text (2.00 times).",
        ),
    ):
        assert expected in first.text
    assert [x.verdict for x in rest] == ["±:"]
    first, *_ = _answers(_losses(2, 2.2, 2.2), off, swa)
    assert first.verdict == "mine: worse than SWA; worse with its memory on than off."
    assert "worse in 2 of 3 (32-63, 64-127)" in first.text
    first, alone, _ = _answers(off, off)
    assert first.verdict == "mine: no difference between its memory on and off is seen."
    assert (alone.verdict, alone.text[:5]) == ("No control here:", "mine.")


def test_a_verdict_is_that_of_everything_where_some_task_has_it():
    """Not of the last slice, nor of the last control."""

    def slices(sign: float) -> list[SliceLoss]:
        names = (("n = 4, new", 90, -sign), ("n = 4, beyond (31-)", 10, sign))
        return [
            SliceLoss(name, 4, 0, 1, i, size, size * (2 + x + i / 99))
            for name, size, x in names
            for i in range(8)
        ]

    def trained(as_trained: float, no_gap: float) -> list[ControlLoss]:
        found = ((TRAINED, as_trained), ("no gap", no_gap))
        return [ControlLoss(x, i, 9, 9 * (y + i / 99)) for x, y in found for i in range(8)]

    facts = {"mine": Facts(**MINE), "SWA": Facts(**SWA)}
    runs = {"mine": {0: {"mine": slices(-0.2)}}, "SWA": {0: {"SWA": slices(0.0)}}}
    sliced = Measured(Recurrence, "Slices", runs)
    first, *_ = answers([sliced], facts)
    assert first.verdict == "mine: better than SWA (n = 4, beyond (31-))."
    off, swa = _losses(2, 2, 2), [x._replace(nll=x.nll - 1) for x in _losses(2, 2, 2)]
    runs = {"mine": {0: {"mine": off}}, "SWA": {0: {"SWA": swa}}}
    first, *_ = answers([sliced, Measured(Position, "Text", runs)], facts)
    assert first.verdict == "mine: worse than SWA."
    runs = {"mine": {0: {"mine": trained(1, 4)}}, "SWA": {0: {"SWA": trained(2, 3)}}}
    first, *_ = answers([Measured(Controls, "Controls", runs)], facts)
    assert first.verdict == "mine: better than SWA."


def test_an_answer_has_three_tasks_and_what_is_not_alike():
    """No detail, no speed of another device, no bucket alone; the steps, and over what ± is."""

    class Detail(Position):
        is_detail = True

    on, off = _losses(1, 2, 1), _losses(2, 2, 2)
    seeds = {seed: {"mine, fast weights on": on, "mine, off (eta = 0)": off} for seed in (0, 1)}
    tasks = [Measured(Detail, "Detail", {"mine": seeds})]
    tasks += [Measured(Position, f"Text {i}", {"mine": seeds}) for i in range(4)]
    other = Facts(**SWA | {"device": "gpu", "steps": 5})
    first, *_, last, _ = answers(tasks, {"mine": Facts(**MINE), "SWA": other})
    assert re.findall(r"Text \d|Detail", first.text) == ["Text 0", "Text 1", "Text 2"]
    assert "on than off, better in 2 of 3 (1-31, 64-127)." in first.text
    assert "times the tokens/s" not in first.text
    assert first.text.endswith("SWA was trained 5 steps, not 9.")
    assert "over seeds and documents," in last.text


def test_a_control_has_no_memory_and_the_same_data_at_best_the_same_window_and_steps():
    facts = {
        "mine": Facts(**MINE),
        "no gap": Facts(**MINE | {"method": "IP-TTCD, no gap"}),
        "code": Facts(**SWA | {"data": "code"}),
        "wide": Facts(**SWA | {"window": 128}),
        "short": Facts(**SWA | {"steps": 5}),
        "SWA": Facts(**SWA),
    }
    found = []
    while control := controls(facts).get("mine"):
        found.append(control)
        del facts[control]
    assert found == ["SWA", "short", "wide", "no gap"]


def test_pairs_are_of_the_same_seed():
    mine = {seed: {"mine": _losses(x, x, x)} for seed, x in enumerate((9, 1))}
    measured = Measured(Position, "Text", {"mine": mine, "SWA": {1: {"SWA": _losses(2, 2, 2)}}})
    (less,) = compared(measured, "mine", "SWA").values()
    assert less["1-31"][0] == pytest.approx(-1, abs=0.1)


def test_what_was_not_evaluated_or_has_no_interval_is_said():
    facts = {"a": Facts(**MINE), "b": Facts(**SWA), "c": Facts(**SWA)}
    few = [x for x in _losses(1, 1, 1) if x.document < 3]
    measured = Measured(Position, "Text", {"a": {0: {"a": few}}, "b": {0: {"b": few}}})
    first, *_, last = answers([measured], facts)
    assert first.verdict == "a: whether it is better than b is not known (no interval)."
    assert last.verdict == "c was not evaluated:"
    assert "position" in last.text


def test_tables_have_the_differences_behind_the_columns_of_their_run():
    def found(*accuracies: float) -> list[DistanceAccuracy]:
        names = zip(("1-48", "beyond 48"), accuracies, strict=True)
        return [DistanceAccuracy(name, 400, x) for name, x in names]

    series = {"A, fast weights on": found(1.0, 0.9), "A, off (eta = 0)": found(1.0, 0.1)}
    runs = {"A": {0: series}, "SWA": {0: {"SWA": found(1.0, 0.2)}}}
    measured = Measured(Evidence, "Evidence", runs)
    table = Evidence.table(series | runs["SWA"][0])
    near, far = with_differences(table, measured, {"A": "SWA"})
    assert [*far] == ["distance", *series, "A, on - off", "A, less SWA", "SWA"]
    # 1.96 sqrt(0.9 0.1 / 400 + 0.2 0.8 / 400), with two more queries each
    assert (far["A, on - off"], far["A, less SWA"]) == ("+0.800 ± 0.042", "+0.700 ± 0.049")
    assert near["A, less SWA"].startswith("+0.000 ± 0.0")
    first, *_ = answers([measured], {"A": Facts(**MINE), "SWA": Facts(**SWA)})
    on = "better with its memory on than off (beyond 48)"
    assert first.verdict == f"A: better than SWA (beyond 48); {on}."


def test_without_the_packages_there_is_nothing_old_and_the_extra_is_named(
    tmp_path, monkeypatch, caplog
):
    for name, path, write in (
        ("matplotlib", tmp_path / "loss.svg", _lines),
        ("jinja2", tmp_path / "report.html", lambda path: write_page(path, title="x")),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        path.write_bytes(b"of another evaluation")
        write(path)
        assert not path.exists()
        assert f"{name} is missing, install ttcd_jax[report]" in caplog.text
