"""Parity: every file of reference values passes, every damage to one fails, the command reports."""

import io
import shutil
from pathlib import Path

import commands
import jax
import numpy as np
import pytest
from ttcd_kernels import parity

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
        (MLP_FILE, "param.ttt_teacher_conv.weight", (5, 0, 2)),
        (MLP_FILE, "in.x", (0, 0, 1)),
        (MLP_FILE, "out.y", (1, 2, 3)),
        (MLP_FILE, "grad.up_proj.weight", (0, 0)),
        (MLP_FILE, "grad_in.x", (0, 1, 2)),
        ("ipttt_mlp_actconv.npz", "grad.ttt_activation_conv.weight", (5, 0, 2)),
        ("delta_op_state.npz", "out.S", (0, 1, 2, 3)),
        ("gated_delta_op.npz", "in.g", (1, 7, 0)),
        ("dual_attn_b.npz", "out.lse_student", (1, 2, 3)),
        ("dual_attn_d.npz", "grad_teacher.v", (1, 7, 0, 1)),
        ("adamw_clip_steps.npz", "out.grad_norm", (3,)),
        ("muon_steps.npz", "in.grad.model.layers.0.mlp.ttt_proj.weight", (0, 2, 3)),
        ("lr_schedules.npz", "out.wsd_sqrt", (60,)),
        ("mad_metrics.npz", "out.batch_loss", (2,)),
        ("mad_memorization.npz", "c1.train.inputs", (0, 7)),
        ("mad_memorization.npz", "c2.test.targets", (0, 7)),
        ("mad_memorization.npz", "c0.kv_values", (7,)),
    ],
)
def test_a_wrong_number_anywhere_fails_the_check(name, array, entry):
    """One percent of the largest number, or the next token."""
    golden = Golden(GOLDEN / name)
    values = golden.arrays[array]
    values[entry] += 1 if values.dtype.kind == "i" else 0.01 * np.abs(values).max()
    assert _check(golden).ratio > 1


def test_a_number_that_is_not_finite_fails_the_check():
    golden = Golden(GOLDEN / MLP_FILE)
    golden.arrays["out.y"][0, 0, 0] = np.nan
    assert _check(golden).ratio == np.inf


def test_a_wrong_setting_fails_the_check():
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
    with pytest.raises(error):
        _check(golden)


def test_a_comparison_of_nothing_fails():
    nothing = np.zeros((0, 3), np.float32)
    assert Comparison("out", relative_error(nothing, nothing), 1e-6).ratio == np.inf
    assert np.isnan(parity.distance(nothing, nothing)).all()
    with pytest.raises(DataError, match="nothing is compared"):
        worse()


def test_relative_error_is_the_difference_against_zeros():
    assert relative_error(np.full(3, 0.5), np.zeros(3)) == 0.5
    assert relative_error(np.full(3, 0.5), np.full(3, 2.0)) == 0.75


def _archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _npy(shape):
    """The header of an array without its numbers."""
    file = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(lambda data: data[:1000], id="truncated"),
        pytest.param(lambda data: data[:2000] + bytes(100) + data[2100:], id="overwritten"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: b"not an archive", id="text"),
        pytest.param(lambda data: _archive(x=np.zeros(3)), id="no description"),
        pytest.param(lambda data: _archive(config_json="{"), id="bad description"),
        pytest.param(lambda data: _archive(config_json="[1]"), id="description that is a list"),
        pytest.param(lambda data: _archive(config_json='{"a":' * 50_000), id="deep description"),
        pytest.param(lambda data: _archive(config_json="{}"), id="no kind"),
        pytest.param(lambda data: _archive(config_json='{"kind": []}'), id="kind that is a list"),
        pytest.param(
            lambda data: _archive(config_json='{"kind": "x", "config": 3}'), id="bad config"
        ),
        pytest.param(lambda data: _npy((10**12,)), id="larger than memory"),
        pytest.param(lambda data: None, id="absent"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(damaged, tmp_path):
    path = tmp_path / "damaged.npz"
    if (content := damaged((GOLDEN / MLP_FILE).read_bytes())) is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.npz") as caught:
        Golden(path)
    assert "\n" not in str(caught.value)


def test_the_command_reports_each_file(tmp_path):
    shutil.copy(GOLDEN / MLP_FILE, tmp_path / "a_good.npz")
    shutil.copy(GOLDEN / "lr_schedules.npz", tmp_path / "b_good.npz")
    tampered = dict(np.load(GOLDEN / MLP_FILE))
    tampered["param.down_proj.weight"] *= 1.01
    np.savez(tmp_path / "c_tampered.npz", **tampered)
    (tmp_path / "d_damaged.npz").write_text("not an archive")
    np.savez(tmp_path / "e_unknown.npz", config_json=np.array('{"kind": "another"}'))
    result = commands.run("tests.parity", f"--golden_dir={tmp_path}")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["ok", "a_good.npz", "ipttcd_mlp"],
        ["ok", "b_good.npz", "lr_schedule"],
        ["FAIL", "c_tampered.npz", "ipttcd_mlp"],
    ]
    assert lines[3].split()[:2] == ["FAIL", "d_damaged.npz"]
    assert lines[4].startswith("FAIL  e_unknown.npz")
    assert "kind 'another' has no check" in lines[4]
    assert lines[5:] == ["float32", "2 passed, 3 failed"]
    assert "Traceback" not in result.stderr


def test_the_command_succeeds_when_all_pass(tmp_path):
    shutil.copy(GOLDEN / MLP_FILE, tmp_path)
    lines = commands.output("tests.parity", f"--golden_dir={tmp_path}", "--float64").splitlines()
    assert lines[1:] == ["float64", "1 passed, 0 failed"]


def test_an_empty_folder_is_a_mistake_of_the_user(tmp_path):
    assert str(tmp_path) in commands.refused("tests.parity", f"--golden_dir={tmp_path}")
