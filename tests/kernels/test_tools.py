"""The tools of kernels without a GPU: `bench` at tiny shapes, the definition, what `check`
compares, tables."""

import itertools
import json
import math
import re
from argparse import Namespace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttcd_kernels import launch, measure
from ttcd_kernels.table import format_table, write_json

from experiments.studies.kernels import __main__ as hour
from experiments.studies.kernels import (
    attention,
    bench,
    check,
    convolution,
    programs,
)
from experiments.studies.kernels import decoding as decode
from experiments.studies.kernels.attention import SHAPES, Case

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
