"""The tools of kernels without a GPU: times of tiny shapes, the definition, what `check` compares,
tables."""

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
from experiments.studies.kernels import attention, bench, check, convolution, programs
from experiments.studies.kernels import decoding as decode
from experiments.studies.kernels.attention import SHAPES, Case

ODD = Case("29 of 40, 13/6 H2/1 D8", 29, 2, 1, 8, 13, 6, num_keys=40, dtype="float32")
NOTES = {
    "peer": "failed: NotImplementedError: head dim 8 is too small",
    "sign": r"failed: error \d.* of d., allowed 1e-05",
    "row": "failed: error nan of teacher, allowed 1e-05",
    "noise": "failed: two runs differ",
}


def refuses(*operands):
    raise NotImplementedError("head dim 8 is too small\nfor this peer")


def test_a_comparison_finds_what_is_wrong(monkeypatch):
    """The sign of one gradient, a row that is not a number, other bits in every run."""
    sound, noise = attention.implementations(ODD), itertools.cycle((0.0, 1e-6))

    def noisy(x):
        return x + jax.pure_callback(lambda: np.float32(next(noise)), jnp.float32(0))

    faults = {  # of the teacher's outputs
        "sign": lambda x: 2 * jax.lax.stop_gradient(x) - x,
        "row": lambda x: x.at[0, 7].set(jnp.nan),
        "noise": noisy,
    }

    def faulty(fault, *qkv):
        teacher, *others = sound["xla"](*qkv)
        return fault(teacher), *others

    wrong = {"peer": refuses} | {name: partial(faulty, x) for name, x in faults.items()}
    # Operands are rounded, what they are compared with is not: a step or two of the dtype.
    for dtype, bound, more in (("float32", 3e-6, wrong), ("bfloat16", 3e-2, {})):
        monkeypatch.setattr(attention, "implementations", lambda case, more=more: sound | more)
        rows = programs.compare(attention, ODD._replace(dtype=dtype))
        assert [row["implementation"] for row in rows] == ["xla", "lse", *more]  # all results
        for row in rows:
            assert re.fullmatch(NOTES.get(row["implementation"], ""), row["note"]), row
            assert row["note"] or row["max rel. error"] < bound


def test_times_are_those_of_both_directions_and_over_xlas(monkeypatch):
    """Of what refuses, was lost or does not fit a note."""
    case = SHAPES["tiny"][0]
    sound = {x: attention.implementations(case)[x] for x in ("xla", "lse")}
    everything = sound | {"cudnn": refuses, "other": refuses}
    monkeypatch.setattr(attention, "implementations", lambda case: everything)
    names = {"op": ["dual_window"], "shapes": "tiny", "case": [case.name], "implementation": sound}
    jobs = bench.jobs(Namespace(**names))
    assert [job.implementation for job in jobs] == [*sound, "cudnn"]
    rows = [job._asdict() | bench.measured(job) for job in jobs]
    lost = jobs[0]._replace(implementation="lost")._asdict() | {"note": "failed: no result"}
    table = bench.shown([*rows, lost])
    assert [row["pass"] for row in table] == ["forward", "fwd + bwd"] * 3 + [""]
    for row in table[:4]:
        assert row["note"] == ""
        assert all(row[x] > 0 for x in ("time ms", "Tflop/s", "TB/s", "% of floor", "temp MiB"))
        assert row["/ xla"] == row["time ms"] / table[row["pass"] != "forward"]["time ms"]
    assert [row["note"] for row in table[4:]] == [NOTES["peer"]] * 2 + ["failed: no result"]
    assert all(row["time ms"] is row["/ xla"] is None for row in table[4:])
    report = bench.tables([*rows, lost, lost | {"step": "check"}])
    assert report["ceilings"]["flops_per_second"] > 0
    assert report["ops"]["dual_window"]["rows"] == table
    monkeypatch.setattr(measure, "usable_bytes", lambda: 1000)
    for row in bench.shown([jobs[0]._asdict() | bench.measured(jobs[0])]):
        assert row["time ms"] is row["/ xla"] is None
        assert row["temp MiB"] > 0
        assert "memory only: does not fit" in row["note"]


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


@pytest.mark.parametrize("error", [RuntimeError("no backend 'x'\nmore"), AssertionError()])
def test_a_platform_that_is_not_there_is_one_line(monkeypatch, capsys, error):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "x")
    with pytest.raises(SystemExit, match=r"^2$"):
        hour.main([])
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"error: JAX_PLATFORMS=x: (no backend 'x'|no such device): unset it\n", line
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--op none", "--op"),
        ("--shapes huge", "--shapes"),
        ("--output /no/x", "--output: no folder /no"),
        ("--shapes tiny --case x", "--case: no 'x' in tiny; it has 64 tokens, 16/8, 48"),
        ("", "there is no NVIDIA GPU"),
        ("--implementation xla", "there is no NVIDIA GPU"),  # of the paper's shapes
        ("--implementation xla --shapes more", "there is no NVIDIA GPU"),
        ("--steps tiles --shapes tiny", "there is no NVIDIA GPU"),
        ("--steps check", "there is no NVIDIA GPU"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(line, words, capsys):
    if "GPU" in words and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match=r"^2$"):
        hour.main(line.split())
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
    values = ("9.3 (8.2 to 10.6)", "+0.100 ± 0.020", "6.27 KiB")  # numbers as well
    assert {len(x) for x in format_table([{"x": x} for x in values]).splitlines()} == {17}


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
