"""The tools of kernels without a GPU: `bench` at tiny shapes; `check` and `tune` with processes and
launches that stand in for real ones, real machine code; what "auto" makes of a check; tables."""

import fcntl
import itertools
import json
import logging
import math
import os
import re
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttcd_kernels import bench, cases, check, dispatch, launch, measure, tune, verified
from ttcd_kernels.cases import OPS
from ttcd_kernels.decode import bench as decode
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import bench as dual_window
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.dual_window.api import dual_window_attention
from ttcd_kernels.dual_window.bench import SHAPES, Case
from ttcd_kernels.table import format_table, write_json

from tests.machine_code import __main__ as machine_code

TINY = ["--op", "dual_window", "--shapes", "tiny"]
ODD = Case("40, 13/6 H2/1 D8", 40, 2, 1, 8, 13, 6, dtype="float32")
OURS = ("xla", "xla two calls")
NOTES = {
    "peer": "failed: NotImplementedError: head dim 8 is too small",
    "sign": r"failed: error \d.*, allowed 1e-05",
    "row": "failed: error nan, allowed 1e-05",
    "noise": "failed: two runs differ",
}


@pytest.fixture
def wrong(monkeypatch):
    """One shape to time, two to compare; in float32, beside XLA's programs, a peer that refuses the
    shape, and XLA's attention with a fault: the sign of one gradient, a row that is not a number,
    other bits in every run."""
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"][:1])
    monkeypatch.setitem(SHAPES, "parity", (ODD, ODD._replace(dtype="bfloat16")))
    implementations, noise = dual_window.implementations, itertools.cycle((0.0, 1e-6))

    def refuses(*operands):
        raise NotImplementedError("head dim 8 is too small\nfor this peer")

    def noisy(teacher, student):
        return teacher + jax.pure_callback(lambda: np.float32(next(noise)), jnp.float32(0)), student

    faults = {
        "sign": lambda teacher, student: (teacher, 2 * jax.lax.stop_gradient(student) - student),
        "row": lambda teacher, student: (teacher.at[0, 7].set(jnp.nan), student),
        "noise": noisy,
    }

    def with_faults(case):
        found = {"peer": refuses, **implementations(case)}
        for name, fault in faults.items():
            found[name] = lambda *qkv, fault=fault: fault(*found["xla"](*qkv))
        return found if case.dtype == "float32" else implementations(case)

    monkeypatch.setattr(dual_window, "implementations", with_faults)
    monkeypatch.setattr(dual_window, "PEERS", ("peer",))


def test_the_report_names_machine_shapes_and_every_measurement(wrong, tmp_path, capsys):
    """A peer may refuse; a kernel of ours that is wrong fails the command, after all is measured
    and written."""
    file, notes = tmp_path / "report.json", dict.fromkeys(OURS, "") | NOTES
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
    monkeypatch.setattr(dual_window, "PEERS", ())
    for names, message in (
        (["peer", "xla"], "failed: peer; the notes above say why"),
        (["triton", "mosaic"], "nothing to time: no implementation triton, mosaic here"),
    ):
        with pytest.raises(SystemExit, match=message):
            bench.main([*arguments, *names])


def test_what_does_not_fit_is_compiled_only_and_says_so(monkeypatch):
    monkeypatch.setattr(measure, "usable_bytes", lambda: 1000)
    ceilings = measure.Ceilings(1e9, 1e9)
    rows = bench.measured(dual_window, SHAPES["tiny"][0], ceilings)
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


@pytest.mark.parametrize("command", [bench, check, tune])
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
    ("command", "arguments", "words"),
    [
        (bench, ["--op", "none"], "--op"),
        (bench, ["--shapes", "huge"], "--shapes"),
        (bench, ["--output", "/no/x"], "--output: no folder /no"),
        (bench, ["--json", "/no/x"], "--json is called --output here"),
        (bench, ["--case", "x"], "--case: no 'x' in tiny; it has 64 tokens, 16/8, 48"),
        (check, [], "nothing to check: there is no NVIDIA GPU"),
        (check, ["--implementation", "cudnn"], "no op has an implementation cudnn here"),
        (tune, [], "nothing to tune: there is no NVIDIA GPU"),
    ],
)
def test_what_cannot_be_done_is_refused(command, arguments, words, capsys):
    if not arguments and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit) as leaving:
        command.main(arguments)
    assert words in f"{leaving.value} {capsys.readouterr().err}"
    assert (leaving.value.code == 2) == (command is bench)


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


def test_every_kernel_is_checked_in_every_dtype_and_with_documents():
    for op in OPS.values():
        found = op.SHAPES["check"]
        assert {case.dtype for case in found} == {*launch.DTYPES}
        assert {case.head_dim for case in found} == {32, 64, 80, 96, 128}
    assert {case.has_documents for case in OPS["dual_window"].SHAPES["check"]} == {False, True}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder that remembers what has been checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ttcd_kernels"


def test_each_case_runs_in_a_process_of_its_own(tmp_path, cache, capsys, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setitem(decode.SHAPES, "check", decode.SHAPES["check"][6:8])
    check.main(["--op", "decode", "--implementation", "xla", "--output", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert sorted(row["dtype"] for row in rows) == ["bfloat16", "float16"]
    assert all(row["note"] == "" and row["implementation"] == "xla" for row in rows)
    assert f"all {len(rows)} passed" in capsys.readouterr().out
    assert not cache.exists()  # XLA's attention says nothing about the kernels


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
    job = check.Job("decode", "triton", "float16", "a case")
    row = cases.in_process(("-c", program), job, 1 if "sleep" in program else 60)
    assert row == {**job._asdict(), "note": note}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one process after another


@pytest.fixture
def processes(hopper, monkeypatch):
    """On a GPU: the jobs that got a process, and a function that makes the row of each (at first
    that of a check that passes, or of a tile)."""
    seen, rows = [], [lambda job: job._asdict() | {"note": ""} if len(job) == 4 else _tile_row(job)]

    def in_process(program, job, seconds):
        seen.append(job)
        return rows[-1](job)

    monkeypatch.setattr(cases, "in_process", in_process)
    return seen, rows


@pytest.fixture
def checks(processes, cache, monkeypatch):
    for op in OPS.values():
        monkeypatch.setattr(op, "implementations", lambda case: {"triton": None})
    return processes


def test_a_failure_ends_the_command_with_an_error(checks, cache, tmp_path):
    """A check of all kernels that passes is remembered, and only that."""
    file, note = tmp_path / "report.json", "failed: error nan, allowed 1e-05"
    checks[1].append(lambda job: job._asdict() | {"note": note})
    with pytest.raises(SystemExit, match=r"54 of 54 failed"):
        check.main(["--output", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["note"] for row in rows] == [note] * 54
    checks[1].pop()
    for part in (["--op", "decode"], ["--implementation", "triton"]):  # of the kernels only
        check.main(part)
    assert not cache.exists()
    check.main([])
    assert [*cache.iterdir()] == [verified.record(90)]


def test_a_check_goes_on_and_tries_again_what_was_lost(checks, tmp_path, capsys):
    file, seen = tmp_path / "report.json", checks[0]
    arguments = ["--op", "decode", "--output", str(file)]
    check.main(arguments)
    report = json.loads(file.read_text())
    first, *others, last = report["rows"]
    last["note"] = "failed: no result after 120 seconds"
    file.write_text(json.dumps(report | {"rows": [*others, last]}))
    done = {*seen}
    seen.clear()
    check.main(arguments)
    assert {*seen} == {check.Job(*(row[x] for x in check.Job._fields)) for row in (first, last)}
    assert f"all {len(done)} passed" in capsys.readouterr().out


def test_what_has_been_seen_right_may_be_listed():
    """Only after all that "auto" may take, by the kernels that it takes."""
    rows = [
        {"op": op, "implementation": name, "dtype": case.dtype, "case": case.name, "note": ""}
        for op in OPS
        for case in OPS[op].SHAPES["check"]
        for name in ("triton", "mosaic")
    ]
    (line,) = check.advice(90, rows)
    assert line.startswith("verified.py: VERIFIED may have 90")
    assert check.advice(90, rows[2:]) == []
    rows[1]["note"] = "failed: mosaic is not automatic"
    assert check.advice(90, rows) == [line]
    rows[0]["note"] = "failed: two runs differ"
    assert check.advice(90, rows) == []


def test_auto_takes_a_kernel_where_it_has_been_checked(monkeypatch, caplog, cache):
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)

    def launches():
        attend = partial(dual_window_attention, teacher_window=16, student_window=8)
        return len(machine_code.launches(lambda q: attend(q, q, q), [q], 90))

    dispatch._log_once.cache_clear()
    monkeypatch.setattr(verified, "VERIFIED", frozenset())
    assert launches() == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "compute capability 90; run python -m ttcd_kernels.check once" in record.getMessage()
    cache.mkdir(parents=True)
    verified.record(80).touch()
    assert launches() == 0
    verified.record(90).touch()
    assert launches() == 1
    with monkeypatch.context() as patch:  # of other sources nobody knows
        patch.setattr(verified, "source", lambda: "before")
        assert launches() == 0
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert launches() == 0  # other machines may not have checked
    monkeypatch.setattr(verified, "VERIFIED", {90})
    assert launches() == 1


KERNELS = ["forward", "backward_q", "backward_kv"]
CASE = "64K 8192/4096 H16/8 D128"


@pytest.fixture
def turn(tmp_path):
    file = tmp_path / "turn"
    file.touch()
    return str(file)


def _may_lock(file, kind):
    with open(file) as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize(
    ("op", "case", "kernel", "arrays"),
    [
        ("dual_window", "200, full/1 H2/1 D32", "forward", 5),
        ("dual_window", "200, full/1 H2/1 D32", "backward_q", 8),
        ("dual_window", "200, full/1 H2/1 D32", "backward_kv", 8),
        ("decode", "256/256 H6/2 D32", "decode_attention", 4),
    ],
)
def test_a_kernel_is_timed_alone(op, case, kernel, arrays, hopper, turn, capsys, monkeypatch):
    """Processes compile together, and time while no other compiles."""
    launched, seen = [], []

    def triton_call(*args, name, out_shape, **constants):
        launched.append((name, constants, [x for x in args if hasattr(x, "at")]))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    def seeing(function, *args):
        seen.append([_may_lock(turn, kind) for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX)])
        return function(*args)

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    for name in ("ready", "median_seconds"):
        monkeypatch.setattr(measure, name, partial(seeing, getattr(measure, name)))
    (found,) = (x for x in OPS[op].SHAPES["parity"] if x.name == case)
    tile = getattr(tune.table_of(OPS[op], found), kernel)
    tune.main(["--turn", turn, "--job", op, "parity", case, kernel, ",".join(map(str, tile))])
    row = json.loads(capsys.readouterr().out)
    assert (row["note"], row["ms"] > 0) == (tune.TABLE, True)
    ((name, constants, operands),) = launched  # neither the forward nor the other gradient
    assert name.endswith(kernel)
    assert (constants["BLOCK_N"], constants["num_warps"]) == (tile.block_n, tile.num_warps)
    assert len(operands) == arrays
    assert [x.dtype for x in operands].count("int32") == 1  # tiles or positions, not drawn
    assert seen == [[True, False], [False, False]]
    assert _may_lock(turn, fcntl.LOCK_EX)


def test_a_tile_that_is_not_timed_says_why(hopper, turn, monkeypatch):
    def triton_call(*args, **options):
        raise RuntimeError("out of resources")

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    case = "256/256 H6/2 D32"
    row = tune.measured(tune.Job("decode", "parity", case, "decode_attention", "32,4,2,132"), turn)
    assert (row["note"], row["ms"]) == ("failed: RuntimeError: out of resources", None)


def _tile_row(job):
    """The table's tile takes 10 ms, other tiles as many as their warps; one crashes."""
    if job.tile == "32,128,4,2":
        return job._asdict() | {"note": "failed: no result (exit status -11): "}
    table = tune.table_of(OPS[job.op], OPS[job.op].SHAPES["paper"][0])
    is_table = job.tile == ",".join(map(str, getattr(table, job.kernel)))
    ms = 10.0 if is_table else float(job.tile.split(",")[2])
    return job._asdict() | {"ms": ms, "note": tune.TABLE if is_table else ""}


def test_a_search_tries_every_tile_names_the_best_and_goes_on_where_it_was(
    processes, tmp_path, capsys
):
    (seen, rows_of), file = processes, tmp_path / "tune.json"
    arguments = ["--case", CASE, "--output", str(file)]
    rows_of.append(lambda job: _tile_row(job) if len(seen) <= 20 else sys.exit("interrupted"))
    with pytest.raises(SystemExit, match="interrupted"):
        tune.main(arguments)
    rows_of.pop()
    seen.clear()
    before = json.loads(file.read_text())["rows"]
    assert [row["kernel"] for row in before[:6]] == KERNELS * 2
    tune.main(arguments)
    printed = capsys.readouterr().out
    assert "52 tiles to try, 20 tried before" in printed
    report = json.loads(file.read_text())
    rows = report["rows"]
    assert rows[:20] == before
    assert len(seen) == 52
    assert len({row["kernel"] + row["tile"] for row in rows}) == len(rows) == 72
    for kernel in KERNELS:
        tiles = {row["tile"] for row in rows if row["kernel"] == kernel}
        assert tiles >= {",".join(map(str, x)) for x in dual_window_tuning.CANDIDATES[kernel]}
        group = [row for row in tune.ranked(rows) if row["kernel"] == kernel]
        assert [(row["time ms"], row["/ table"]) for row in group[:2]] == [(4, 0.4)] * 2
        assert group[-1]["note"] == "failed: no result (exit status -11): "
    assert printed.splitlines()[-3:] == tune.advice(report)
    for line, kernel in zip(tune.advice(report), KERNELS, strict=True):
        assert line.startswith(f"dual_window/tuning.py: {kernel} = ")
        assert line.endswith(f"takes 0.40 of the table's time for {CASE}")
    tune.main(arguments)
    assert len(seen) == 52  # no tile twice, the one that crashed neither
    assert json.loads(file.read_text())["rows"] == rows


def test_results_of_another_machine_or_source_are_not_mixed(processes, tmp_path, capsys):
    seen, file = processes[0], tmp_path / "tune.json"
    arguments = ["--case", CASE, "--output", str(file)]
    tune.main(arguments)
    report = json.loads(file.read_text())
    h200 = report["environment"] | {"device": "H200"}
    for text, message in [
        (json.dumps(report | {"source": "before"}), "is of another machine, version or source"),
        (json.dumps(report | {"environment": h200}), "is of another machine, version or source"),
        ("{", "is no report of this command"),
        ("[]", "is no report of this command"),
        ('{"rows": []}', "is no report of this command (KeyError('environment'))"),
    ]:
        file.write_text(text)
        with pytest.raises(SystemExit, match=r"^2$"):
            tune.main(arguments)
        assert message in capsys.readouterr().err
        assert file.read_text() == text
    report["environment"]["clocks"] = "others: they change"
    file.write_text(json.dumps(report))
    tune.main(arguments)
    assert len(seen) == 72


def test_no_more_processes_than_fit_in_device_memory(monkeypatch):
    """64K tokens, 16 heads on 8 kv heads of 128, bfloat16: 1 GiB of operands; of four rows 4."""
    parser = cases.parser_of("tune", "", ["dual_window"], "paper")
    monkeypatch.setattr(measure, "usable_bytes", lambda: 20 << 30)
    for case, processes in ((CASE, 10), (f"4 x {CASE}", 2), ("1M 8192/4096 H16/8 D128", 1)):
        assert tune._at_once(cases.parsed(parser, ["--case", case])) == processes


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
