"""The tools of kernels without a GPU: `bench` at tiny shapes; the jobs of a GPU's first half hour,
processes and launches that stand in for real ones; the definition; tables; what "auto" may take.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
import re
import sys
import tempfile
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttcd_kernels import dispatch, launch, measure, verified
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.dual_window.api import dual_window_attention
from ttcd_kernels.table import format_table, write_json

from experiments.studies.bench.cases import Step
from experiments.studies.kernels import __main__ as hour
from experiments.studies.kernels import (
    attention,
    bench,
    cases,
    check,
    convolution,
    profile,
    programs,
    records,
    runner,
    tune,
)
from experiments.studies.kernels import decoding as decode
from experiments.studies.kernels.attention import SHAPES, Case
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.runner import Job
from tests.machine_code import __main__ as machine_code

TINY = ["--op", "dual_window", "--shapes", "tiny"]
ODD = Case("29 of 40, 13/6 H2/1 D8", 29, 2, 1, 8, 13, 6, num_keys=40, dtype="float32")
OURS = ("xla", "lse", "xla two calls")
NOTES = {
    "peer": "failed: NotImplementedError: head dim 8 is too small",
    "sign": r"failed: error \d.* of d., allowed 1e-05",
    "row": "failed: error nan of teacher, allowed 1e-05",
    "noise": "failed: two runs differ",
}


@pytest.fixture
def wrong(monkeypatch):
    """One shape to time, two to compare; in float32, beside XLA's programs, a peer that refuses the
    shape, and XLA's attention with a fault: the sign of one gradient, a row that is not a number,
    other bits in every run."""
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"][:1])
    monkeypatch.setitem(SHAPES, "parity", (ODD, ODD._replace(dtype="bfloat16")))
    implementations, noise = attention.implementations, itertools.cycle((0.0, 1e-6))

    def refuses(*operands):
        raise NotImplementedError("head dim 8 is too small\nfor this peer")

    def noisy(x):
        return x + jax.pure_callback(lambda: np.float32(next(noise)), jnp.float32(0))

    faults = {  # of the teacher's outputs
        "sign": lambda x: 2 * jax.lax.stop_gradient(x) - x,
        "row": lambda x: x.at[0, 7].set(jnp.nan),
        "noise": noisy,
    }

    def faulty(fault, attend, *qkv):
        teacher, *others = attend(*qkv)
        return fault(teacher), *others

    def with_faults(case):
        found = {"peer": refuses, **implementations(case)}
        for name, fault in faults.items():
            found[name] = partial(faulty, fault, found["xla"])
        return found if case.dtype == "float32" else implementations(case)

    monkeypatch.setattr(attention, "implementations", with_faults)
    monkeypatch.setattr(attention, "PEERS", ("peer",))


def test_the_report_names_machine_shapes_and_every_measurement(wrong, tmp_path, capsys):
    """A peer may refuse; a kernel of ours that is wrong fails the command, after all is measured
    and written."""
    file, notes = tmp_path / "report.json", {"xla": "", "lse": ""} | NOTES
    with pytest.raises(SystemExit, match="failed: sign, row, noise; the notes above say why"):
        bench.main([*TINY, "--output", str(file)])
    report = json.loads(file.read_text())
    assert {"device", "jax", "jaxlib", "commit"} <= report["environment"].keys()
    report |= report["ops"]["dual_window"]
    assert [shape["name"] for shape in report["shapes"]] == [case.name for case in SHAPES["tiny"]]
    rows, compared = report["rows"], report["parity"]
    assert [row["implementation"] for row in rows] == 2 * ["peer", *OURS, "sign", "row", "noise"]
    assert [row["note"] for row in rows if row["time ms"] is None] == [NOTES["peer"]] * 2
    rows = [row for row in rows if row["implementation"] != "peer"]
    assert all(row["time ms"] > 0 and row["temp MiB"] > 0 and not row["note"] for row in rows)
    assert all(row["% of floor"] > 0 for row in rows)
    assert all(row["/ xla"] == 1 for row in rows if row["implementation"] == "xla")
    # Operands are rounded, what they are compared with is not: a step or two of the dtype.
    bounds = {"float32": 3e-6, "bfloat16": 3e-2}
    for row in compared:
        assert re.fullmatch(notes[row["implementation"]], row["note"]), row
        assert row["note"] or row["max rel. error"] < bounds[row["dtype"]]
    assert {row["implementation"] for row in compared} == notes.keys()
    assert {row["dtype"] for row in compared} == bounds.keys()
    printed = capsys.readouterr().out
    assert all(case.name in printed for case in SHAPES["tiny"])


def test_some_implementations_are_timed_without_a_comparison(wrong, monkeypatch, tmp_path):
    file = tmp_path / "report.json"
    arguments = [*TINY, "--times_only", "--output", str(file), "--implementation"]
    bench.main([*arguments, "xla two calls", "peer"])
    report = json.loads(file.read_text())["ops"]["dual_window"]
    assert report["parity"] == []
    assert [row["implementation"] for row in report["rows"]] == ["peer", "xla two calls"] * 2
    assert all(row["/ xla"] is None for row in report["rows"])
    monkeypatch.setattr(attention, "PEERS", ())
    for names, message in (
        (["peer", "xla"], "failed: peer; the notes above say why"),
        (["a", "b"], "nothing to time: no implementation a, b here"),
    ):
        with pytest.raises(SystemExit, match=message):
            bench.main([*arguments, *names])


def test_what_does_not_fit_is_compiled_only_and_says_so(monkeypatch):
    monkeypatch.setattr(measure, "usable_bytes", lambda: 1000)
    ceilings = measure.Ceilings(1e9, 1e9)
    rows = bench.timed(attention, SHAPES["tiny"][0], ceilings)
    assert all(row["time ms"] is row["/ xla"] is None and row["temp MiB"] > 0 for row in rows)
    assert all("memory only: does not fit" in row["note"] for row in rows)


def test_programs_take_turns():
    order = []
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    measure.median_seconds(programs, rounds=2)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * 3  # the warm-up, then two rounds


def test_the_work_of_a_token_counts_both_products_and_each_key_once():
    case = next(case for case in decode.SHAPES["paper"] if (case.batch, case.head_dim) == (8, 128))
    moved = 2 * (2 * 8 * 8192 * 8 * 128 + 3 * 8 * 16 * 128)
    assert decode.work(case, "forward") == (4 * 8 * 16 * 128 * 8192, moved)


@pytest.mark.parametrize("command", [bench, hour])
@pytest.mark.parametrize("error", [RuntimeError("no backend 'x'\nmore"), AssertionError()])
def test_a_platform_that_is_not_there_is_one_line(monkeypatch, capsys, command, error):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "x")
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main([])
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"error: JAX_PLATFORMS=x: (no backend 'x'|no such device): unset it\n", line
    )


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [
        (bench, "--op none", "--op"),
        (bench, "--shapes huge", "--shapes"),
        (bench, "--output /no/x", "--output: no folder /no"),
        (bench, "--case x", "--case: no 'x' in tiny; it has 64 tokens, 16/8, 48"),
        (bench, "--shapes paper", "there is no NVIDIA GPU"),
        (bench, "--implementation triton", "there is no NVIDIA GPU"),
        (hour, "", "there is no NVIDIA GPU"),
        (hour, "--implementation xla", "there is no NVIDIA GPU"),  # of the paper's shapes
        (hour, "--steps tiles --shapes tiny", "there is no NVIDIA GPU"),
        (hour, "--steps check", "there is no NVIDIA GPU"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(command, line, words, capsys):
    if "GPU" in words and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(line.split())
    assert words in capsys.readouterr().err


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "report.json"
    write_json({"rows": [1]}, file)
    with pytest.raises(TypeError):
        write_json({"rows": [2], "bad": object()}, file)
    assert json.loads(file.read_text()) == {"rows": [1]}
    assert [*tmp_path.iterdir()] == [file]


def test_a_table_lines_up_hides_control_characters_and_keeps_four_digits_of_floats():
    rows = [
        {"task": "recall", "accuracy": 0.98765, "tokens": 1234567, "passed": True},
        {"task": "a\x1b[2Jb\n", "accuracy": None, "tokens": 8},
    ]
    assert format_table(rows).splitlines() == [
        "task     accuracy     tokens  passed",
        "-------  --------  ---------  ------",
        "recall     0.9877  1,234,567  yes",
        "a�[2Jb�         -          8  -",
    ]
    assert format_table(rows, ["tokens"]).splitlines()[2] == "1,234,567"
    assert format_table([], ["task"]) == "task\n----"
    values = (12345.6, 1e-7, math.nan, -3.14159, 1e15, 1.0)
    texts = [line.strip() for line in format_table([{"x": x} for x in values]).splitlines()[2:]]
    assert texts == ["12,346", "1.000e-07", "nan", "-3.142", "1.000e+15", "1.000"]


def test_every_kernel_is_checked_in_every_dtype_and_with_documents_halo_and_scales():
    for op in (attention, decode):
        found = {(x.head_dim, x.dtype, getattr(x, "has_documents", 0)) for x in op.SHAPES["check"]}
        kinds = (0, 1) if op is attention else (0,)
        dims = (32, 64, 80, 96, 128)
        assert found >= {*itertools.product(dims, launch.DTYPES, kinds)}
    found = {(x.dtype, x.has_documents) for x in convolution.SHAPES["check"]}
    assert found == {*itertools.product(launch.DTYPES, (False, True))}
    found = {(x.is_causal, x.normalizes_keys) for x in convolution.SHAPES["check"]}
    assert found == {(False, True), (True, True), (False, False)}
    halo = [x for x in SHAPES["check"] if x.keys > x.length]
    assert {x.head_dim for x in halo} == {64, 80, 128}
    assert all(x.keys % 2 and x.length % 2 for x in halo if x.length > 1)
    assert {np.sign(x.windows.scale) for x in SHAPES["check"]} == {-1, 0, 1}
    assert {x.first_position < 0 for x in decode.SHAPES["check"]} == {False, True}


def test_of_more_than_2_31_elements_the_last_rows_are_compared(monkeypatch):
    """With all their keys and all queries of those; where there is a GPU."""
    (case,) = (x for x in SHAPES["check"] if x.num_compared)
    q, *_ = attention.operand_shapes(case)
    assert q.size > 2**31
    options = Namespace(op=["dual_window"], implementation=["xla"])
    assert case.name not in {job.case for job in check.jobs(options)}
    small = case._replace(length=97, teacher_window=11, student_window=5, num_compared=30)
    small = small._replace(num_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    (row,) = programs.compare(attention, small, ["xla"])
    assert row["note"] == ""
    assert attention.expected(small, programs.operands(attention.operand_shapes(small)))[
        "dk"
    ].shape == (1, 30, 1, 8)
    xla = attention.implementations(small)["xla"]
    for at, note in ((66, ""), (67, "failed: error nan of teacher, allowed 1e-05")):

        def faulty(*qkv, at=at):
            teacher, *others = xla(*qkv)
            return teacher.at[1, at].set(jnp.nan), *others

        monkeypatch.setattr(attention, "implementations", lambda case, run=faulty: {"x": run})
        monkeypatch.setattr(launch, "capability", lambda *_: 90)
        (row,) = programs.compare(attention, small, ["x"])
        assert row["note"] == note
        assert check.jobs(options) == []
    monkeypatch.setattr(attention, "implementations", lambda case: {"xla": None})
    assert case.name in {job.case for job in check.jobs(options)}


def test_equal_infinities_do_not_differ():
    x = np.array([-np.inf, 2.0])
    assert programs.relative_error(x, x) == 0
    assert programs.relative_error(x + 1, x) == 0.5
    assert programs.relative_error(np.array([0.0, 2.0]), x) == math.inf
    assert math.isnan(programs.relative_error(np.array([math.nan, 2.0]), x))


def test_each_case_runs_in_a_process_of_its_own(tmp_path, capsys, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setitem(decode.SHAPES, "check", decode.SHAPES["check"][6:8])
    options = ["--op", "decode", "--implementation", "xla", "--output", str(file)]
    hour.main(["--steps", "check", *options])
    rows = json.loads(file.read_text())["rows"]
    assert sorted(row["dtype"] for row in rows) == ["bfloat16", "float16"]
    assert all(row["note"] == "" and row["implementation"] == "xla" for row in rows)
    assert f"all {len(rows)} done" in capsys.readouterr().out


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
    job = Job("check", "decode", "a case", "float16", "triton")
    row = runner.in_process(job, 1 if "sleep" in program else 60, ("-c", program))
    assert row == {**job._asdict(), "note": note}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one process after another


@pytest.fixture
def processes(hopper, monkeypatch):
    """On a GPU with Triton's kernels: the jobs that got a process, and a function that makes the
    row of each (at first one that passes, or of a tile)."""
    seen, rows = [], [lambda job: _tile_row(job) if job.step == "tiles" else {"note": ""}]
    for op in OPS.values():
        monkeypatch.setattr(op, "implementations", lambda case: {"triton": None, "jax.nn": None})

    def in_process(job, seconds):
        seen.append(job)
        return job._asdict() | rows[-1](job)

    monkeypatch.setattr(runner, "in_process", in_process)
    return seen, rows


def test_a_failure_ends_the_command_with_an_error(processes, tmp_path, capsys):
    file, note = tmp_path / "report.json", "failed: error nan, allowed 1e-05"
    arguments = ["--steps", "check", "--output", str(file)]
    processes[1].append(lambda job: {"note": note})
    with pytest.raises(SystemExit, match=r"71 of 71 failed"):
        hour.main(arguments)
    rows = json.loads(file.read_text())["rows"]
    assert [row["note"] for row in rows] == [note] * 71
    assert "VERIFIED" not in capsys.readouterr().out


def test_a_check_of_all_that_auto_may_take_names_the_gpu(processes, capsys, monkeypatch):
    monkeypatch.setattr(verified, "VERIFIED", frozenset({80}))
    line = "verified.py: VERIFIED may have 90, in a commit that brings this report"
    hour.main(["--steps", "check"])
    assert line in capsys.readouterr().out
    hour.main(["--steps", "check", "--op", "decode"])
    assert line not in capsys.readouterr().out


def test_a_command_goes_on_and_tries_again_what_was_lost(processes, tmp_path, capsys):
    file, seen = tmp_path / "report.json", processes[0]
    arguments = ["--steps", "check", "--op", "decode", "--output", str(file)]
    hour.main(arguments)
    report = json.loads(file.read_text())
    first, *others, last = report["rows"]
    last["note"] = "failed: no result after 120 seconds"
    file.write_text(json.dumps(report | {"rows": [*others, last]}))
    done = {*seen}
    seen.clear()
    hour.main(arguments)
    assert [*seen] == [Job(*(row[x] for x in Job._fields)) for row in (first, last)]
    assert f"all {len(done)} done" in capsys.readouterr().out


def test_everything_is_tried_again_where_the_surroundings_change(processes, tmp_path, monkeypatch):
    """Of another device, version, source or variable; what others measured stays in the file."""
    (seen, rows), file = processes, tmp_path / "report.json"
    arguments = ["--steps", "check", "--op", "decode", "--output", str(file)]
    rows.append(lambda job: {"note": "failed: ImportError: no jax_triton"})
    with pytest.raises(SystemExit, match="18 of 18 failed"):
        hour.main(arguments)
    with pytest.raises(SystemExit, match="18 of 18 failed"):
        hour.main(arguments)
    assert len(seen) == 18
    rows.pop()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    hour.main(arguments)
    assert len(seen) == 36
    environment = measure.environment()
    monkeypatch.setattr(measure, "environment", lambda: environment | {"device": "H200"})
    hour.main(arguments)
    monkeypatch.setattr(verified, "source", lambda *_: "another")
    hour.main(arguments)
    report = json.loads(file.read_text())
    assert len(seen) == len(report["rows"]) == 72
    assert {x["device"] for x in report["surroundings"].values()} == {"cpu", "H200"}


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"surroundings": {}, "rows": [{}]}'])
def test_a_damaged_report_is_refused_and_stays(processes, tmp_path, capsys, text):
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match=r"^2$"):
        hour.main(["--output", str(file)])
    assert "is no report of this command" in capsys.readouterr().err
    assert file.read_text() == text


def test_the_half_hour_ends_in_time_and_goes_on(processes, tmp_path, capsys, monkeypatch):
    """Every step in its order; a peer that refuses fails nothing."""
    (seen, rows), file = processes, tmp_path / "report.json"
    arguments = ["--output", str(file), "--minutes"]
    with pytest.raises(SystemExit, match="75"):
        hour.main([*arguments, "0.1"])
    assert seen == []
    monkeypatch.setattr(hour.shutil, "which", lambda name: name)
    rows.append(lambda job: {"note": "failed: too small" if job.implementation == "jax.nn" else ""})
    hour.main([*arguments, "9", "--steps", "check", "memcheck", "step"])
    hour.main([*arguments, "9", "--steps", "check", "memcheck", "times", "step"])
    steps = [step for step, _ in itertools.groupby(seen, lambda job: job.step)]
    assert steps == ["check", "memcheck", "step", "times"]
    assert len(seen) == len({*seen}) == 71 + 3 + 6 + 5
    assert "times: 5 of 5" in capsys.readouterr().out
    hour.main([*arguments, "9", "--steps", "check", "memcheck", "times", "step"])
    assert len(seen) == 85


def test_the_first_process_reads_the_libraries_alone(hopper, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    running, most, warmed = [], [], []

    def warm_up(line, **options):
        assert line[1:2] == ["-c"]
        warmed.append(len(most))

    def in_process(job, seconds):
        running.append(job)
        most.append((job, len(running)))
        runner.time.sleep(0.05)
        running.remove(job)
        return job._asdict() | {"note": ""}

    monkeypatch.setattr(runner, "in_process", in_process)
    store = runner.Store(None, None, 9)
    monkeypatch.setattr(runner.subprocess, "run", warm_up)
    jobs = [Job("check", "", str(i)) for i in range(8)]
    assert len([*store.run(jobs, 9, lambda job: 1 if job.case == "7" else 3)]) == 8
    assert warmed == [0]
    assert [n for job, n in most if job.case == "7"] == [1]
    assert max(n for _, n in most) == 3
    assert [*store.run(jobs, 9, lambda job: 3)] == []
    assert warmed == [0]


def test_a_step_of_a_model_is_one_of_the_benchmark(monkeypatch):
    """Of both models of 760M, by the kernels and by XLA."""
    columns = dict.fromkeys(("gin", "step ms", "tokens/s", "MFU %", "MiB"))
    monkeypatch.setattr(Step, "tables", lambda self: iter([[columns | {"MiB": self.param}]]))
    names = ["triton", "mosaic"]
    first, *others = hour._model_jobs(Namespace(shapes="paper", implementation=names))
    assert [*map(str, first)] == ["step", "", "ipttcd_760m.gin", "", "triton", ""]
    assert len(others) == 5
    attention = "TransformerConfig.attention_implementation='triton'"
    assert hour._model_step(first)["MiB"] == ("RunConfig.batch_size=1", attention)


def test_an_access_out_of_bounds_fails(monkeypatch):
    statuses = [0, 9]

    def run(line, **options):
        assert line[0] == "compute-sanitizer"
        assert line[-6:] == ["check", "decode", "x", "", "triton", ""]
        text = "===== ERROR SUMMARY: 3 errors"
        return SimpleNamespace(returncode=statuses.pop(), stdout=text, stderr="")

    monkeypatch.setattr(hour.subprocess, "run", run)
    for note in ("failed: ===== ERROR SUMMARY: 3 errors", ""):
        assert hour._memcheck(Job("memcheck", "decode", "x", "", "triton")) == {"note": note}


def test_auto_takes_a_kernel_where_it_has_been_checked(monkeypatch, caplog):
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)

    def launches():
        attend = partial(dual_window_attention, teacher_window=16, student_window=8)
        return len(machine_code.launches(lambda q: attend(q, q, q), [q], 90))

    dispatch._log_once.cache_clear()
    monkeypatch.setattr(verified, "VERIFIED", frozenset({80}))
    assert launches() == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    record = caplog.records[1]
    assert "not been checked on a GPU of compute capability 90: name them" in record.getMessage()
    monkeypatch.setattr(verified, "VERIFIED", {90})
    assert launches() == 1
    assert len(caplog.records) == 2  # Mosaic, which is passed over for another kernel, is no news


KERNELS = ["forward", "backward_q", "backward_kv"]
CASE = "64K 8192/4096 H16/8 D128"


@pytest.fixture
def turn(tmp_path, monkeypatch):
    """The file that processes lock while they time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ttcd_kernels_{os.getuid()}.lock"


def _is_locked(file):
    with file.open("a") as other, contextlib.suppress(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    return True


@pytest.mark.parametrize(
    ("op", "case", "kernel", "arrays"),
    [
        ("dual_window", "200, full/1 H2/1 D32, scale -0.1", "forward", 5),
        ("dual_window", "200, full/1 H2/1 D32, scale -0.1", "backward_q", 8),
        ("dual_window", "200, full/1 H2/1 D32, scale -0.1", "backward_kv", 8),
        ("decode", "256/256 H6/2 D32", "decode_attention", 4),
    ],
)
def test_a_kernel_is_timed_alone(op, case, kernel, arrays, hopper, turn, capsys, monkeypatch):
    """Processes compile together, and time in turn."""
    launched, seen = [], []

    def triton_call(*args, name, out_shape, **constants):
        launched.append((name, constants, [x for x in args if hasattr(x, "at")]))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    def seeing(function, *args):
        seen.append(_is_locked(turn))
        return function(*args)

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    for module, name in ((programs, "ready"), (measure, "median_seconds")):
        monkeypatch.setattr(module, name, partial(seeing, getattr(module, name)))
    found = next(x for x in OPS[op].SHAPES["check"] if x.name == case and x.dtype == "bfloat16")
    tile = getattr(tune.table_of(OPS[op], found), kernel)
    hour.main(["--job", "tiles", op, case, "bfloat16", kernel, ",".join(map(str, tile))])
    row = json.loads(capsys.readouterr().out)
    assert (row["note"], row["ms"] > 0) == (tune.TABLE, True)
    ((name, constants, operands),) = launched  # neither the forward nor the other gradient
    assert name.endswith(kernel)
    assert (constants["BLOCK_N"], constants["num_warps"]) == (tile.block_n, tile.num_warps)
    assert len(operands) == arrays
    assert [x.dtype for x in operands].count("int32") == 1  # tiles or positions, not drawn
    assert seen == [False, True]
    assert not _is_locked(turn)


def test_a_tile_that_is_not_timed_says_why(hopper, turn, monkeypatch):
    def triton_call(*args, **options):
        raise RuntimeError("out of resources")

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    job = Job("tiles", "decode", "256/256 H6/2 D32", "bfloat16", "decode_attention", "32,4,2,132")
    assert tune.measured(job) == {"ms": None, "note": "failed: RuntimeError: out of resources"}


def _tile_row(job):
    """The table's tile takes 10 ms, other tiles as many as their warps; one crashes."""
    if job.tile == "32,128,4,2":
        return {"note": "failed: no result (exit status -11): "}
    table = tune.table_of(OPS[job.op], cases.case_of(job))
    is_table = job.tile == ",".join(map(str, getattr(table, job.implementation)))
    ms = 10.0 if is_table else float(job.tile.split(",")[2])
    return {"ms": ms, "note": tune.TABLE if is_table else ""}


def test_a_search_tries_every_tile_names_the_best_and_goes_on_where_it_was(
    processes, tmp_path, capsys
):
    (seen, rows_of), file = processes, tmp_path / "tune.json"
    line = ["--steps", "tiles", "--op", "dual_window", "--case", CASE, "--output", str(file)]
    rows_of.append(lambda job: _tile_row(job) if len(seen) <= 20 else sys.exit("interrupted"))
    with pytest.raises(SystemExit, match="interrupted"):
        hour.main(line)
    rows_of.pop()
    seen.clear()
    before = json.loads(file.read_text())["rows"]
    assert [row["implementation"] for row in before[:6]] == KERNELS * 2
    hour.main(line)
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    rows = report["rows"]
    assert rows[:20] == before
    lost = [row for row in before if row["note"].startswith("failed")]
    assert len(seen) == 52 + len(lost)
    assert len({row["implementation"] + row["tile"] for row in rows}) == len(rows) == 72
    for kernel in KERNELS:
        tiles = {row["tile"] for row in rows if row["implementation"] == kernel}
        assert tiles >= {",".join(map(str, x)) for x in dual_window_tuning.CANDIDATES[kernel]}
        group = [row for row in tune.ranked(rows) if row["kernel"] == kernel]
        assert [(row["time ms"], row["/ table"]) for row in group[:2]] == [(4, 0.4)] * 2
        assert group[-1]["note"] == "failed: no result (exit status -11): "
    assert printed.splitlines()[-4:-1] == tune.advice(report)
    for line, kernel in zip(tune.advice(report), KERNELS, strict=True):
        assert line.startswith(f"dual_window/tuning.py: {kernel} = ")
        assert line.endswith(f"takes 0.40 of the table's time for {CASE}")


def test_no_more_processes_than_fit_in_device_memory(monkeypatch):
    """64K tokens, 16 heads on 8 kv heads of 128, bfloat16, 1 GiB and log-sum-exps; of four rows 4;
    of 2^31 elements 14.6."""
    monkeypatch.setattr(measure, "usable_bytes", lambda: 75 << 30)
    big = next(case.name for case in SHAPES["check"] if case.num_compared)
    for case, count in ((CASE, 18), (f"4 x {CASE}", 4), ("1M 8192/4096 H16/8 D128", 1), (big, 1)):
        assert cases.at_once(Job("times", "dual_window", case, "bfloat16")) == count


def test_a_table_serves_every_head_dim_and_older_and_newer_gpus():
    for tuning in (dual_window_tuning, decode_tuning):
        assert {dim for _, dim in tuning.TABLE} == set(tuning.HEAD_DIMS)
    # GPU, its rows in the tables of dual-window attention and of decoding
    for gpu, dual, decode_row in (
        *((86, 80, 80), (89, 80, 80), (90, 90, 90)),
        *((100, 100, 90), (120, 80, 90)),
    ):
        for dim in dual_window_tuning.HEAD_DIMS:
            narrow, wide = (dual_window_tuning.tuning_for(gpu, dim, size) for size in (2, 4))
            assert narrow == dual_window_tuning.TABLE[dual, dim]
            assert wide == dual_window_tuning.FLOAT32[80, dim]
            narrow, wide = (decode_tuning.tuning_for(gpu, dim, size)[0] for size in (2, 4))
            assert narrow == decode_tuning.TABLE[decode_row, dim]
            assert wide.block_n == narrow.block_n // 2


def test_the_records_of_a_report_have_what_the_tables_show():
    def row(job, **more):
        return job._asdict() | {"note": "", "surroundings": "a"} | more

    check = Job("check", "decode", "x", "float32", "xla")
    times, step = check._replace(step="times"), Job("step", "", "x.gin", "", "mosaic")
    lost = "failed: no result after 120 seconds"
    rows = [row(check, note=lost), row(check._replace(case="y"), note=lost)]
    rows += [row(check, **{"max rel. error": e}) for e in (0.5, 0.25)]
    rows += [row(check._replace(case="z"), **{"max rel. error": 0.5})]
    rows += [row(times, **{"forward time ms": 2.0, "forward % of floor": 50.0}), row(step, MiB=3)]
    facts = {"device": "H100", "commit": "c", "jax": "1", "triton": "2"}
    head, *found = records.rows_of({"rows": rows, "surroundings": {"a": facts, "b": {}}})
    assert head["command"] == "python -m experiments.kernels --steps check times step"
    assert (head["device"], head["on"]) == ("H100", "jax 1, triton 2")
    assert found == [
        {"row": "check: decode, xla", "passed": "2 of 3", "float32": 0.5},
        {"row": "times: decode, xla", "x forward": 2.0},
        {"row": "step: x.gin, mosaic", "MiB": 3},
    ]


def test_a_profile_has_the_kernels_of_a_gpu_by_time():
    """Of a GPU its streams alone; without one what belongs to the program."""

    def named(kind, pid, tid, name):
        return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}

    def event(kernel, pid, tid, dur, **args):
        return {"ph": "X", "name": kernel, "pid": pid, "tid": tid, "dur": dur, "args": args}

    host = [named("process", 1, 0, "/host:CPU"), named("thread", 1, 7, "python")]
    gpu = [named("process", 2, 0, "/device:GPU:0"), named("thread", 2, 7, "Stream #13(Compute)")]
    gpu += [named("thread", 2, 8, "XLA Ops")]
    events = [event("gemm", 2, 7, 3000, name="mlp/dot"), event("gemm", 2, 7, 1000, name="mlp/dot")]
    events += [event("copy", 2, 7, 2000), event("fusion", 2, 8, 6000), event("call", 1, 7, 9000)]
    found = profile.by_time([*host, *gpu, *events], 2)
    assert found == [("all", "", 3.0), ("gemm", "mlp/dot", 2.0), ("copy", "", 1.0)]
    found = profile.by_time([*host, event("dot.1", 1, 7, 500, hlo_op="dot.1"), *events], 1)
    assert found == [("all", "", 0.5), ("dot.1", "dot.1", 0.5)]


def test_a_program_that_ran_has_a_profile():
    product = jax.jit(lambda x: x @ x)
    x = product(jnp.ones((256, 256)))
    (_, _, ms), *rows = profile.kernels(lambda: product(x))
    assert ms > 0
    assert ms == pytest.approx(sum(row[2] for row in rows))
