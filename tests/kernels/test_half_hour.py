"""A GPU's first half hour (experiments/studies/kernels): jobs in processes, what is done again,
tiles, records and profiles."""

import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from ttcd_kernels import launch, measure, verified
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import tuning as dual_window_tuning

from experiments.studies.bench.cases import Step
from experiments.studies.kernels import __main__ as hour
from experiments.studies.kernels import (
    cases,
    machine_code,
    profile,
    programs,
    records,
    runner,
    tune,
)
from experiments.studies.kernels import decoding as decode
from experiments.studies.kernels.attention import SHAPES
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.runner import Job


def test_each_case_runs_in_a_process_of_its_own(tmp_path, capsys, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setitem(decode.SHAPES, "check", decode.SHAPES["check"][6:7])
    options = ["--op", "decode", "--implementation", "xla", "--output", str(file)]
    hour.main(["--steps", "check", *options])
    rows = json.loads(file.read_text())["rows"]
    assert [(x["dtype"], x["note"], x["implementation"]) for x in rows] == [("bfloat16", "", "xla")]
    assert "all 1 done" in capsys.readouterr().out


def test_options_of_earlier_scripts_are_accepted(tmp_path):
    """Those with which a machine's first commands were prepared: errors are the step `check`."""
    file, case = tmp_path / "times.json", SHAPES["tiny"][0].name
    command = [sys.executable, "-m", "ttcd_kernels.bench", "--times_only", "--json", str(file)]
    options = ["--op", "dual_window", "--shapes", "tiny", "--case", case, "--implementation", "xla"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["step"], row["note"]) == ("times", "")


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


def test_a_check_of_all_that_auto_may_take_names_the_gpu(processes, capsys, monkeypatch):
    monkeypatch.setattr(verified, "VERIFIED", frozenset({80}))
    line = "verified.py: VERIFIED may have 90, in a commit that brings this report"
    hour.main(["--steps", "check"])
    assert line in capsys.readouterr().out
    hour.main(["--steps", "check", "--op", "decode"])
    processes[1].append(lambda job: {"note": "failed: " * (job.op == "decode")})
    with pytest.raises(SystemExit, match="20 of 76 failed"):
        hour.main(["--steps", "check"])
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
    """Of another device, version, source or variable, but no failure; what others measured stays in
    the file."""
    (seen, rows), file = processes, tmp_path / "report.json"
    arguments = ["--steps", "check", "--op", "decode", "--output", str(file)]
    note = "failed: error nan, allowed 1e-05"
    rows.append(lambda job: {"note": note})
    for _ in range(2):
        with pytest.raises(SystemExit, match="20 of 20 failed"):
            hour.main(arguments)
    assert [row["note"] for row in json.loads(file.read_text())["rows"]] == [note] * 20
    assert len(seen) == 20
    rows.pop()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    hour.main(arguments)
    assert len(seen) == 40
    environment = measure.environment()
    monkeypatch.setattr(measure, "environment", lambda: environment | {"device": "H200"})
    hour.main(arguments)
    monkeypatch.setattr(verified, "source", lambda *_: "another")
    hour.main(arguments)
    report = json.loads(file.read_text())
    assert len(seen) == len(report["rows"]) == 80
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
    assert len(seen) == len({*seen}) == 76 + 3 + 6 + 8
    assert "times: 8 of 8" in capsys.readouterr().out
    hour.main([*arguments, "9", "--steps", "check", "memcheck", "times", "step"])
    assert len(seen) == 93


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
        ("decode", "256/256 H6/2 D32", "decode_attention", 4),  # compiled to machine code
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
    if op != "decode":
        kernels = [SimpleNamespace(registers=99, spill_bytes=0)]
        monkeypatch.setattr(machine_code, "compiled", lambda *_: kernels)
    for module, name in ((programs, "ready"), (measure, "median_seconds")):
        monkeypatch.setattr(module, name, partial(seeing, getattr(module, name)))
    found = next(x for x in OPS[op].SHAPES["check"] if x.name == case and x.dtype == "bfloat16")
    tile = getattr(tune.table_of(OPS[op], found), kernel)
    hour.main(["--job", "tiles", op, case, "bfloat16", kernel, ",".join(map(str, tile))])
    row = json.loads(capsys.readouterr().out)
    assert (row["note"], row["ms"] > 0) == (tune.TABLE, True)
    assert 32 <= row["registers"] <= 255
    assert row["spill_bytes"] == 0
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
    nothing = {"ms": None, "registers": None, "spill_bytes": None}
    assert tune.measured(job) == nothing | {"note": "failed: RuntimeError: out of resources"}


def _tile_row(job):
    """The table's tile takes 10 ms, other tiles as many as their warps; one crashes."""
    if job.tile == "32,128,4,2":
        return {"note": "failed: no result (exit status -11): "}
    table = tune.table_of(OPS[job.op], cases.case_of(job))
    is_table = job.tile == ",".join(map(str, getattr(table, job.implementation)))
    ms = 10.0 if is_table else float(job.tile.split(",")[2])
    return {"ms": ms, "registers": 99, "spill_bytes": 4, "note": tune.TABLE if is_table else ""}


def test_a_search_tries_every_tile_and_names_the_best(processes, tmp_path, capsys):
    file = tmp_path / "tune.json"
    hour.main(["--steps", "tiles", "--op", "dual_window", "--case", CASE, "--output", str(file)])
    printed, report = capsys.readouterr().out, json.loads(file.read_text())
    rows = report["rows"]
    assert [row["implementation"] for row in rows[:6]] == KERNELS * 2
    assert len({row["implementation"] + row["tile"] for row in rows}) == len(rows) == 72
    for kernel in KERNELS:
        tiles = {row["tile"] for row in rows if row["implementation"] == kernel}
        assert tiles >= {",".join(map(str, x)) for x in dual_window_tuning.CANDIDATES[kernel]}
        group = [row for row in tune.ranked(rows) if row["kernel"] == kernel]
        found = [[*row.values()][4:8] for row in group[:2]]
        assert found == [[4, 0.4, 99, 4]] * 2  # ms, over the table's, registers, spills
        assert group[-1]["note"] == "failed: no result (exit status -11): "
    assert printed.splitlines()[-4:-1] == tune.advice(report)
    for line, kernel in zip(tune.advice(report), sorted(KERNELS), strict=True):
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
    surroundings = {"old": {"jax": 0, "triton": 0}, "a": {"jax": 1, "triton": 2}}
    report = {"environment": {"device": "H100"}, "surroundings": surroundings}
    head, *found = records.rows_of(report | {"rows": rows})
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
