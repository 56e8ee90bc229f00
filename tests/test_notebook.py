"""docs/notebook.md: its cells run in the order of the page, with two steps of training."""

import ast
import re
import sys
import tempfile

from commands import ROOT


def test_every_cell_runs_and_shows_what_it_computed(monkeypatch, capsys, tmp_path):
    shown, names = [], {}
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "displayhook", shown.append)
    page = (ROOT / "docs/notebook.md").read_text()
    cells = re.findall(r"```{code-cell} ipython3\n(.*?)```", page, re.DOTALL)
    for cell in cells:
        exec(compile(ast.Interactive(ast.parse(cell).body), "notebook.md", "single"), names)
    shown = [x for x in shown if x is not None]
    assert [x._repr_png_()[1:4] for x in shown if hasattr(x, "_repr_png_")] == [b"PNG"] * 3
    assert sum("</" in x._repr_html_() for x in shown if hasattr(x, "_repr_html_")) == 3
    said = capsys.readouterr().out
    assert said.startswith("2 steps: 400 are the recipe's, so nothing below is its result\n")
    for words in ("of far questions", "written by a token", "in [0-2] of 2 rows", "are its value"):
        assert re.search(words, said), words
