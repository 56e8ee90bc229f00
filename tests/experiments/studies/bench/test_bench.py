"""The benchmark: every case at tiny sizes as a command, what it does not run, refuses and fails."""

import itertools
import json
from typing import Any

import commands
import jax
import pytest
from checks import refused

from experiments.studies.bench import cases
from experiments.studies.bench.cases import Decode, Prefill, competitor
from ttcd_jax import RunConfig, TransformerConfig
from ttcd_jax.commands.cli import CONFIG_DIR, parse_options
from ttcd_jax.models.config import training_flops_per_token
from ttcd_jax.run.bindings import load_config
from ttcd_jax.train.state import num_params

PUBLISHED = load_config(TransformerConfig, "prefill/default.gin", [], config_dir=CONFIG_DIR)


def step(first, second):
    assert first["time"] == first["FLOPs"] == 1
    assert second["FLOPs"] < 1, "no memory"
    assert second["FLOPs"] == pytest.approx(second["MFLOP a token"] / first["MFLOP a token"])
    assert second["parameters"] < first["parameters"]
    assert second["time"] == pytest.approx(second["step ms"] / first["step ms"])
    for row in (first, second):
        assert row["tokens/s"] == pytest.approx(1e3 * row["tokens"] / row["step ms"])
        assert row["MFU %"] is None, "a CPU's peak is unknown"


def data(*rows):
    assert [row["gin"] for row in rows] == ["recall.gin", "recall_swa.gin"]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(row["tokens"] * row["batches/s"])
        assert row["rows/s"] == pytest.approx(2 * row["batches/s"])
        config = load_config(
            RunConfig, row["gin"], cases.Step.quick["param"], config_dir=CONFIG_DIR
        )
        flops = training_flops_per_token(config.model, row["tokens"] // 2) * row["tokens/s"]
        assert row["step %"] == pytest.approx(100 * 0.4 * 8 * 989e12 / flops, rel=1e-6)


def prompts(*rows):
    rows = {(row["model"], row["tokens"]): row for row in rows}
    assert len(rows) == 3 * 2
    for (_, length), row in rows.items():
        assert row["note"] == ""
        assert row["tokens/s"] == pytest.approx(2e3 * length / row["ms"])
        assert row["/ swa"] == pytest.approx(row["ms"] / rows["swa", length]["ms"])
        beyond = row["/ ipttt"] / row["FLOPs / ipttt"] - 1
        assert row["beyond ipttt %"] == pytest.approx(100 * beyond)
    ours = rows["ipttcd", 64]
    assert ours["FLOPs / swa"] > 1
    assert ours["program MiB"] == rows["ipttcd", 32]["program MiB"] > ours["state MiB"]


def decoding(*rows):
    named = {(row["model"], row["memory"]): row for row in rows}
    both = itertools.product(("ipttt", "ipttcd"), ("kept", "published"))
    assert list(named) == [("swa", "kept"), *both]
    assert named["swa", "kept"]["/ swa"] == 1
    assert named["ipttcd", "kept"]["state MiB"] > named["swa", "kept"]["state MiB"]
    assert all(row["tokens/s"] == pytest.approx(2e3 / row["ms a step"]) for row in rows)


CHECKS = {"step": step, "data": data, "prefill": prompts, "decode": decoding}


@pytest.mark.parametrize("case", CHECKS)
def test_a_case_writes_its_table_and_report(case, tmp_path):
    file = tmp_path / "x.jsonl"
    result = commands.run("bench", case, "--quick", "--rounds=2", f"--json={file}")
    assert (result.returncode, result.stderr) == (0, "")
    head, *rows = map(json.loads, file.read_text().splitlines())
    assert head["command"].startswith(f"python -m experiments.bench {case} --quick --rounds=2")
    assert f"device={head['device'].split()[-1]}" in result.stdout
    assert all(name in result.stdout for name in rows[0] if name not in ("row", "section"))
    CHECKS[case](*rows)


def test_a_users_mistake_is_one_line():
    steps = commands.run("bench", "steps")
    assert "case 'steps' is not one of step, data, prefill, decode" in commands.mistake(steps)
    misspelt = commands.mistake(commands.run("bench", "step", "--gin=quikstart.gin"))
    assert "quickstart.gin" in misspelt
    for case, words, *options in (
        ("data", "case data has no option '--windows=8': it takes gin=VALUE, ", "--windows=8"),
        ("step", "must be one or more, none twice", "--gin=a.gin", "--gin=a.gin"),
        ("prefill", "Prefill.lengths must be tuple[int, ...], got ('64K',)", "--lengths=64K"),
        ("prefill", "Prefill.models must be tuple['swa' | 'ipttt' | ", "--models=swa,gru"),
    ):
        refused(words, parse_options, cases.CASES[case], f"case {case}", options)


def quick(case, **changes) -> Any:
    return case(**case.quick | changes)


SWA = {"models": ("swa",), "lengths": (32,)}


def test_what_would_take_too_long_is_not_run():
    ((row,),) = quick(Prefill, **SWA, max_seconds=1e-12).tables()
    assert row["note"].startswith("compiled only: at least")
    assert row["ms"] is row["tokens/s"] is row["/ swa"] is None
    assert row["program MiB"] > row["state MiB"] > 0
    ((row,),) = quick(Decode, **SWA, max_seconds=0).tables()
    assert (row["ms a step"], row["note"]) == (None, "compiled only")


def test_the_bytes_of_a_program_are_those_of_the_piece_that_is_read():
    """Up to 12 tokens at once are one chunk of 8."""
    changes = {"models": ("ipttcd",), "lengths": (32,), "max_seconds": 0}
    (one,), (more,) = (
        next(quick(Prefill, piece_size=size, **changes).tables()) for size in (8, 12)
    )
    assert one["program MiB"] == more["program MiB"]


def test_what_runs_out_of_memory_is_recorded_and_other_errors_are_not(monkeypatch):
    def refuse(*arguments, **keywords):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(cases, "prefill", refuse)
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."
    ((row,),) = quick(Prefill, **SWA).tables()
    assert row["note"] == f"out of memory: {message}"
    assert row["tokens/s"] is None
    message = "INTERNAL: a kernel failed"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        list(quick(Prefill, **SWA).tables())


def test_shape_and_arithmetic_floor_are_the_published_ones_with_one_row_of_logits():
    assert (PUBLISHED.num_layers, PUBLISHED.fast_layers) == (28, (0, 7, 14, 21))
    assert PUBLISHED.memory.chunk_size == 4096
    counts = {"swa": 596_049_920, "ipttt": 600_264_704, "ipttcd": 600_371_200}
    for method, count in counts.items():
        assert num_params(competitor(PUBLISHED, method, 8192)) == count
    for window, floor in ((2048, 1.066), (8192, 1.034)):
        ours, theirs = (competitor(PUBLISHED, name, window) for name in ("ipttcd", "ipttt"))
        ratio = cases.prefill_flops(ours, 65536) / cases.prefill_flops(theirs, 65536)
        assert ratio == pytest.approx(floor, abs=5e-4)
    config = competitor(PUBLISHED, "swa", 2048)
    wider = config.replace(vocab_size=config.vocab_size + 1)
    flops = [cases.prefill_flops(each, 65536) for each in (config, wider)]
    assert flops[1] - flops[0] == 2 * config.dim
