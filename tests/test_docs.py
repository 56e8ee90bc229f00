"""The pages: what they name exists, and the commands of docs/pods.md run, all at tiny sizes."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import commands
import pytest
import yaml
from commands import ROOT
from devices import fake_devices

from ttcd_jax.run.bindings import reachable_classes
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.reporting import read_metrics

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "experiments/RESULTS.md", ROOT / "kernels/README.md"]
SMALL_MODEL = [
    *("RunConfig.steps=1000000", "RunConfig.log_every=1", "RecordsConfig.seq_len=64"),
    *(f"TransformerConfig.{name}=64" for name in ("dim", "mlp_dim")),
    *(f"TransformerConfig.{name}=2" for name in ("num_layers", "num_heads")),
    *("TransformerConfig.window=24", "TransformerConfig.student_window=8"),
    *("TransformerConfig.fast_layers=(0,)", "MemoryConfig.chunk_size=16"),
    "TransformerConfig.vocab_size=512",
]
# Runs the script as SLURM does, one process for four nodes; the srun below starts the processes and
# stops one of them after two more steps.
SBATCH = """#!/usr/bin/env bash
nodes=${1#--nodes=}
shift
SLURM_NNODES=$((nodes / 4)) exec bash "$@"
"""
SRUN = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time

command = [word for word in sys.argv[1:] if not word.startswith("--cpus-per-task")]
count = int(os.environ["SLURM_NNODES"])
metrics = pathlib.Path("runs/pod/metrics.jsonl")

def lines():
    return metrics.read_text().count("\\n") if metrics.exists() else 0

before = lines()
slurm = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(count)}}
processes = [
    subprocess.Popen(command, env=os.environ | slurm | {{"SLURM_PROCID": str(number)}})
    for number in range(count)
]
while lines() < before + 2 and all(process.poll() is None for process in processes):
    time.sleep(0.1)
processes[-1].send_signal(signal.SIGTERM)
sys.exit(max(process.wait() for process in processes))
"""


@pytest.fixture
def place(tmp_path):
    """A folder with everything that the commands of the page need."""
    for name in (".venv", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    stubs = {"sbatch": SBATCH, "srun": SRUN.format(python=sys.executable), "scontrol": "#!/bin/sh"}
    for name, text in stubs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    texts = tmp_path / "FOLDER"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"Line {number} of a text, and another.\n" * 40)
    return tmp_path


def _run(line, place):
    environment = commands.cpu_environment(
        PATH=f"{place / 'bin'}:{os.environ['PATH']}",
        PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}",
        XDG_CACHE_HOME=str(place / "cache"),
        SLURM_CPUS_PER_TASK="1",
        SLURM_JOB_ID=str(os.getpid()),
    )
    if "--topology" not in line:  # which makes its own devices
        environment["XLA_FLAGS"] = fake_devices(2)
    line = line.replace("--train_tokenizer=32000", "--train_tokenizer=512")
    if "--gin=" in line:
        line += "".join(f' --param="{binding}"' for binding in SMALL_MODEL)
    if not line.startswith("sbatch"):
        return commands.line(line, cwd=place, env=environment)
    options = {"shell": True, "capture_output": True, "text": True, "timeout": 200}
    return subprocess.run(line, cwd=place, env=environment, **options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_configurations_and_links_that_a_page_names_exist(page):
    text = page.read_text()
    modules = set(re.findall(r"-m ((?:experiments|tests|ttcd_kernels)(?:\.\w+)+)", text))
    assert [name for name in modules if find_spec(name) is None] == []
    named = re.findall(r"--gin=([\w/.]+)", text)
    gin = {ROOT / "experiments/configs" / x for x in named if f"# {x}\n" not in text}  # its own
    links = {page.parent / name for name in re.findall(r"\]\((?!http)([^)#]+)\)", text)}
    assert [path for path in gin | links if not path.exists()] == []
    assert not re.search(r"```sh\n\s*-", text), "a block of flags is no command"


def test_readme_is_short_and_names_the_paper_as_the_citation_does():
    text, project = ((ROOT / x).read_text() for x in ("README.md", "pyproject.toml"))
    assert len(text.splitlines()) <= 120
    assert [line for line in text.splitlines() if len(line) > 150] == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    [paper] = citation["references"]
    assert f"[{paper['title']}]({paper['url']}) (arXiv:{paper['url'].split('/')[-1]}" in text
    authors = [f"{x['given-names']} {x['family-names']}" for x in paper["authors"]]
    assert f"by {', '.join(authors[:-1])} and {authors[-1]}.\n" in text
    for name in ("version", "license"):
        assert f'\n{name} = "{citation[name]}"\n' in project


def test_every_path_of_the_map_exists():
    table = (ROOT / "WORKSPACE.md").read_text().split("## To change")[1].split("\n## ")[0]
    names = re.findall(r"`([\w./{},*]+(?:/|\.py|\.md))`", table)
    assert len(names) > 30
    subprocess.run(["bash", "-c", f"ls -d {' '.join(names)}"], cwd=ROOT, check=True)


def test_every_example_is_run():
    tested = (ROOT / "tests/examples/test_examples.py").read_text()
    assert [x for x in ROOT.glob("examples/*.py") if f'"{x.stem}"' not in tested] == []


@pytest.mark.timeout(600)
def test_the_way_from_raw_text_to_a_pod(place):
    lines = commands.lines_of("pods.md")
    assert len(lines) == 7
    for line in lines:
        result = _run(line, place)
        expected = 75 if line.startswith("sbatch") else 0
        assert result.returncode == expected, (line, result.stdout, result.stderr)
        if "--dry_run" in line:
            assert "data 8 x fsdp 4 x seq 2 x tensor 1" in result.stdout
            for name in ("memory: gradients", "decoding state", "fits", "FLOPs at 40% of peak"):
                assert f"\n{name}" in result.stdout
        if "--rehearse" in line:
            assert [x.split()[0] for x in result.stdout.splitlines()] == ["ok"] * 6
            assert not (place / "runs").exists()
        if "--nodes=4" in line:
            assert re.search(r"resumed at step [1-9]", result.stdout)
    steps = [record["step"] for record in read_metrics(place / "runs/pod/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads(next((place / "runs/pod/eval/ppl").glob("*.json")).read_text())["step"]


def test_pages_are_short():
    pages = {x.name: x.read_text() for x in ROOT.glob("docs/*.md")}
    cells = r"(?s)```{code-cell}.*?```"  # of the notebook
    lengths = {name: len(re.sub(cells, "", x).splitlines()) for name, x in pages.items()}
    assert {name: n for name, n in lengths.items() if n > 150} == {}


def test_every_configuration_has_its_place_on_the_page_of_fields():
    page = (ROOT / "docs/fields.md").read_text()
    prefixes = re.findall(r"<!-- fields: (\S+) -->", page)
    ours = [x for x in reachable_classes(RunConfig).values() if x.__module__[:5] == "ttcd_"]
    places = {x: [y for y in prefixes if re.match(y, x.__module__)] for x in ours}
    assert len(places) > 30
    assert {x.__name__: found for x, found in places.items() if len(found) != 1} == {}


def test_a_page_links_the_words_of_the_glossary():
    """Where a word has no other meaning; a link is anywhere on the page."""
    glossary = (ROOT / "docs/glossary.md").read_text().partition("## The same things")[0]
    words = {*re.findall(r"(?m)^## (.*)$", glossary)}
    words -= {"control", "evidence", "gap", "key", "memory", "piece", "row", "SWA", "student"}
    outside_prose = r"(?s:```.*?```|<!-- table.*?<!-- end -->)|^[|#].*$|^ {4}.*$|`[^`]*`|\]\(.*?\)"
    silent = []
    for page in ROOT.glob("docs/*.md"):
        prose = re.sub(outside_prose, "", text := page.read_text(), flags=re.MULTILINE)
        prose = " ".join(prose.split())
        for word in words:
            link = f"glossary.md#{word.replace(' ', '-').lower()})"
            is_used = re.search(rf"(?<![\w-]){word}s?(?![\w-])", prose, re.IGNORECASE)
            if is_used and link not in text and page.name != "glossary.md":
                silent.append(f"{page.name}: {word}")
    assert len(words) > 20
    assert silent == []


def test_the_errors_that_the_page_explains_are_in_the_source():
    sources = [x.read_text() for x in ROOT.glob("ttcd_jax/**/*.py") if "Error" in x.read_text()]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    texts = [
        " ".join(str(x.value) for x in node.values if isinstance(x, ast.Constant))
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    messages = re.findall(r"(?m)^### `(.*)`$", (ROOT / "docs/errors.md").read_text())
    assert len(messages) >= 10
    for message in messages:
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
        assert any(re.search(pattern, text) for text in texts), message
