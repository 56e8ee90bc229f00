"""The XLA form of every op, and attention out of two calls of it, against the definitions: results
and gradients through all of them."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from checks import assert_close, draw
from ttcd_kernels import dual_window_attention, window_attention
from ttcd_kernels.dual_window import xla

from experiments.studies.kernels import attention, convolution, decoding, programs

# name: (queries, keys, query heads, kv heads, teacher window, student window, rows per block,
# has documents)
ATTENTION = {
    "one block": (12, 12, 2, 2, 7, 3, 256, False),
    "several blocks, ragged, documents": (21, 21, 2, 1, 7, 3, 4, True),
    "grouped heads, halo, documents": (13, 30, 4, 2, 9, 4, 4, True),
    "halo shorter than the window": (16, 19, 2, 2, 11, 5, 4, True),
    "student sees itself only": (17, 17, 2, 1, 6, 1, 4, True),
    "both see themselves only": (9, 9, 2, 2, 1, 1, 4, False),
    "equal windows": (18, 18, 4, 2, 5, 5, 4, True),
    "teacher one wider": (18, 18, 2, 2, 6, 5, 4, False),
    "teacher wider than the row": (14, 14, 2, 2, 99, 4, 4, True),
    "full attention in halves": (37, 37, 4, 2, None, 6, 4, False),
    "full attention in halves, documents": (37, 37, 4, 2, None, 6, 4, True),
    "both full, in halves, halo": (33, 40, 2, 1, None, None, 4, True),
    "the first window in halves, documents": (72, 72, 4, 2, 33, 6, 4, True),
    "window as long as two blocks": (16, 16, 2, 2, 8, 4, 4, False),
    "one query, many keys": (1, 23, 2, 1, 9, 2, 4, True),
    "one token": (1, 1, 2, 2, None, 1, 256, False),
    "few queries have a far band": (12, 40, 2, 1, 40, 30, 256, False),
}
# Out of two calls as well: every reach and halo of them.
IN_TWO_CALLS = (
    *("several blocks, ragged, documents", "grouped heads, halo, documents", "equal windows"),
    *("halo shorter than the window", "teacher wider than the row", "one query, many keys"),
    *("both full, in halves, halo", "few queries have a far band"),
)
# A row that waits, the beginning, both windows' ends and the ring's edge; far beyond.
_DECODE = decoding.Case("rising", 57, 6, 2, 8, 48, 20, 53, -1, 1, 0.7, dtype="float64")
_CONV = convolution.Case("", 2, 3, 7, 5, dtype="float64")
OTHERS = [
    *(_DECODE._replace(num_heads=N, num_kv_heads=K) for N, K in ((2, 2), (6, 2), (17, 1))),
    _DECODE._replace(name="full ring", teacher_window=53, student_window=53),
    # scores whose exponentials overflow
    _DECODE._replace(name="sharp", num_kv_heads=1, teacher_window=2, student_window=1, scale=300.0),
    _DECODE._replace(name="itself", teacher_window=1, student_window=1),
    _DECODE._replace(name="far", batch=3, first_position=2_000_000_011),
    *(_DECODE._replace(name=dtype, batch=9, step=7, dtype=dtype) for dtype in programs.BOUNDS),
    *(  # 9 taps reach past both ends of a chunk
        _CONV._replace(num_taps=R, is_causal=c, normalizes_keys=n, has_documents=d)
        for R, c, n, d in itertools.product((4, 9), *[(False, True)] * 3)
    ),
]


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_computes_the_definition(name, float64, monkeypatch):
    T, S, N, K, teacher, student, block, has_documents = ATTENTION[name]
    monkeypatch.setattr(xla, "_MAX_BLOCK", block)
    case = attention.Case(name, T, N, K, 4, teacher, student, 2, S, 0.7, has_documents, "float64")
    forms = ("xla", "lse")[: 1 + (name in IN_TWO_CALLS)]
    rows = programs.compare(attention, case, forms)
    assert [(row["implementation"], row["note"]) for row in rows] == [(x, "") for x in forms]
    qkv = draw(0, (2, T, N, 4), *[(2, S, K, 4)] * 2)
    ids = None if case.ids is None else jnp.asarray(case.ids)
    options = {"segment_ids": ids, "scale": 0.7, "implementation": "xla"}

    @jax.jit
    def both(qkv):
        windows = {"teacher_window": teacher, "student_window": student}
        dual = dual_window_attention(*qkv, **windows, **options)
        return window_attention(*qkv, window=student, **options), dual[1]

    assert_close(*both(qkv))


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case.name} {case.dtype}")
def test_decoding_and_convolutions_compute_the_definition(case, float64, monkeypatch):
    monkeypatch.setitem(programs.BOUNDS, "float32", 2e-6)
    op = decoding if isinstance(case, decoding.Case) else convolution
    (row,) = programs.compare(op, case, ("xla",))
    assert row["note"] == ""
