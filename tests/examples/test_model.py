"""The trained model of the repository: read, evaluated and generated with."""

import shutil
from pathlib import Path

import commands

from ttcd_jax.files import read_json

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "model"


def test_the_memory_helps_on_the_code_of_this_project(tmp_path):
    run_dir, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(MODEL, run_dir, ignore=shutil.ignore_patterns("eval"))
    text.mkdir()
    for name in ("checkpoint", "step", "loss"):
        shutil.copyfile(ROOT / "ttcd_jax" / "train" / f"{name}.py", text / f"{name}.txt")
    commands.output(
        *("evaluate", f"--run_dir={run_dir}", "--task=ppl", f"--text={text}", "--seq_len=4096")
    )
    series = read_json(run_dir / "eval" / "ppl" / "results.json")["series"]
    on, off = (
        {record["context"]: record["bits_per_byte"] for record in records}
        for records in series.values()
    )
    assert on["2048-4095"] < off["2048-4095"] - 0.3
    assert on["all"] < off["all"] - 0.3


def test_it_generates_text_and_is_small():
    prompt = ROOT / "ttcd_jax" / "errors.py"
    line = ("generate", f"--run_dir={MODEL}", f"--prompt_file={prompt}", "--max_new_tokens=20")
    assert commands.output(*line, "--temperature=0")
    files = [path for path in MODEL.rglob("*") if "eval" not in path.parts]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 12_000_000
