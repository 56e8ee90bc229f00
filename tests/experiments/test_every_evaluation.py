"""Every task of the registry, in a small form, on the quickstart's models, in small; the page of
them all."""

import html
import json

import commands
import tiny_run

from ttcd_jax.commands.cli import parse_options
from ttcd_jax.measure.results import evaluate
from ttcd_jax.measure.task import Subject
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.run.page import Run
from ttcd_jax.tasks import TASKS as REGISTERED

TASKS = {x: y for x, y in REGISTERED.items() if y.__module__.startswith("ttcd_jax.tasks.")}
QUESTION = {"ctx": "def main(", "activity_label": "a", "ctx_a": "def main(", "ctx_b": ""}
QUESTION |= {"endings": ["):", "x", "y", "z"], "label": "0", "ind": 0}
SMALL = {
    "ppl": ("--max_rows=8", "--seq_len=256"),
    "final_block": ("--contexts=64,256", "--final_block=64", "--seq_len=320", "--token_budget=999"),
    "position": ("--max_rows=4", "--seq_len=256"),
    "recurrence": ("--max_rows=4", "--seq_len=256"),
    "distillation": ("--max_rows=4", "--seq_len=256"),
    "controls": ("--max_rows=4", "--seq_len=256"),
    "ruler": ("--lengths=5000", "--samples=1", "--tasks=niah_single_2"),
    "babilong": ("--lengths=1k", "--samples=1", "--tasks=qa1"),
    "harness": ("--tasks=hellaswag", "--data=HERE"),
    "recall": ("--max_rows=8",),
    "evidence": ("--max_rows=8",),
    "needle": ("--num_rows=2", "--distances=16,64", "--by=prefill"),
    "gap": ("--windows=4", "--layers=0", "--length=100", "--max_documents=2"),
    "stream": ("--window=4", "--length=100", "--max_documents=2"),
}
ONE_SERIES = ("controls", "distillation", "gap", "stream")
RUNS = {"recall": "recall", "evidence": "evidence", "needle": "evidence", "stream": "swa"}


def test_every_task_runs_from_its_options_to_the_page(tmp_path):
    """The first by the command itself, the others in this process, which is faster."""
    subjects = {}
    changes = dict.fromkeys(("quickstart", "recall", "evidence"), ())
    changes |= {"swa": ("include 'method/swa.gin'",)}
    for name, given in changes.items():
        run_dir, gin = tmp_path / name, name if name != "swa" else "quickstart"
        flags = tiny_run.flags(f"{gin}.gin", "STEPS=2", *given)
        commands.output("launch", *flags, f"--run_dir={run_dir}")
        run, data = load_run(run_dir), RunDirectory(run_dir).read_part("data")
        subjects[name] = Subject(run.model, run.tokenizer, data, run_dir)
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(QUESTION) + "\n")
    for name, task in TASKS.items():
        subject = subjects[RUNS.get(name, "quickstart")]
        options = [option.replace("=HERE", f"={tmp_path}") for option in SMALL[name]]
        if name == "ppl":
            file = tmp_path / "x.jsonl"
            line = f"--run_dir={subject.run_dir}", f"--task={name}", *options, f"--records={file}"
            assert commands.output("evaluate", *line).startswith(task.title)
            head, *rows = map(json.loads, file.read_text().splitlines())
            assert "experiments.evaluate --run_dir=DIR --task=ppl" in head["command"]
            assert [x["section"] for x in rows] == [task.title] * len(rows) != []
        else:
            evaluate(parse_options(task, f"task {name}", options), subject, 2).write()
        folder = subject.run_dir / "eval" / name
        result = json.loads((folder / "results.json").read_text())
        assert len(result["series"]) == (1 if name in ONE_SERIES else 2)
        assert all(result["series"].values())
        assert any(path.suffix == ".svg" for path in folder.iterdir())
        assert not (folder / ".unfinished").exists()
    runs = [Run(name, x.run_dir).row for name, x in subjects.items()]
    sizes = {row["run"]: row["tokens per row"] for row in runs}
    assert sizes["recall"] == subjects["recall"].data["num_slots"] * 2 - 1
    assert all(row["training FLOPs"] > row["FLOPs per token"] > 0 for row in runs)
    flags = [f"--run_dir={subject.run_dir}" for subject in subjects.values()]
    printed = commands.output("report", *flags, f"--output={tmp_path / 'page'}")
    page = html.unescape((tmp_path / "page" / "index.html").read_text())
    for task in TASKS.values():
        assert f"\n{task.title}\n" in printed
        assert f">{task.title}</{'summary' if task.is_detail else 'h2'}>" in page
    assert page.count("<svg") > len(TASKS)
