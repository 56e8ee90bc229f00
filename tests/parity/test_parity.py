"""Parity: every file of reference values passes, every damage to one fails, the command reports."""

import io
import json
import shutil
from pathlib import Path

import commands
import jax
import numpy as np
import pytest
from checks import refused

from experiments.studies.kernels import programs
from tests.parity.checks import CHECKS
from tests.parity.golden import Comparison, Golden, relative_error, worse
from ttcd_jax.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.npz"))
MLP_FILE = "ipttcd_mlp_f_short.npz"


def test_every_kind_has_files():
    assert {Golden(GOLDEN / name).kind for name in FILES} == set(CHECKS)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FILES)
def test_outputs_losses_and_gradients_are_the_published_ones(name, dtype):
    golden = Golden(GOLDEN / name)
    with jax.enable_x64(dtype == "float64"):
        worst = CHECKS[golden.kind](golden, dtype)
    assert worst.ratio <= 1, f"{worst.name}: {worst.error:.1e} of {worst.bound:.1e}"


def _check(golden):
    return CHECKS[golden.kind](golden, "float32")


@pytest.mark.parametrize(
    ("name", "array", "entry"),
    [
        (MLP_FILE, "param.down_proj.weight", (3, 4)),
        (MLP_FILE, "out.y", (1, 2, 3)),
        (MLP_FILE, "grad.up_proj.weight", (0, 0)),
        ("ipttt_mlp_actconv.npz", "grad.ttt_activation_conv.weight", (5, 0, 2)),
        ("delta_op_state.npz", "out.S", (0, 1, 2, 3)),
        ("dual_attn_b.npz", "out.lse_student", (1, 2, 3)),
        ("adamw_clip_steps.npz", "out.grad_norm", (3,)),
        ("muon_steps.npz", "in.grad.model.layers.0.mlp.ttt_proj.weight", (0, 2, 3)),
        ("lr_schedules.npz", "out.wsd_sqrt", (60,)),
        ("mad_metrics.npz", "out.batch_loss", (2,)),
        ("mad_memorization.npz", "c1.train.inputs", (0, 7)),
    ],
)
def test_a_wrong_number_anywhere_fails_the_check(name, array, entry):
    """One percent of the largest number, or the next token."""
    golden = Golden(GOLDEN / name)
    values = golden.arrays[array]
    values[entry] += 1 if values.dtype.kind == "i" else 0.01 * np.abs(values).max()
    assert _check(golden).ratio > 1


def test_a_number_that_is_not_finite_and_a_wrong_setting_fail_the_check():
    golden = Golden(GOLDEN / MLP_FILE)
    golden.arrays["out.y"][0, 0, 0] = np.nan
    assert _check(golden).ratio == np.inf
    golden = Golden(GOLDEN / "ipttcd_mlp_a.npz")
    golden.config["ttt_lr"] *= 1.01
    assert _check(golden).ratio > 1


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("param.down_proj.weight", lambda x: {}, DataError),
        ("param.down_proj.weight", lambda x: {"param.surplus": x}, KeyError),
        ("param.down_proj.weight", lambda x: {"param.down_proj.weight": x.T}, DataError),
        ("out.y", lambda x: {"out.y": x.T}, DataError),
        ("out.y", lambda x: {"out.y": x, "out.surplus": x}, DataError),
        ("in.x", lambda x: {}, KeyError),
    ],
)
def test_names_and_shapes_that_do_not_fit_are_errors(name, change, error):
    golden = Golden(GOLDEN / MLP_FILE)
    golden.arrays |= change(golden.arrays.pop(name))
    refused("", _check, golden, error=error)


def test_errors_are_relative_and_a_comparison_of_nothing_fails():
    nothing = np.zeros((0, 3), np.float32)
    assert Comparison("out", relative_error(nothing, nothing), 1e-6).ratio == np.inf
    assert np.isnan(programs.relative_error(nothing, nothing))
    refused("nothing is compared", worse, error=DataError)
    assert relative_error(np.full(3, 0.5), np.zeros(3)) == 0.5
    assert relative_error(np.full(3, 0.5), np.full(3, 2.0)) == 0.75


def _archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_a_damaged_file_is_named_in_one_line(tmp_path):
    """Of files that are no archive of arrays, tests/test_fuzz.py has more."""
    path, content = tmp_path / "damaged.npz", (GOLDEN / MLP_FILE).read_bytes()
    texts = "{", "[1]", '{"a":' * 50_000, "{}", '{"kind": []}', '{"kind": "x", "config": 3}'
    damaged = [_archive(config_json=text) for text in texts] + [_archive(x=np.zeros(3))]
    refused("damaged.npz", Golden, path, error=DataError)
    for data in (content[:1000], content[:2000] + bytes(100) + content[2100:], b"", *damaged):
        path.write_bytes(data)
        refused("damaged.npz", Golden, path, error=DataError)


def test_the_command_reports_each_file(tmp_path):
    shutil.copy(GOLDEN / MLP_FILE, tmp_path / "a_good.npz")
    tampered = dict(np.load(GOLDEN / MLP_FILE))
    tampered["param.down_proj.weight"] *= 1.01
    np.savez(tmp_path / "c_tampered.npz", **tampered)
    (tmp_path / "d_damaged.npz").write_text("not an archive")
    np.savez(tmp_path / "e_unknown.npz", config_json=np.array('{"kind": "another"}'))
    file = tmp_path / "x.jsonl"
    result = commands.run("tests.parity", f"--golden_dir={tmp_path}", f"--records={file}")
    assert result.returncode == 1
    *lines, end = result.stdout.splitlines()
    for dtype, found in zip(("float32", "float64"), (lines[:4], lines[4:]), strict=True):
        good, tampered, damaged, unknown = found
        assert good.split()[:4] == ["ok", dtype, "a_good.npz", "ipttcd_mlp"]
        assert tampered.split()[:4] == ["FAIL", dtype, "c_tampered.npz", "ipttcd_mlp"]
        assert damaged.split()[:3] == ["FAIL", dtype, "d_damaged.npz"]
        assert unknown.startswith(f"FAIL  {dtype}  e_unknown.npz")
        assert "kind 'another' has no check" in unknown
    assert end == "2 passed, 6 failed"
    assert "Traceback" not in result.stderr
    head, row = map(json.loads, file.read_text().splitlines())
    assert head["command"].startswith("python -m tests.parity --golden_dir=DIR --records=")
    errors = [float(lines[x].split()[4]) for x in (1, 5)]
    assert [row["float32"], row["float64"]] == pytest.approx(errors, rel=0.05)


def test_the_command_succeeds_when_all_pass_and_refuses_an_empty_folder(tmp_path):
    line = "tests.parity", f"--golden_dir={tmp_path}"
    assert str(tmp_path) in commands.refused(*line)
    shutil.copy(GOLDEN / MLP_FILE, tmp_path)
    assert commands.output(*line).splitlines()[2:] == ["2 passed, 0 failed"]
