"""The benchmark: every case at tiny sizes as a command, what it does not run, refuses and fails."""

import functools
import itertools
import json
import math
from typing import Any

import commands
import jax
import numpy as np
import pytest
from checks import traced
from flax import nnx
from ttcd_kernels.dispatch import Candidate
from ttcd_kernels.dual_window import api as dual_window

from experiments.cli import CONFIG_DIR
from experiments.studies.bench import layer, prefill
from experiments.studies.bench import step as step_case
from experiments.studies.bench.models import Models
from experiments.studies.bench.prefill import Decode, Prefill
from ttcd_jax.inference.advance import advance
from ttcd_jax.inference.state import start_state
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import parse_topology
from ttcd_jax.train.state import abstract_model

PUBLISHED = load_config(TransformerConfig, "prefill/default.gin", [], config_dir=CONFIG_DIR)


def step(first, second):
    assert first["time"] == first["FLOPs"] == 1
    assert second["FLOPs"] < 1, "no memory"
    assert second["time"] == pytest.approx(second["step ms"] / first["step ms"])
    for row in (first, second):
        assert row["tokens/s"] == pytest.approx(1e3 * row["tokens"] / row["step ms"])
        assert row["MFU %"] is None, "a CPU's peak is unknown"


def data(*rows):
    assert [row["gin"] for row in rows] == ["recall.gin", "recall_swa.gin"]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(row["tokens"] * row["batches/s"])
        assert row["step %"] > 0


def fast_layer(*rows):
    assert [row["form"] for row in rows] == ["blocked", "associative", "attention"]
    assert all(row["ms"] > 0 and row["temp MiB"] > 0 and row["note"] == "" for row in rows)


def mad(together, by_epoch, by_step):
    for row in (together, by_epoch, by_step):
        ratio = together["run-steps/s"] / row["run-steps/s"]
        assert row["times slower"] == pytest.approx(ratio)


def prompts(*rows):
    rows = {(row["model"], row["tokens"]): row for row in rows}
    assert len(rows) == 4 * 2
    for (_, length), row in rows.items():
        assert row["note"] == ""
        assert row["tokens/s"] == pytest.approx(2e3 * length / row["ms"])
        assert row["/ swa"] == pytest.approx(row["ms"] / rows["swa", length]["ms"])
        beyond = row["/ ipttt"] / row["FLOPs / ipttt"] - 1
        assert row["beyond ipttt %"] == pytest.approx(100 * beyond)
    naive, fused = rows["ipttcd_naive", 64], rows["ipttcd", 64]
    assert naive["FLOPs / swa"] == fused["FLOPs / swa"] > 1
    assert naive["distance"] < 1e-5
    assert fused["program MiB"] == rows["ipttcd", 32]["program MiB"] > fused["state MiB"]


def decoding(*rows):
    named = {(row["model"], row["memory"]): row for row in rows}
    both = itertools.product(("ipttt", "ipttcd"), ("kept", "published"))
    assert list(named) == [("swa", "kept"), *both]
    assert named["swa", "kept"]["/ swa"] == 1
    assert named["ipttcd", "kept"]["state MiB"] > named["swa", "kept"]["state MiB"]
    assert all(row["tokens/s"] == pytest.approx(2e3 / row["ms a step"]) for row in rows)


CHECKS = {"step": step, "data": data, "layer": fast_layer, "mad": mad}
CHECKS |= {"prefill": prompts, "decode": decoding}


@pytest.mark.parametrize("case", CHECKS)
def test_a_case_writes_its_table_and_report(case, tmp_path):
    file = tmp_path / "report.json"
    result = commands.run("bench", case, "--quick", "--rounds=2", f"--json={file}")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(file.read_text())
    assert report["environment"]["device"] in result.stdout
    assert report["options"]["rounds"] == 2, "an option counts more than --quick"
    assert all(name in result.stdout for name in report["rows"][0])
    CHECKS[case](*report["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps"], "case 'steps' is not one of step, data, layer, mad, prefill, decode"),
        ([], "case '' is not one of step, data"),
        (["mad", "--windows=8"], "case mad has no option '--windows=8': it takes task=VALUE, "),
        (
            ["step", "--gin=a.gin", "--gin=a.gin"],
            "must be one or more, none twice",
        ),
        (["step", "--gin=quikstart.gin"], "quickstart.gin"),
        (["layer", "--lengths=64K"], "Layer.lengths must be tuple[int, ...], got ('64K',)"),
        (["layer", "--lengths=64,0"], "Layer.lengths (64, 0) must each be at least 1"),
        (["prefill", "--windows="], "Prefill.windows must be tuple[int, ...], got ('',)"),
        (["layer", "--forms="], "Layer.forms must be tuple['auto' | 'blocked'"),
        (["prefill", "--models=swa,gru"], "Prefill.models must be tuple['swa' | 'ipttt' | "),
        (["mad", "--task=recall"], "Sweep.task must be 'in-context-recall' | "),
    ],
)
def test_a_users_mistake_is_one_line(arguments, message):
    assert message in commands.mistake(commands.run("bench", *arguments))


def test_data_of_random_tokens_are_a_share_of_the_steps_of_a_node():
    params = ("RecordsConfig.seq_len=64", "RunConfig.batch_size=3", "MemoryConfig.chunk_size=16")
    options = step_case.Data(
        gin=("ipttcd_760m.gin",), param=params, random_tokens=20_000, batches=2, rounds=1
    )
    for topology, devices in (("h100x64", 8), ("a100x4", 4)):
        ((row,),) = options.replace(topology=topology).tables()
        assert row["tokens"] == 3 * 64
        assert row["rows/s"] == pytest.approx(row["tokens/s"] / 64)
        config = load_config(RunConfig, *options.gin, params, config_dir=CONFIG_DIR)
        hardware, _ = parse_topology(topology)
        flops = training_flops_per_token(config.model, 64) * row["tokens/s"]
        assert row["step %"] == pytest.approx(
            100 * 0.4 * devices * hardware.peak_flops / flops, rel=1e-6
        )


def test_memory_of_a_gradient_is_linear_in_length_and_remat_lowers_it():
    sizes = {"num_layers": 2, "lengths": (1024, 2048), "forms": ("blocked",)}
    sizes |= {"param": ("MemoryConfig.corrects_errors=False",)}
    options = layer.Layer(gin="recall.gin", remat=("none", "block"), max_seconds=0, **sizes)
    (short, _), (long, recomputed) = options.tables()
    assert long["temp bytes/token"] == pytest.approx(short["temp bytes/token"], rel=0.1)
    assert recomputed["temp MiB"] < long["temp MiB"]
    assert (long["ms"], long["note"]) == (None, "compiled only")


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

    monkeypatch.setattr(prefill, "prefill", refuse)
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."
    ((row,),) = quick(Prefill, **SWA).tables()
    assert row["note"] == f"out of memory: {message}"
    assert row["tokens/s"] is None
    message = "INTERNAL: a kernel failed"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        list(quick(Prefill, **SWA).tables())


def test_logits_that_are_wrong_fail():
    ones = np.ones((1, 11), np.float32)
    for other, note in ((1.1 * ones, "failed: 1.0e-01 from the fused"), (np.nan * ones, "failed:")):
        logits = {"ipttcd": ones, "ipttcd_naive": other, "swa": np.nan * ones}
        row = prefill.checked("ipttcd_naive", logits, "float32")
        assert row["note"].startswith(note)
        assert "note" not in prefill.checked("ipttcd", logits, "float32")
        assert prefill.checked("swa", logits, "float32")["note"].startswith("failed:")


def test_the_naive_form_calls_attention_once_per_window_and_only_there(monkeypatch):
    options, calls = quick(Prefill), {}
    params = [*options.param[2:], "TransformerConfig.num_layers=2", "TransformerConfig.dim=16"]
    shape = load_config(TransformerConfig, options.gin, params, config_dir=CONFIG_DIR)
    attend = dual_window.CANDIDATES["xla"].run
    for name in ("ipttcd", "ipttcd_naive"):
        calls[name] = []

        def recorded(q, k, v, ids, windows, calls=calls[name]):
            calls.append((windows.teacher, windows.student))
            return attend(q, k, v, ids, windows)

        monkeypatch.setitem(dual_window.CANDIDATES, "xla", Candidate(recorded))
        model = Models(shape).build(name, window=4)
        tokens, lengths = np.zeros((1, 8), np.int32), np.full(1, 8, np.int32)
        run = functools.partial(advance, halo=3, has_gap=False)
        traced(run, model, start_state(model, 1), tokens, lengths)
    # The fast layer's attention, and the plain layer's.
    assert calls == {"ipttcd": [(4, 2), (4, 4)], "ipttcd_naive": [(4, 4), (2, 2), (4, 4)]}


@pytest.mark.parametrize(
    ("method", "count"), [("swa", 596_049_920), ("ipttt", 600_264_704), ("ipttcd", 600_371_200)]
)
def test_the_shape_is_the_published_one(method, count):
    assert (PUBLISHED.num_layers, PUBLISHED.fast_layers) == (28, (0, 7, 14, 21))
    assert PUBLISHED.memory.chunk_size == 4096
    params = nnx.state(abstract_model(Models(PUBLISHED).config(method, 8192)), nnx.Param)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count


def test_the_arithmetic_floor_is_the_published_one_and_counts_one_row_of_logits():
    built = Models(PUBLISHED)
    for window, floor in ((2048, 1.066), (8192, 1.034)):
        ours, theirs = (built.config(name, window) for name in ("ipttcd", "ipttt"))
        ratio = prefill.prefill_flops(ours, 65536) / prefill.prefill_flops(theirs, 65536)
        assert ratio == pytest.approx(floor, abs=5e-4)
    config = built.config("swa", 2048)
    wider = config.replace(vocab_size=config.vocab_size + 1)
    flops = [prefill.prefill_flops(each, 65536) for each in (config, wider)]
    assert flops[1] - flops[0] == 2 * config.dim
