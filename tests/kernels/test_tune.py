"""The search for tiles, without a GPU: processes and launches that stand in for real ones, real
machine code."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import commands
import jax
import jax.numpy as jnp
import pytest
from devices import launched_kernels
from ttcd_kernels import bench, cases, launch, machine_code, measure, tune
from ttcd_kernels.bench import OPS
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.dual_window.tuning import Tile
from ttcd_kernels.tune import Job

KERNELS = {
    "dual_window": ["forward", "backward_q", "backward_kv"],
    "decode": ["decode_attention"],
}
CASE = "64K 8192/4096 H16/8 D128"
ARGUMENTS = ["--case", CASE, "--json"]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch, "unavailable", lambda *_: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one process after another


@pytest.fixture
def launched(hopper, monkeypatch):
    """The launches that would be timed: kernel, constants, warps, operands; each gives zeros."""
    found, real = [], launch.launch

    def stand_in(kernel, *args, out_shape, num_warps, num_stages, **constants):
        options = {"num_warps": num_warps, "num_stages": num_stages, "out_shape": out_shape}
        if launch._RECORD.get(None) is not None:
            return real(kernel, *args, **options, **constants)
        kernel.signature.bind(
            *args, *out_shape, **{k: constants[k] for k in constants if k != "grid"}
        )
        arrays = [x for x in args if isinstance(x, jax.Array)]
        found.append((kernel.__name__, constants, num_warps, arrays))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    monkeypatch.setattr(launch, "launch", stand_in)
    return found


def _job(op, case, kernel, tile):
    return Job(op, "parity", case, kernel, ",".join(map(str, tile)))


@pytest.fixture
def turn(tmp_path):
    file = tmp_path / "turn"
    file.touch()
    return str(file)


@pytest.mark.parametrize(
    ("op", "case", "kernel", "arrays"),
    [
        ("dual_window", "200, full/1 H2/1 D32", "forward", 5),
        ("dual_window", "200, full/1 H2/1 D32", "backward_kv", 8),
        ("decode", "256/256 H6/2 D32", "decode_attention", 4),
    ],
)
def test_a_kernel_is_timed_alone(op, case, kernel, arrays, launched, turn, capsys):
    (found,) = (x for x in OPS[op].SHAPES["parity"] if x.name == case)
    tile = getattr(tune.table_of(OPS[op], found), kernel)
    tune.main(["--job", *_job(op, case, kernel, tile), "--turn", turn])
    row = json.loads(capsys.readouterr().out)
    assert row["ms"] > 0
    assert row["note"] == tune.TABLE
    assert row["registers"] > 0
    (name, constants, num_warps, operands), *others = launched
    assert others == []  # neither the forward nor the other gradient
    assert name.endswith(kernel)
    assert (constants["BLOCK_N"], num_warps) == (tile.block_n, tile.num_warps)
    assert len(operands) == arrays
    given = [x for x in operands if not isinstance(x, jax.core.Tracer)]
    assert [x.dtype for x in given] == ["int32"]
    assert given[0].any()  # zeros would visit no tile, and hide all keys but one
    if op == "decode":
        assert operands[3].tolist() == found.positions.tolist()


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


def test_a_tile_that_spills_or_does_not_fit_is_not_timed(launched, turn):
    job = _job("dual_window", "257, 130/129 H2/2 D128", "backward_kv", Tile(128, 128, 4, 3))
    row = tune.measured(job, turn)
    assert row["note"] == "not timed: 264192 bytes of shared memory, more than 232448"
    assert row["ms"] is None
    job = _job("dual_window", "257, 130/129 H2/2 D128", "forward", Tile(128, 128, 4, 2))
    assert tune.measured(job, turn)["note"].startswith("not timed: spills ")
    assert launched == []


def test_a_tile_that_the_gpu_refuses_is_noted(launched, turn, monkeypatch):
    stand_in = launch.launch

    def refuses(*args, **options):
        if launch._RECORD.get(None) is None:
            raise RuntimeError("out of resources")
        return stand_in(*args, **options)

    monkeypatch.setattr(launch, "launch", refuses)
    job = _job("dual_window", "200, full/1 H2/1 D32", "forward", Tile(64, 32, 4, 2))
    assert tune.measured(job, turn)["note"] == "failed: RuntimeError: out of resources"


def test_processes_compile_together_and_time_alone(launched, turn, monkeypatch):
    def may_lock(kind):
        with open(turn) as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    seen = []

    def seeing(function):
        def call(*args):
            seen.append((function.__name__, may_lock(fcntl.LOCK_SH), may_lock(fcntl.LOCK_EX)))
            return function(*args)

        return call

    for module, name in (
        (machine_code, "compile_launch"),
        (measure, "ready"),
        (measure, "median_seconds"),
    ):
        monkeypatch.setattr(module, name, seeing(getattr(module, name)))
    tune.measured(_job("dual_window", "200, full/1 H2/1 D32", "forward", (64, 32, 4, 2)), turn)
    assert seen == [
        ("compile_launch", True, False),
        ("ready", True, False),
        ("median_seconds", False, False),
    ]
    assert may_lock(fcntl.LOCK_EX)


@pytest.fixture
def processes(hopper, monkeypatch):
    """The jobs that got a process, and the number of them after which the command is ended. The
    table's tile takes 10 ms, other tiles as many as their warps; one crashes."""
    seen, stops = [], []

    def in_process(program, job, seconds):
        assert program[:3] == (*tune.PROGRAM, "--turn")
        if stops == [len(seen)]:
            raise KeyboardInterrupt
        seen.append(job)
        if job.tile == "32,128,4,2":
            return job._asdict() | {"note": "failed: no result (exit status -11): "}
        table = tune.table_of(OPS[job.op], OPS[job.op].SHAPES["paper"][0])
        is_table = job.tile == ",".join(map(str, getattr(table, job.kernel)))
        ms = 10.0 if is_table else float(job.tile.split(",")[2])
        return job._asdict() | {"ms": ms, "note": tune.TABLE if is_table else ""}

    monkeypatch.setattr(cases, "in_process", in_process)
    return seen, stops


def test_every_tile_of_every_kernel_is_tried_and_the_best_named(processes, tmp_path, capsys):
    seen, _ = processes
    file = tmp_path / "tune.json"
    tune.main([*ARGUMENTS, str(file)])
    assert [job.kernel for job in seen[:6]] == KERNELS["dual_window"] * 2
    for kernel in KERNELS["dual_window"]:
        tiles = {job.tile for job in seen if job.kernel == kernel}
        assert tiles >= {",".join(map(str, x)) for x in dual_window_tuning.CANDIDATES[kernel]}
    assert len(seen) == len({*seen}) == 72
    report = json.loads(file.read_text())
    assert len(report["rows"]) == len(seen)
    for table, group in tune._by_kernel(report["rows"]):
        assert table == 10
        assert [row["ms"] for row in group[:2]] == [4, 4]
        assert group[-1]["note"] == "failed: no result (exit status -11): "
    first = tune.ranked(report["rows"])[0]
    assert (first["kernel"], first["time ms"], first["/ table"]) == ("forward", 4, 0.4)
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split(" = ")[0] for line in lines] == [
        f"dual_window/tuning.py: {kernel}" for kernel in KERNELS["dual_window"]
    ]
    assert lines[0].endswith(f"takes 0.40 of the table's time for {CASE}")


def test_an_interrupted_search_goes_on(processes, tmp_path, capsys):
    seen, stops = processes
    file = tmp_path / "tune.json"
    stops.append(20)
    with pytest.raises(KeyboardInterrupt):
        tune.main([*ARGUMENTS, str(file)])
    assert len(json.loads(file.read_text())["rows"]) == len(seen) == 20
    stops.clear()
    tune.main([*ARGUMENTS, str(file)])
    assert "52 tiles to try, 20 tried before" in capsys.readouterr().out
    assert len(seen) == len({*seen}) == 72  # no tile twice, the one that crashed neither
    before = file.read_text()
    tune.main([*ARGUMENTS, str(file)])
    assert len(seen) == 72
    assert json.loads(file.read_text()) == json.loads(before)


# A search of its own of two tiles, in processes that compile really and launch nothing.
SEARCH = """
import sys
import jax.numpy as jnp
from ttcd_kernels import launch, tune
from ttcd_kernels.decode import bench
real = launch.launch
def stand_in(*args, out_shape, **options):
    if launch._RECORD.get(None) is not None:
        return real(*args, out_shape=out_shape, **options)
    return [jnp.zeros(x.shape, x.dtype) for x in out_shape]
launch.launch = stand_in
bench.SHAPES["tiny"] = bench.SHAPES["parity"][2:3]
candidates = bench.tuning.CANDIDATES
candidates["decode_attention"] = candidates["decode_attention"][:2]
tune.PROGRAM = ("-c", sys.argv.pop(1))
with launch.compiling_for(90):
    tune.main(sys.argv[1:])
"""
PROCESS = SEARCH.replace("sys.argv.pop(1)", "''")


def test_a_search_that_is_killed_goes_on_where_it_was(tmp_path):
    file = tmp_path / "tune.json"
    command = [sys.executable, "-c", SEARCH, PROCESS, "--op", "decode", "--shapes", "tiny"]
    command += ["--json", str(file)]
    options = {"stdout": subprocess.PIPE, "text": True, "env": commands.cpu_environment()}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        for line in process.stdout:
            if line.endswith(" ms\n"):
                break
        os.killpg(process.pid, signal.SIGKILL)
    before = json.loads(file.read_text())["rows"]
    assert 1 <= len(before) <= 3
    output = subprocess.run(command, check=True, **options).stdout
    assert f"{3 - len(before)} tiles to try, {len(before)} tried before" in output
    rows = json.loads(file.read_text())["rows"]
    assert rows[: len(before)] == before
    assert [row["note"] for row in rows].count(tune.TABLE) == 1
    assert len({row["tile"] for row in rows}) == 3
    assert all(row["ms"] > 0 for row in rows)


def test_results_of_another_machine_or_source_are_not_mixed(processes, tmp_path, capsys):
    seen, _ = processes
    file = tmp_path / "tune.json"
    tune.main([*ARGUMENTS, str(file)])
    report = json.loads(file.read_text())
    done = len(seen)
    for text, message in [
        (json.dumps(report | {"source": "before"}), "is of another machine, version or source"),
        (
            json.dumps(report | {"environment": report["environment"] | {"device": "H200"}}),
            "is of another machine, version or source",
        ),
        ("{", "is no report of this command"),
        ("[]", "is no report of this command"),
        ('{"rows": []}', "is no report of this command (KeyError('environment'))"),
    ]:
        file.write_text(text)
        with pytest.raises(SystemExit) as leaving:
            tune.main([*ARGUMENTS, str(file)])
        assert leaving.value.code == 2
        assert message in capsys.readouterr().err
        assert file.read_text() == text
    report["environment"]["clocks"] = "others: they change"
    file.write_text(json.dumps(report))
    tune.main([*ARGUMENTS, str(file)])
    assert len(seen) == done


def test_no_more_processes_than_fit_in_device_memory(monkeypatch):
    """64K tokens, 16 heads on 8 kv heads of 128, bfloat16: 1 GiB of operands; of four rows 4."""
    parser = bench.parser_of("tune", "", ["dual_window"], "paper")
    monkeypatch.setattr(measure, "usable_bytes", lambda: 20 << 30)
    for case, processes in ((CASE, 10), (f"4 x {CASE}", 2), ("1M 8192/4096 H16/8 D128", 1)):
        assert tune._at_once(bench.parsed(parser, ["--case", case])) == processes


def test_wrong_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--shapes", "tiny", "--case", "none"])
    assert "no 'none' in tiny; it has" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_tune():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="nothing to tune: there is no NVIDIA GPU"):
        tune.main([])


def test_a_table_serves_every_head_dim_and_older_and_newer_gpus():
    for tuning in (dual_window_tuning, decode_tuning):
        assert {dim for _, dim in tuning.TABLE} == set(tuning.HEAD_DIMS)
    for known, capability in ((80, 86), (90, 90)):
        for dim in dual_window_tuning.HEAD_DIMS:
            narrow, wide = (dual_window_tuning.tuning_for(capability, dim, size) for size in (2, 4))
            assert narrow == dual_window_tuning.TABLE[known, dim]
            assert wide == dual_window_tuning.FLOAT32[80, dim]
            narrow, wide = (decode_tuning.tuning_for(capability, dim, size)[0] for size in (2, 4))
            assert narrow == decode_tuning.TABLE[known, dim]
            assert wide.block_n == narrow.block_n // 2
