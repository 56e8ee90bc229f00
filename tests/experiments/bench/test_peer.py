"""The peer case: the exchange with another program, losses and tokens that differ, a program that
ends."""

import json
import sys

import commands
import pytest

# Takes the steps by our library, with the weights and tokens of the folder.
THEIRS = """
import sys
from pathlib import Path
import numpy as np
from experiments.bench import peer, step
from ttcd_jax.interop.reference_checkpoint import import_reference
from ttcd_jax.run import build
from ttcd_jax.run.layout import run_mesh

folder = Path(sys.argv[3])
imported = import_reference(folder)
config = peer.RunConfig.from_dict(peer.read_json(folder / "run.json"))
config = config.replace(model=imported.config)
tokens = np.load(folder / "tokens.npy")
step.random_tokens = lambda config: tokens
run = step.Run(config)
run.state = build.state_with(config, run_mesh(config), imported.params)
print("ready", flush=True)
for _ in sys.stdin:
    print(float(run.take()["loss"]), flush=True)
"""
# Reads the prompts by our library, and decodes behind them with the memory off.
READS = """
import sys
from pathlib import Path
import numpy as np
from ttcd_jax.inference import decode, inference_model, prefill, start_state
from ttcd_jax.interop.reference_checkpoint import import_reference
from ttcd_jax.train.state import with_params

folder, work, count = sys.argv[3:6]
imported = import_reference(Path(folder))
model = inference_model(with_params(imported.config, imported.params))
rows = np.load(Path(folder, "tokens.npy"))[:, :-1]
print("ready", flush=True)
state = None
for _ in sys.stdin:
    if state is None or work == "prefill":
        logits, state = prefill(model, start_state(model, len(rows)), rows)
        found = tokens = np.argmax(logits, axis=-1).astype(np.int32)
    if work == "decode":
        found = []
        for _ in range(int(count)):
            logits, state = decode(model, state, tokens, memory="published")
            tokens = np.argmax(logits, axis=-1).astype(np.int32)
            found += tokens.tolist()
    print(*found, flush=True)
"""
WRONG = """
import sys
wrong = ["nan"] if sys.argv[4] == "step" else [-1] * 2 * int(sys.argv[5])
print("ready", flush=True)
for _ in sys.stdin:
    print(*wrong, flush=True)
"""


def run(tmp_path, script, *options):
    """The case with an interpreter that ignores our program for theirs and runs `script`."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(0o755)
    places = f"--authors={tmp_path}", f"--python={python}", f"--json={tmp_path / 'report.json'}"
    environment = commands.cpu_environment(PYTHONPATH=str(commands.ROOT))
    return commands.run("bench", "peer", "--quick", *places, *options, env=environment)


def test_the_authors_program_gets_the_weights_and_tokens_of_ours_and_is_timed_beside_it(tmp_path):
    result = run(tmp_path, THEIRS, "--models=ipttt", "--rounds=2")
    assert (result.returncode, result.stderr) == (0, "")
    ours, theirs = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (ours["program"], theirs["program"]) == ("ours", "theirs, eager")
    assert ours["median / ours"] == ours["min / ours"] == 1
    assert theirs["median / ours"] == pytest.approx(theirs["median ms"] / ours["median ms"])
    assert theirs["min ms"] <= theirs["median ms"]
    assert ours["RSS MiB"] > 0
    assert ours["note"] == theirs["note"] == ""


@pytest.mark.parametrize(
    ("work", "found", "bound"), [("step", "loss nan", 1e-5), ("decode", "token -1", 0)]
)
def test_results_that_differ_are_not_timed(work, found, bound, tmp_path):
    error = commands.mistake(run(tmp_path, WRONG, "--models=swa", f"--work={work}"))
    assert f"{work} 1 of 'theirs, eager' has {found}, ours " in error
    assert f"nothing is timed above a difference of {bound:g}\n" in error


@pytest.mark.parametrize(("work", "others"), [("prefill", []), ("decode", ["ours, memory kept"])])
def test_prompts_and_decoding_are_timed_beside_the_authors(work, others, tmp_path):
    result = run(tmp_path, READS, "--models=ipttcd", f"--work={work}", "--tokens=20")
    assert (result.returncode, result.stderr) == (0, "")
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["program"] for row in rows] == ["ours", *others, "theirs, eager"]
    for row in rows:
        tokens = row["rows"] * (20 if work == "decode" else row["tokens"])
        assert row["tokens/s"] * row["median ms"] == pytest.approx(1e3 * tokens)


@pytest.mark.parametrize("start", ["", "print('ready', flush=True)\n"])
def test_a_program_that_ends_is_one_line(start, tmp_path):
    result = run(tmp_path, f"{start}raise SystemExit('it needs torch')", "--models=swa")
    assert "'theirs, eager' ended: it needs torch" in commands.mistake(result)


def test_a_shape_without_memory_is_refused():
    error = commands.refused("bench", "peer", "--gin=recall_swa.gin")
    assert "method 'ipttcd' has no layer with a memory" in error
