"""The kernel benchmark at tiny shapes: complete rows, honest gaps, refused arguments; tables."""

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttcd_kernels import bench, check, measure, parity, tune
from ttcd_kernels.decode import bench as decode
from ttcd_kernels.dual_window import bench as dual_window
from ttcd_kernels.dual_window.bench import SHAPES, Case
from ttcd_kernels.table import format_table, write_json

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
def few(monkeypatch):
    """One shape of each set, two to compare."""
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"][:1])
    monkeypatch.setitem(SHAPES, "parity", (ODD, ODD._replace(dtype="bfloat16")))


@pytest.fixture
def wrong(few, monkeypatch):
    """In float32, beside XLA's programs, a peer that refuses the shape, and XLA's attention with a
    fault: the sign of one band, a row that is not a number, other bits in every run."""
    implementations, noise = dual_window.implementations, itertools.cycle((0.0, 1e-6))

    def refuses(*operands):
        raise NotImplementedError("head dim 8 is too small\nfor this peer")

    def noisy(teacher, student):
        return teacher + jax.pure_callback(lambda: np.float32(next(noise)), jnp.float32(0)), student

    faults = {
        "sign": lambda teacher, student: (2 * student - teacher, student),
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
        bench.main([*TINY, "--json", str(file)])
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


def test_a_refusal_of_ours_fails(wrong, monkeypatch):
    monkeypatch.setattr(dual_window, "PEERS", ())
    with pytest.raises(SystemExit, match="failed: peer; the notes above say why"):
        bench.main([*TINY, "--times_only", "--implementation", "peer", "xla"])


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


def test_some_implementations_are_timed_without_a_comparison(few, tmp_path):
    file = tmp_path / "report.json"
    arguments = [*TINY, "--times_only", "--json", str(file), "--implementation"]
    bench.main([*arguments, "xla two calls"])
    report = json.loads(file.read_text())["ops"]["dual_window"]
    assert report["parity"] == []
    assert [row["implementation"] for row in report["rows"]] == ["xla two calls"] * 2
    assert all(row["time ms"] > 0 and row["/ xla"] is None for row in report["rows"])
    with pytest.raises(SystemExit, match="nothing to time: no implementation triton, mosaic here"):
        bench.main([*arguments, "triton", "mosaic"])


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "report.json"
    write_json({"rows": [1]}, file)
    with pytest.raises(TypeError):
        write_json({"rows": [2], "bad": object()}, file)
    assert json.loads(file.read_text()) == {"rows": [1]}
    assert [*tmp_path.iterdir()] == [file]


def test_what_does_not_fit_is_compiled_only_and_says_so(monkeypatch):
    monkeypatch.setattr(measure, "usable_bytes", lambda: 1000)
    ceilings = measure.Ceilings(1e9, 1e9)
    rows = bench.measured(dual_window, SHAPES["tiny"][0], ceilings)
    assert all(row["time ms"] is row["/ xla"] is None and row["temp MiB"] > 0 for row in rows)
    assert all("does not fit" in row["note"] for row in rows)
    assert "memory only" in format_table(rows)


def test_programs_take_turns():
    order = []
    programs = {name: lambda name=name: order.append(name) for name in "ab"}
    measure.median_seconds(programs, rounds=2)
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * 3  # the warm-up, then two rounds


@pytest.mark.parametrize(
    "arguments", [["--op", "none"], ["--shapes", "huge"], ["--json", "/no/x"], ["--case", "x"]]
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        bench.main(arguments)
    assert leaving.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_all_that_is_measured_agrees():
    for case in decode.SHAPES["tiny"]:
        rows = parity.compare(decode, case)
        assert {row["implementation"] for row in rows} >= {"xla", "jax.nn twice"}
        assert all(row["max rel. error"] < 1e-5 for row in rows)


def test_a_table_lines_up_and_hides_control_characters():
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


def test_floats_keep_four_digits():
    values = (12345.6, 1e-7, math.nan, -3.14159, 1e15, 1.0)
    texts = [line.strip() for line in format_table([{"x": x} for x in values]).splitlines()[2:]]
    assert texts == ["12,346", "1.000e-07", "nan", "-3.142", "1.000e+15", "1.000"]
