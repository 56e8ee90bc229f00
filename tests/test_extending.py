"""docs/extending.md and its second page: their modules are written, their commands run, small."""

import json
import re

import commands
import pytest
from checks import refused
from commands import ROOT
from tiny_run import BINDINGS, RECALL

from ttcd_jax.registry import Registry, check_imported
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.train.metrics import RESERVED

PAGE = "".join((ROOT / f"docs/{x}.md").read_text() for x in ("extending", "extending_training"))
BLOCKS = re.findall(r"```(python|gin)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
LINES = [x for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for x in block.splitlines()]
SMALL = [x for x in (*BINDINGS, *RECALL) if not x.startswith(("MemoryConfig", "STEPS"))]
SMALL += ["STEPS=6", "RecallConfig.num_slots=16"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the page was followed."""
    folder = tmp_path_factory.mktemp("page")
    for name in (".venv", "experiments"):
        (folder / name).symlink_to(ROOT / name)
    for _, name, content in BLOCKS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "GENES").mkdir()
    for number in range(8):
        (folder / f"GENES/{number}.fasta").write_text(f">a\nGAT{'TACA' * number}\n>b\nCAT\n")
    for line in LINES:
        text = line + "".join(f' --param="{x}"' for x in SMALL if "--gin=" in line)
        result = commands.line(text, **_in(folder))
        assert result.returncode == 0, (line, result.stderr)
    return folder


def _in(folder):
    path = f"{folder}:{ROOT}:{ROOT / 'kernels'}"
    return {"cwd": folder, "env": commands.cpu_environment(PYTHONPATH=path)}


def _config(run_dir):
    return json.loads((run_dir / "config.json").read_text())


def test_every_block_is_short():
    lengths = {name: len(re.findall(r"^.", content, re.MULTILINE)) for _, name, content in BLOCKS}
    assert len(lengths) == 7
    assert {name: n for name, n in lengths.items() if n > 40} == {}


def test_what_the_page_registers_works(place):
    hebbian, lion = place / "runs/hebbian", place / "runs/lion"
    assert _config(hebbian)["imports"] == ["my_package.hebbian"]
    assert _config(hebbian)["model"]["memory"]["type"] == "HebbianSettings"
    assert _config(lion)["optimizer"]["settings"] == {"type": "LionSettings", "momentum": 0.98}
    halves = json.loads((hebbian / "eval/halves/results.json").read_text())
    assert [row["half"] for row in halves["table"]] == ["first", "second"]
    assert "Loss by half of the row" in (hebbian / "report/index.html").read_text()
    records = read_metrics(lion / "metrics.jsonl")
    measured = {"memory_ratio/0", "hidden_norm", "num_targets"}
    measured |= {f"layer_norms/{i}" for i in range(_config(lion)["model"]["num_layers"])}
    assert measured == records[0].keys() - {*RESERVED}
    assert all(record[name] > 0 for record in records for name in measured)
    manifest = json.loads((place / "genes/manifest.json").read_text())
    assert sum(split["num_documents"] for split in manifest["splits"].values()) == 16
    lines = (lion / "losses.txt").read_text().splitlines()
    assert lines == [f"{record['step']} {record['loss']}" for record in records]


def test_a_module_that_is_missing_is_named(place):
    refusals = {
        "evaluate --run_dir=runs/hebbian --task=recall": "add --import=my_package.hebbian (",
        "report --run_dir=runs/hebbian": "needs my_package.hebbian: add --import=",
        "generate --run_dir=runs/hebbian --prompt_file=genes/manifest.json": "my_package.hebbian: ",
        "launch --gin=my_package/hebbian.gin --run_dir=runs/hebbian": "add --import=",
        "evaluate --import=my_pakage.x --run_dir=. --task=ppl": "no module my_pakage in",
        "evaluate --import=my_package/x.py --run_dir=. --task=ppl": "not a file: x",
        "evaluate --import=os;ls --run_dir=. --task=ppl": "give a module's name",
        "report --import=my_package.hebbian --run_dir=runs/hebbian": "task is called 'halves'",
    }
    commands.refuse([(x.split(), 2, words) for x, words in refusals.items()], **_in(place))


def test_a_file_never_imports_and_imports_that_are_no_names_are_damage(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(tmp_path)
    refused("RUN needs trap: add --import=trap", check_imported, "RUN", ["os", "trap"])
    for names in (5, ["a b"], [["os"]], {"os": 1}, [None], "os"):
        refused("no names of modules: it is damaged", check_imported, "RUN", names)


def test_names_that_are_taken_or_missing_are_refused():
    registry = Registry("thing")
    registry.add(1, "a")
    refused("two things are called 'a'", registry.add, 2, "a")
    for entry in ((len,), ("*.xml", len), (len, 5)):
        refused("register(|): give the thing and its name", registry.add, *entry)
    assert registry == {"a": 1}
