"""The search for tiles, without a GPU: processes and launches that stand in for real ones, real
machine code."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import commands
import jax
import jax.numpy as jnp
import pytest
from devices import launched_kernels
from ttcd_kernels import cases, launch, machine_code, measure, tune
from ttcd_kernels.cases import OPS
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.tune import Job

KERNELS = {
    "dual_window": ["forward", "backward_q", "backward_kv"],
    "decode": ["decode_attention"],
}
CASE = "64K 8192/4096 H16/8 D128"
NO_ROOM = "not timed: 264192 bytes of shared memory, more than 232448"
REFUSED = "failed: RuntimeError: out of resources"


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one process after another


@pytest.fixture
def launched(hopper, monkeypatch):
    """The launches that would be timed: kernel, constants, operands; each gives zeros."""
    found = []

    def triton_call(*args, name, out_shape, **constants):
        found.append((name, constants, [x for x in args if hasattr(x, "at")]))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    return found


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
        ("dual_window", "200, full/1 H2/1 D32", "backward_kv", 8),
        ("decode", "256/256 H6/2 D32", "decode_attention", 4),
    ],
)
def test_a_kernel_is_timed_alone(op, case, kernel, arrays, launched, turn, capsys, monkeypatch):
    """Processes compile together, and time while no other compiles."""
    seen = []

    def seeing(function, *args):
        seen.append([_may_lock(turn, kind) for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX)])
        return function(*args)

    steps = (machine_code, "compile_launch"), (measure, "ready"), (measure, "median_seconds")
    for module, name in steps:
        monkeypatch.setattr(module, name, partial(seeing, getattr(module, name)))
    (found,) = (x for x in OPS[op].SHAPES["parity"] if x.name == case)
    tile = getattr(tune.table_of(OPS[op], found), kernel)
    tune.main(["--turn", turn, "--job", op, "parity", case, kernel, ",".join(map(str, tile))])
    row = json.loads(capsys.readouterr().out)
    assert row["ms"] > 0
    assert row["note"] == tune.TABLE
    assert row["registers"] > 0
    (name, constants, operands), *others = launched
    assert others == []  # neither the forward nor the other gradient
    assert name.endswith(kernel)
    assert (constants["BLOCK_N"], constants["num_warps"]) == (tile.block_n, tile.num_warps)
    assert len(operands) == arrays
    (given,) = (x for x in operands if not isinstance(x, jax.core.Tracer))
    assert given.dtype == "int32"
    assert given.any()  # zeros would visit no tile, and hide all keys but one
    if op == "decode":
        assert given.tolist() == found.positions.tolist()
    assert seen == [[True, False], [True, False], [False, False]]
    assert _may_lock(turn, fcntl.LOCK_EX)


@pytest.mark.parametrize("op", KERNELS)
def test_a_recorded_launch_is_lowered_as_the_first_was(op):
    case = OPS[op].SHAPES["paper"][0]
    with launch.compiling_for(90):
        table = tune.table_of(OPS[op], case)
    *_, make = measure.directions(OPS[op], case).values()
    whole, shapes = make(OPS[op].with_tuning(case, table)), OPS[op].operand_shapes(case)
    for launched in machine_code.launches(whole, shapes, 90)[: len(KERNELS[op])]:
        function, floats = machine_code.alone(launched, OPS[op].integers(case, launched))
        assert launched_kernels(function, *floats, capability=90) == [launched.kernel.__name__]


@pytest.mark.parametrize(
    ("op", "case", "kernel", "tile", "note"),
    [
        ("dual_window", "257, 130/129 H2/2 D128", "backward_kv", "128,128,4,3", NO_ROOM),
        ("dual_window", "257, 130/129 H2/2 D128", "forward", "32,32,1,2", "not timed: spills "),
        ("decode", "256/256 H6/2 D32", "decode_attention", "32,4,2,132", REFUSED),
    ],
)
def test_a_tile_that_is_not_timed_says_why(op, case, kernel, tile, note, hopper, turn, monkeypatch):
    def triton_call(*args, **options):
        raise RuntimeError("out of resources")

    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=triton_call))
    row = tune.measured(Job(op, "parity", case, kernel, tile), turn)
    assert row["note"].startswith(note)
    assert row["ms"] is None


def _row(job):
    """The table's tile takes 10 ms, other tiles as many as their warps; one crashes."""
    if job.tile == "32,128,4,2":
        return job._asdict() | {"note": "failed: no result (exit status -11): "}
    table = tune.table_of(OPS[job.op], OPS[job.op].SHAPES["paper"][0])
    is_table = job.tile == ",".join(map(str, getattr(table, job.kernel)))
    ms = 10.0 if is_table else float(job.tile.split(",")[2])
    return job._asdict() | {"ms": ms, "note": tune.TABLE if is_table else ""}


@pytest.fixture
def processes(hopper, monkeypatch, tmp_path):
    """The jobs that got a process, the report, and a search that writes it."""
    seen, file = [], tmp_path / "tune.json"

    def in_process(program, job, seconds):
        assert program[:3] == (*tune.PROGRAM, "--turn")
        seen.append(job)
        return _row(job)

    monkeypatch.setattr(cases, "in_process", in_process)
    return seen, file, lambda: tune.main(["--case", CASE, "--json", str(file)])


def test_every_tile_of_every_kernel_is_tried_and_the_best_named(processes, capsys):
    seen, file, search = processes
    search()
    assert [job.kernel for job in seen[:6]] == KERNELS["dual_window"] * 2
    for kernel in KERNELS["dual_window"]:
        tiles = {job.tile for job in seen if job.kernel == kernel}
        assert tiles >= {",".join(map(str, x)) for x in dual_window_tuning.CANDIDATES[kernel]}
    assert len(seen) == len({*seen}) == 72
    report = json.loads(file.read_text())
    assert len(report["rows"]) == len(seen)
    rows = tune.ranked(report["rows"])
    for kernel in KERNELS["dual_window"]:
        group = [row for row in rows if row["kernel"] == kernel]
        assert [(row["time ms"], row["/ table"]) for row in group[:2]] == [(4, 0.4)] * 2
        assert group[-1]["note"] == "failed: no result (exit status -11): "
    assert rows[0]["kernel"] == "forward"
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split(" = ")[0] for line in lines] == [
        f"dual_window/tuning.py: {kernel}" for kernel in KERNELS["dual_window"]
    ]
    assert lines[0].endswith(f"takes 0.40 of the table's time for {CASE}")


# A search whose process is killed after 20 tiles.
KILLED = """
import os, sys
import test_tune
from ttcd_kernels import cases, launch, tune
add = cases.Store.add
def add_and_die(store, row):
    add(store, row)
    len(store) < 20 or os.kill(os.getpid(), 9)
cases.Store.add, cases.in_process = add_and_die, lambda program, job, _: test_tune._row(job)
launch.unavailable, launch.capability, os.cpu_count = lambda *_: None, lambda *_: 90, lambda: 1
tune.main(sys.argv[1:])
"""


def test_a_search_that_is_killed_goes_on_where_it_was(processes, capsys):
    seen, file, search = processes
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", KILLED, "--case", CASE, "--json", str(file)]
    killed = subprocess.run(command, env=commands.cpu_environment(PYTHONPATH=paths), check=False)
    assert killed.returncode == -signal.SIGKILL
    before = json.loads(file.read_text())["rows"]
    search()
    assert "52 tiles to try, 20 tried before" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert rows[:20] == before
    assert len(seen) == 52
    assert len({row["kernel"] + row["tile"] for row in rows}) == 72
    search()
    assert len(seen) == 52  # no tile twice, the one that crashed neither
    assert json.loads(file.read_text())["rows"] == rows


def test_results_of_another_machine_or_source_are_not_mixed(processes, capsys):
    seen, file, search = processes
    search()
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
            search()
        assert message in capsys.readouterr().err
        assert file.read_text() == text
    report["environment"]["clocks"] = "others: they change"
    file.write_text(json.dumps(report))
    search()
    assert len(seen) == 72


def test_no_more_processes_than_fit_in_device_memory(monkeypatch):
    """64K tokens, 16 heads on 8 kv heads of 128, bfloat16: 1 GiB of operands; of four rows 4."""
    parser = cases.parser_of("tune", "", ["dual_window"], "paper")
    monkeypatch.setattr(measure, "usable_bytes", lambda: 20 << 30)
    for case, processes in ((CASE, 10), (f"4 x {CASE}", 2), ("1M 8192/4096 H16/8 D128", 1)):
        assert tune._at_once(cases.parsed(parser, ["--case", case])) == processes


def test_without_a_gpu_there_is_nothing_to_tune():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="nothing to tune: there is no NVIDIA GPU"):
        tune.main([])


def test_a_table_serves_every_head_dim_and_older_and_newer_gpus():
    for tuning in (dual_window_tuning, decode_tuning):
        assert {dim for _, dim in tuning.TABLE} == set(tuning.HEAD_DIMS)
    # GPU, its rows in the tables of dual-window attention and of decoding
    for gpu, dual, decode in (
        (86, 80, 80),
        (89, 80, 80),
        (90, 90, 90),
        (100, 80, 90),
        (120, 80, 90),
    ):
        for dim in dual_window_tuning.HEAD_DIMS:
            narrow, wide = (dual_window_tuning.tuning_for(gpu, dim, size) for size in (2, 4))
            assert narrow == dual_window_tuning.TABLE[dual, dim]
            assert wide == dual_window_tuning.FLOAT32[80, dim]
            narrow, wide = (decode_tuning.tuning_for(gpu, dim, size)[0] for size in (2, 4))
            assert narrow == decode_tuning.TABLE[decode, dim]
            assert wide.block_n == narrow.block_n // 2
