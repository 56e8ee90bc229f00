"""The check that the kernels are right on a GPU, and what "auto" makes of it; with XLA's attention,
since there is no GPU."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from ttcd_kernels import cases, check, dispatch, dual_window_attention, launch, verified
from ttcd_kernels.cases import OPS
from ttcd_kernels.check import Job
from ttcd_kernels.decode import bench as decode

JOB = Job("decode", "triton", "float16", "a case")
JOBS = [
    Job(op, name, case.dtype, case.name)
    for op in OPS
    for case in OPS[op].SHAPES["check"]
    for name in ("triton", "mosaic")
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ttcd_kernels" / "checked.json"


def test_each_case_runs_in_a_process_of_its_own(tmp_path, cache, capsys, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setitem(decode.SHAPES, "check", decode.SHAPES["check"][6:8])
    check.main(["--op", "decode", "--implementation", "xla", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert sorted(row["dtype"] for row in rows) == ["bfloat16", "float16"]
    assert all(row["note"] == "" and row["implementation"] == "xla" for row in rows)
    assert f"all {len(rows)} passed" in capsys.readouterr().out
    assert not cache.exists()  # XLA's attention says nothing about the kernels


def test_every_kernel_is_checked_in_every_dtype_and_with_documents():
    for op in OPS.values():
        found = op.SHAPES["check"]
        assert {case.dtype for case in found} == {*launch.DTYPES}
        assert {case.head_dim for case in found} == {32, 64, 80, 96, 128}
    assert {case.has_documents for case in OPS["dual_window"].SHAPES["check"]} == {False, True}


def test_without_a_gpu_there_is_nothing_to_check():
    with pytest.raises(SystemExit, match="nothing to check: there is no NVIDIA GPU"):
        check.main([])
    with pytest.raises(SystemExit, match="no op has an implementation cudnn here"):
        check.main(["--op", "decode", "--implementation", "cudnn"])


@pytest.mark.parametrize(
    ("program", "note"),
    [
        ("import time; time.sleep(60)", "failed: no result after 1 seconds"),
        ("raise SystemExit('out of memory')", "failed: no result (exit status 1): out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "failed: no result (exit status -9): "),
    ],
    ids=["hangs", "fails", "crashes"],
)
def test_a_process_without_a_result_fails(program, note):
    row = cases.in_process(("-c", program), JOB, 1 if "sleep" in program else 60)
    assert row == {**JOB._asdict(), "note": note}


def test_what_has_been_seen_right_may_be_listed():
    """Only after all that "auto" may take, by the kernels that it takes."""
    rows = [job._asdict() | {"note": ""} for job in JOBS]
    (line,) = check.advice(90, rows)
    assert line.startswith("verified.py: VERIFIED may have 90")
    assert check.advice(90, rows[2:]) == []
    rows[1]["note"] = "failed: mosaic is not automatic"
    assert check.advice(90, rows) == [line]
    rows[0]["note"] = "failed: two runs differ"
    assert check.advice(90, rows) == []


@pytest.fixture
def processes(monkeypatch):
    """On a GPU with the Triton kernels: the jobs that got a process, and the note of each (the last
    in the list)."""
    seen, notes = [], [""]

    def in_process(program, job, seconds):
        seen.append(job)
        return job._asdict() | {"note": notes[-1]}

    monkeypatch.setattr(cases, "in_process", in_process)
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    for op in OPS.values():
        monkeypatch.setattr(op, "implementations", lambda case: {"triton": None})
    return seen, notes


def test_a_failure_ends_the_command_with_an_error(processes, cache, tmp_path):
    _, notes = processes
    file, note = tmp_path / "report.json", "failed: error nan, allowed 1e-05"
    notes.append(note)
    with pytest.raises(SystemExit, match=r"54 of 54 failed"):
        check.main(["--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["note"] for row in rows] == [note] * 54
    assert not cache.exists()
    notes.append("")
    for part in (["--op", "decode"], ["--implementation", "triton"]):  # of the kernels only
        check.main(part)
        assert not cache.exists()
    check.main([])
    assert verified.passed() == [verified.conditions(90)]


def test_a_check_goes_on_and_tries_again_what_was_lost(processes, tmp_path, capsys):
    seen, _ = processes
    file = tmp_path / "report.json"
    arguments = ["--op", "decode", "--json", str(file)]
    check.main(arguments)
    report = json.loads(file.read_text())
    first, *others, last = report["rows"]
    last["note"] = "failed: no result after 120 seconds"
    file.write_text(json.dumps(report | {"rows": [*others, last]}))
    done = {*seen}
    seen.clear()
    check.main(arguments)
    assert {*seen} == {Job(*(row[name] for name in Job._fields)) for row in (first, last)}
    assert f"all {len(done)} passed" in capsys.readouterr().out


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
    for text in ("", "{}", "[", '[{"capability": 90}]', "null"):  # damaged: counts as none
        cache.parent.mkdir(exist_ok=True)
        cache.write_text(text)
        assert _launches() == 0
        verified.record(90)
        assert _launches() == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert _launches() == 0  # other machines may not have checked
    monkeypatch.setattr(verified, "VERIFIED", {90})
    assert _launches() == 1
    cache.unlink()
    assert _launches() == 1
