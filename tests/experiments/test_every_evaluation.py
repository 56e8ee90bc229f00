"""Every task of the registry, in a small form, on the quickstart's models; the page of them all."""

import html
import json

import commands
from tiny_run import params

from ttcd_jax.tasks import TASKS as REGISTERED

TASKS = {x: task for x, task in REGISTERED.items() if task.__module__.startswith("ttcd_jax.")}
TASKS = {x: y for x, y in REGISTERED.items() if y.__module__.startswith("ttcd_jax.tasks.")}
DATA = commands.ROOT / "tests" / "tasks" / "data"
QUESTION = {"ctx": "def main(", "activity_label": "a", "ctx_a": "def main(", "ctx_b": ""}
SMALL = {
    "ppl": ("--max_rows=8", "--seq_len=256"),
    "final_block": (
        *("--contexts=64,256", "--final_block=64", "--seq_len=320", "--token_budget=2000"),
    ),
    "position": ("--max_rows=4", "--seq_len=256"),
    "recurrence": ("--max_rows=4", "--seq_len=256"),
    "distillation": ("--max_rows=4", "--seq_len=256"),
    "ruler": ("--lengths=1600", "--samples=1", f"--squad={DATA / 'ruler' / 'squad.json'}"),
    "babilong": ("--lengths=0k,1k", "--samples=1"),
    "harness": ("--tasks=hellaswag", "--data=HERE"),
    "recall": ("--max_rows=8",),
    "needle": ("--batch_size=2",),
}


def test_every_task_runs_from_its_command_to_the_page(tmp_path):
    for gin in ("quickstart", "recall"):
        flags = f"--gin={gin}.gin", *params("STEPS=2"), f"--run_dir={tmp_path / gin}"
        commands.output("launch", *flags)
    question = QUESTION | {"endings": ["):", "x", "y", "z"], "label": "0", "ind": 0}
    (tmp_path / "hellaswag.jsonl").write_text(json.dumps(question) + "\n")
    for name, task in TASKS.items():
        run_dir = tmp_path / ("recall" if name in ("recall", "needle") else "quickstart")
        options = [option.replace("=HERE", f"={tmp_path}") for option in SMALL[name]]
        printed = commands.output("evaluate", f"--run_dir={run_dir}", f"--task={name}", *options)
        assert printed.startswith(task.title)
        folder = run_dir / "eval" / name
        result = json.loads((folder / "results.json").read_text())
        assert len(result["series"]) == (1 if name == "distillation" else 2)
        assert all(result["series"].values())
        assert any(path.suffix == ".png" for path in folder.iterdir())
        assert not (folder / ".unfinished").exists()
    flags = [f"--run_dir={tmp_path / name}" for name in ("quickstart", "recall")]
    printed = commands.output("report", *flags, f"--output={tmp_path / 'page'}")
    page = html.unescape((tmp_path / "page" / "index.html").read_text())
    for task in TASKS.values():
        assert f"\n{task.title}\n" in printed
        assert f">{task.title}</h2>" in page
    assert page.count("data:image/png;base64") > len(TASKS)
