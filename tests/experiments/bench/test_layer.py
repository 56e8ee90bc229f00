"""The layer benchmark at tiny sizes, and the training step's memory: linear in length."""

import json

import commands
import pytest

from experiments.bench.layer_cost import Sizes, layer_costs, step_memory
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.config import TransformerConfig

TINY = Sizes(16, 32, num_heads=2, seq_len=32, chunk_size=8, window=8, student_window=4)


def test_step_memory_is_linear_in_length_and_remat_lowers_it():
    config = TransformerConfig(
        vocab_size=258,
        dim=16,
        num_layers=2,
        num_heads=2,
        mlp_dim=32,
        window=16,
        student_window=8,
        fast_layers=(0, 1),
        memory=MemoryConfig(chunk_size=16),
    )
    short, long, remat_long = (
        *step_memory(config, [1024, 2048], ["none"]),
        *step_memory(config, [2048], ["block"]),
    )
    assert long.bytes_per_token == pytest.approx(short.bytes_per_token, rel=0.1)
    assert remat_long.temp_bytes < long.temp_bytes


def test_what_would_take_too_long_is_compiled_only():
    forms = ["blocked", "associative", "attention"]
    rows = layer_costs(TINY, ["IPTTCDMLP"], forms, rounds=1, max_seconds=0)
    assert [(row.layer, row.form) for row in rows] == [("IPTTCDMLP", form) for form in forms]
    assert all(row.seconds is None and row.temp_bytes > 0 for row in rows)
    assert all(row.note.startswith("memory only: about") for row in rows)


def test_the_command_writes_table_and_report(tmp_path):
    file = tmp_path / "report.json"
    only = "--layers=IPTTCDBlock", "--forms=blocked"  # the others take as long to compile
    result = commands.run(
        "bench_layer", "--quick", "--rounds=1", f"--json={file}", *only, is_forked=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(file.read_text())
    assert report["environment"]["device"] in result.stdout
    assert report["sizes"]["seq_len"] == 256
    (row,) = report["rows"]
    assert (row["layer"], row["form"]) == ("IPTTCDBlock", "blocked")
    assert row["seconds"] > 0
    assert row["temp_bytes"] > 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--lengths=4k", "--lengths: '4k' is not a number of tokens"),
        ("--forms=scan", "--forms=scan is not one of auto, blocked, associative"),
        ("--remat=all", "--remat=all is not one of none, block, dots"),
        ("--num_heads=3", "--num_heads=3 does not divide --dim=1024"),
        ("--json=/no/such/file", "--json: no folder /no/such"),
    ],
)
def test_a_users_mistake_is_one_line(argument, message):
    result = commands.run("bench_layer", argument)
    assert commands.mistake(result).startswith(f"error: {message}")
