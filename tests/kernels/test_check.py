"""The check that the kernels are right on a GPU, and what "auto" makes of it; with XLA's attention,
since there is no GPU."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from ttcd_kernels import check, dispatch, dual_window_attention, launch, verified
from ttcd_kernels.bench import OPS
from ttcd_kernels.check import Job
from ttcd_kernels.decode import bench as decode

JOB = Job("decode", "triton", "float16")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ttcd_kernels" / "checked.json"


def test_each_implementation_and_dtype_runs_in_a_process_of_its_own(tmp_path, cache, capsys):
    file = tmp_path / "report.json"
    check.main(["--op", "decode", "--implementation", "xla", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == len(decode.SHAPES["check"])
    assert {row["dtype"] for row in rows} == {*launch.DTYPES}
    assert all(row["note"] == "" and row["implementation"] == "xla" for row in rows)
    assert f"all {len(rows)} passed" in capsys.readouterr().out
    assert not cache.exists()  # XLA's attention says nothing about the kernels


def test_every_kernel_is_checked_in_every_dtype_and_with_documents():
    for op in OPS.values():
        cases = op.SHAPES["check"]
        assert {case.dtype for case in cases} == {*launch.DTYPES}
        assert {case.head_dim for case in cases} == {32, 64, 80, 96, 128}
    assert {case.has_documents for case in OPS["dual_window"].SHAPES["check"]} == {False, True}


def test_without_a_gpu_there_is_nothing_to_check():
    with pytest.raises(SystemExit, match="nothing to check: there is no NVIDIA GPU"):
        check.main([])
    with pytest.raises(SystemExit, match="no op has an implementation cudnn here"):
        check.main(["--op", "decode", "--implementation", "cudnn"])


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("import time; time.sleep(60)", "failed: no result after 2 seconds"),
        ("raise SystemExit('out of memory')", "failed: exit status 1: out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "failed: exit status -9: "),
    ],
    ids=["hangs", "fails", "crashes"],
)
def test_a_process_without_a_result_fails(program, note):
    (row,) = check.in_process(JOB, 2 if "sleep" in program else 60, ("-c", program))
    assert row == {**JOB._asdict(), "note": note}


def test_a_failure_ends_the_command_with_an_error(monkeypatch, cache, tmp_path):
    failed = {"op": "decode", "note": "failed: error nan, allowed 1e-05"}
    monkeypatch.setattr(check, "in_process", lambda *_: [failed])
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    for op in OPS.values():
        monkeypatch.setattr(op, "implementations", lambda case: {"triton": None})
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit, match="6 of 6 failed"):
        check.main(["--json", str(file)])
    assert json.loads(file.read_text())["rows"] == [failed] * 6
    assert not cache.exists()
    monkeypatch.setattr(check, "in_process", lambda *_: [failed | {"note": ""}])
    check.main(["--op", "decode"])
    assert not cache.exists()  # a part of the kernels only
    check.main([])
    assert verified.passed() == [verified.facts(90)]


def _launches():
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)

    def attend(q):
        return dual_window_attention(q, q, q, teacher_window=16, student_window=8)

    with launch.compiling_for(90), launch.recorded() as launches:
        jax.eval_shape(attend, q)
    return len(launches)


def test_auto_takes_a_kernel_where_it_has_been_checked(monkeypatch, caplog, cache):
    dispatch._log_once.cache_clear()
    monkeypatch.setattr(verified, "VERIFIED", frozenset())
    assert _launches() == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "compute capability 90; run python -m ttcd_kernels.check once" in record.getMessage()
    verified.record(90)
    assert _launches() == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert _launches() == 0  # other machines may not have checked
    monkeypatch.setattr(verified, "VERIFIED", {90})
    assert _launches() == 1
    cache.unlink()
    assert _launches() == 1


@pytest.mark.parametrize("text", ["", "{}", "[", '[{"capability": 90}]', "null"])
def test_a_damaged_record_counts_as_none(text, cache):
    cache.parent.mkdir()
    cache.write_text(text)
    assert _launches() == 0
    verified.record(90)
    assert _launches() == 1
