"""The kernel benchmark at tiny shapes: complete rows, honest gaps, refused arguments."""

import itertools
import json
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


@pytest.fixture
def few(monkeypatch):
    """One shape of each set, two to compare."""
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["tiny"][:1])
    odd = Case("40, 13/6 H2/1 D8", 40, 2, 1, 8, 13, 6, dtype="float32")
    monkeypatch.setitem(SHAPES, "parity", (odd, odd._replace(dtype="bfloat16")))


def test_the_report_names_machine_shapes_and_every_measurement(few, tmp_path, capsys):
    file = tmp_path / "report.json"
    bench.main([*TINY, "--json", str(file)])
    report = json.loads(file.read_text())
    assert {"device", "jax", "jaxlib", "commit"} <= report["environment"].keys()
    report |= report["ops"]["dual_window"]
    assert [shape["name"] for shape in report["shapes"]] == [case.name for case in SHAPES["tiny"]]
    rows = report["rows"]
    assert len(rows) == len(SHAPES["tiny"]) * 2 * 2
    assert all(row["time ms"] > 0 and row["temp MiB"] > 0 and not row["note"] for row in rows)
    assert all(row["% of floor"] > 0 for row in rows)
    assert all(row["/ xla"] == 1 for row in rows if row["implementation"] == "xla")
    # Operands are rounded, what they are compared with is not: a step or two of the dtype.
    bounds = {"float32": 3e-6, "bfloat16": 3e-2}
    assert {row["implementation"] for row in report["parity"]} == {"xla", "xla two calls"}
    assert {row["dtype"] for row in report["parity"]} == bounds.keys()
    assert all(row["max rel. error"] < bounds[row["dtype"]] for row in report["parity"])
    printed = capsys.readouterr().out
    assert all(case.name in printed for case in SHAPES["tiny"])


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


def test_what_refuses_a_shape_is_noted_and_the_rest_measured(few, monkeypatch, tmp_path):
    """A peer may; one of ours fails the command, after all is measured and written."""

    def refuses(*operands):
        raise NotImplementedError("head dim 8 is too small\nfor this peer")

    implementations = dual_window.implementations

    def two_and_a_peer(case):
        found = implementations(case)
        return {"peer": refuses} | {name: found[name] for name in ("xla", "xla two calls")}

    monkeypatch.setattr(dual_window, "implementations", two_and_a_peer)
    file, note = tmp_path / "report.json", "failed: NotImplementedError: head dim 8 is too small"
    with pytest.raises(SystemExit, match="failed: peer; the notes above say why"):
        bench.main([*TINY, "--json", str(file)])
    report = json.loads(file.read_text())["ops"]["dual_window"]
    peers = [row for row in report["rows"] if row["implementation"] == "peer"]
    assert [row["note"] for row in peers] == [note] * 2
    assert all(row["time ms"] > 0 for row in report["rows"] if row not in peers)
    compared = [row for row in report["parity"] if row["implementation"] == "peer"]
    assert [row["note"] for row in compared] == [note] * 2
    monkeypatch.setattr(dual_window, "PEERS", ("peer",))
    bench.main(TINY)


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


def _broken(how):
    """XLA's attention with a fault: the wrong sign in one band, a row that is not a number, or
    other bits in every run."""
    xla = dual_window.implementations(_CASE)["xla"]

    def attend(*qkv):
        teacher, student = xla(*qkv)
        if how == "sign":
            return teacher - 2 * (teacher - student), student
        if how == "row":
            return teacher.at[0, 7].set(jnp.nan), student
        noise = jax.pure_callback(lambda: np.float32(next(_NOISE)), jnp.float32(0))
        return teacher + noise, student

    return attend


_CASE = Case("40, 13/6 H2/1 D8", 40, 2, 1, 8, 13, 6, dtype="float32")
_NOISE = itertools.cycle((0.0, 1e-6))


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("sign", r"failed: error \d.*, allowed 1e-05"),
        ("row", "failed: error nan, allowed 1e-05"),
        ("noise", "failed: two runs differ"),
    ],
)
def test_a_wrong_kernel_fails(how, note, monkeypatch, few):
    functions = {"xla": dual_window.implementations(_CASE)["xla"], "triton": _broken(how)}
    monkeypatch.setitem(SHAPES, "parity", (_CASE,))
    monkeypatch.setattr(dual_window, "implementations", lambda case: functions)
    right, wrong = parity.compare(dual_window, _CASE)
    assert right["note"] == ""
    assert re.fullmatch(note, wrong["note"])
    with pytest.raises(SystemExit, match="failed: triton"):
        bench.main(TINY)
