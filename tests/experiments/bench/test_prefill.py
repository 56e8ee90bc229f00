"""The prefill benchmark: the published shape, the naive form, what is left out, the command."""

import functools
import json
import math
from pathlib import Path

import commands
import jax
import numpy as np
import pytest
from checks import traced
from flax import nnx
from ttcd_kernels.dispatch import Candidate
from ttcd_kernels.dual_window import api as dual_window

from experiments.bench import prefill_cost
from experiments.bench.prefill_models import Models, operations
from experiments.gin_loading import load_config
from ttcd_jax.inference.advance import advance
from ttcd_jax.inference.state import start_state
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.train.state import abstract_model

CONFIG_DIR = Path(__file__).parents[3] / "experiments" / "configs"
SHAPE = TransformerConfig(
    vocab_size=11,
    dim=8,
    num_layers=2,
    num_heads=2,
    mlp_dim=12,
    fast_layers=(0,),
    memory=MemoryConfig(chunk_size=8),
    target_memory=TargetMemoryConfig(chunk_size=8),
    window=4,
    student_window=2,
)
SETTING = prefill_cost.Setting(length=16, batch_size=1, window=4)


@pytest.mark.parametrize(
    ("method", "count"), [("swa", 596_049_920), ("ipttt", 600_264_704), ("ipttcd", 600_371_200)]
)
def test_the_shape_is_the_published_one(method, count):
    config = load_config(TransformerConfig, "prefill/default.gin", [], config_dir=CONFIG_DIR)
    assert (config.num_layers, config.fast_layers) == (28, (0, 7, 14, 21))
    assert config.memory.chunk_size == config.target_memory.chunk_size == 4096
    params = nnx.state(abstract_model(config.replace(method=method)), nnx.Param)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == count


def test_the_arithmetic_floor_is_the_published_one_and_counts_one_row_of_logits():
    built = Models(load_config(TransformerConfig, "prefill/default.gin", [], config_dir=CONFIG_DIR))
    for window, floor in ((2048, 1.066), (8192, 1.034)):
        ours, theirs = (built.config(name, window) for name in ("ipttcd", "ipttt"))
        ratio = prefill_cost.prefill_flops(ours, 65536) / prefill_cost.prefill_flops(theirs, 65536)
        assert ratio == pytest.approx(floor, abs=5e-4)
    config = built.config("swa", 2048)
    wider = config.replace(vocab_size=config.vocab_size + 1)
    flops = [prefill_cost.prefill_flops(each, 65536) for each in (config, wider)]
    assert flops[1] - flops[0] == 2 * config.dim


def test_the_naive_form_takes_the_fused_operations_apart_and_only_there(monkeypatch):
    built, calls, barriers = Models(SHAPE), {}, {}
    attend = dual_window.CANDIDATES["xla"].run
    for name in ("ipttcd", "ipttcd_naive", "ipttcd"):
        calls[name] = []

        def recorded(q, k, v, ids, windows, calls=calls[name]):
            calls.append(windows[:2])
            return attend(q, k, v, ids, windows)

        monkeypatch.setitem(dual_window.CANDIDATES, "xla", Candidate(recorded))
        model = built.build(name, window=4)
        state = start_state(model, 1)
        tokens, lengths = np.zeros((1, 8), np.int32), np.full(1, 8, np.int32)
        with operations(model.config):
            run = functools.partial(advance, halo=3, has_gap=False)
            found = traced(run, model, state, tokens, lengths)
        kinds = [eqn.primitive.name for eqn in found]
        barriers[name] = kinds.count("optimization_barrier")
    # The fast layer's attention, and the plain layer's.
    assert calls == {"ipttcd": [(4, 2), (4, 4)], "ipttcd_naive": [(4, 4), (2, 2), (4, 4)]}
    assert barriers == {"ipttcd": 0, "ipttcd_naive": 1}, "the results of both convolutions"


@pytest.fixture(scope="module")
def swa():
    return {"swa": Models(SHAPE).build("swa", SETTING.window)}


def test_what_would_take_too_long_is_not_run(swa):
    limits = {"piece_size": 8, "rounds": 1, "max_seconds": 1e-9}
    (row,) = prefill_cost.prefill_rows(swa, SETTING, **limits)
    (step,) = prefill_cost.decode_rows(swa, 1, 16, steps=1, **limits)
    assert row.note.startswith("skipped: about")
    assert step.note.startswith("skipped: about")
    assert row.seconds is row.time_over_swa is step.seconds is None
    assert row.program_bytes > row.state_bytes > 0
    (row,) = prefill_cost.prefill_rows(swa, SETTING, **limits | {"max_seconds": 0})
    assert row.note == "skipped: compiled only"


def test_what_runs_out_of_memory_is_recorded_and_other_errors_are_not(swa, monkeypatch):
    def refuse(*arguments, **keywords):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(prefill_cost.reading, "prefill", refuse)
    limits = {"piece_size": 8, "rounds": 1, "max_seconds": 60}
    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes."
    (row,) = prefill_cost.prefill_rows(swa, SETTING, **limits)
    assert row.note == f"out of memory: {message}"
    assert row.tokens_per_second is None
    message = "INTERNAL: a kernel failed"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        prefill_cost.prefill_rows(swa, SETTING, **limits)


def test_a_naive_form_of_other_numbers_fails(swa):
    config = swa["swa"].config
    logits = np.ones((1, 11))
    assert prefill_cost._failure(config, logits, 1e-6) == ""
    assert prefill_cost._failure(config, logits, 0.1).startswith("failed: 1.0e-01 from the fused")
    assert "not finite" in prefill_cost._failure(config, np.full((1, 11), np.nan), None)


def test_the_command_writes_tables_report_and_pictures(tmp_path):
    file = tmp_path / "report.json"
    some = "--models=swa,ipttcd_naive,ipttcd"  # every model takes seconds to compile
    result = commands.run(
        "bench_prefill",
        "--quick",
        some,
        "--whole_rows",
        f"--json={file}",
        f"--picture={tmp_path}",
        is_forked=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    names = "prefill_2x32.png", "prefill_2x64.png", "memory.png", "decode.png"
    assert {path.name for path in tmp_path.iterdir()} == {*names, "report.json"}
    report = json.loads(file.read_text())
    assert report["environment"]["device"] in result.stdout
    rows = {(row["model"], row["length"]): row for row in report["prefill"]}
    assert len(rows) == 3 * 2
    for (_, length), row in rows.items():
        assert row["note"] == ""
        assert row["tokens_per_second"] == pytest.approx(2 * length / row["seconds"])
        assert row["time_over_swa"] == row["seconds"] / rows["swa", length]["seconds"]
        assert row["time_over_ipttt"] is row["flops_over_ipttt"] is None
    assert rows["ipttcd", 64]["flops_over_swa"] > 1
    assert rows["ipttcd", 64]["flops"] == rows["ipttcd_naive", 64]["flops"]
    assert rows["ipttcd_naive", 64]["distance"] < 1e-5
    memory = {(row["model"], row["length"]): row for row in report["memory"]}
    short, long = memory["ipttcd", 32], memory["ipttcd", 64]
    assert short["piece_bytes"] == long["piece_bytes"]
    assert short["whole_bytes"] < long["whole_bytes"]
    steps = {(row["model"], row["memory"]): row for row in report["decode"]}
    assert len(steps) == 3
    assert steps["swa", "kept"]["time_over_swa"] == 1
    assert steps["ipttcd", "published"]["state_bytes"] > steps["swa", "kept"]["state_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths=64K"], "--lengths: '64K' is not a positive number, e.g. 4,16"),
        (["--windows="], "--windows is empty"),
        (["--json=/no/such/file"], "--json: no folder /no/such"),
        (["--models=swa,gru"], "--models=gru is not one of swa, ipttt, ipttcd_naive, ipttcd"),
        (["--piece_size=12288", "--lengths=12288"], "--piece_size=12288 and chunk_size 4096: "),
        (["--lengths=65537"], "--piece_size=4096 does not divide 65537 of --lengths"),
    ],
)
def test_a_users_mistake_is_one_line(arguments, message):
    result = commands.run("bench_prefill", *arguments)
    assert message in commands.mistake(result)
