"""The Triton kernels of dual-window attention without a GPU: numerics by the interpreter, the tiles
that kernels visit, and the table of their report."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import check_errors, launched_kernels
from ttcd_kernels import dual_window_attention, launch
from ttcd_kernels.dual_window.tiles import documents, key_tiles, query_tiles
from ttcd_kernels.table import format_table

KERNELS = ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
BASE = {"T": 40, "S": 40, "N": 2, "K": 1, "H": 32, "teacher": 16, "student": 8}
CASES = [
    # windows
    BASE,
    BASE | {"teacher": 100, "student": 1},  # beyond the row; the query alone
    BASE | {"teacher": 13, "student": 13, "block_n": 32},  # no far band
    BASE | {"teacher": 21, "student": 20, "block_m": 32},
    BASE | {"scale": -0.3},
    # shapes
    BASE | {"B": 2, "T": 33, "S": 50, "N": 4, "K": 2, "teacher": 20, "student": 7},  # halo
    BASE | {"T": 5, "S": 5, "K": 2},  # less than a tile
    BASE | {"H": 64, "T": 1, "S": 37, "block_n": 32},  # the last query alone
    # columns padded to 128, with heads that follow one another in memory
    BASE | {"H": 80, "N": 4, "K": 2, "T": 33, "S": 50, "documents": 3},
    BASE | {"H": 96, "N": 2, "K": 2, "T": 24, "S": 24, "dtype": "bfloat16"},
    BASE | {"H": 80, "N": 3, "K": 1, "T": 37, "S": 37, "is_public": True},
    # documents
    BASE | {"documents": 4},
    BASE | {"B": 2, "S": 51, "documents": 9, "N": 4, "K": 2, "block_m": 32},
    BASE | {"documents": 3, "T": 130, "S": 170, "teacher": 90, "student": 40},
    BASE | {"B": 2, "documents": 2, "is_mixed": True, "teacher": 30},
    # transforms
    *[BASE | {"transform": name, "T": 24, "S": 24} for name in ("jit", "remat", "vmap")],
    # public
    BASE | {"is_public": True, "T": 150, "S": 150, "teacher": None, "student": 60},
    # narrow
    *[BASE | {"dtype": dtype} for dtype in ("bfloat16", "float16")],
]
# A relative step of each dtype; sums over up to 16 keys, probabilities rounded once.
BOUND = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 3e-3}


def test_results_and_gradients_are_those_of_the_definition():
    check_errors("dual_window", CASES, BOUND, "teacher_lse", "student_lse")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"BLOCK_X": 3}, "dual_window_forward: got an unexpected keyword argument 'BLOCK_X'"),
        ({"BLOCK_M": None}, "dual_window_forward: missing a required argument: 'BLOCK_M'"),
    ],
)
def test_a_launch_names_the_parameter_that_is_wrong(change, message, monkeypatch):
    real = launch.launch

    def changed(kernel, *args, **keywords):
        keywords = {name: value for name, value in (keywords | change).items() if value is not None}
        return real(kernel, *args, **keywords)

    monkeypatch.setattr(launch, "launch", changed)
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    with pytest.raises(TypeError, match=message):
        launched_kernels(_attend_to_itself, q, capability=90)


def _attend_to_itself(q):
    return dual_window_attention(
        q, q, q, teacher_window=16, student_window=8, implementation="triton"
    )


BLOCK_Q, BLOCK_KV = 16, 8
LENGTHS = ((100, 100), (70, 101), (5, 60))
BANDS = ((0, 1), (0, 16), (16, 60), (7, 200), (20, 20))


@pytest.mark.parametrize("length", [None, 1, 16, 37, "again"])
def test_tiles_cover_the_bands_exactly_and_inner_ones_hide_nothing(length):
    """With documents of some tiles, of one key, whose ids come again."""
    for T, S in LENGTHS:
        ids = np.arange(S) // 30 % 2 if length == "again" else np.arange(S) // (length or S)
        rows = None if length is None else documents(jnp.asarray(ids)[None])
        options = BANDS, T, S, BLOCK_Q, BLOCK_KV, rows
        by_query, by_key = (np.asarray(f(*options))[0] for f in (key_tiles, query_tiles))
        assert (by_query.shape, by_key.shape) == (
            (-(-T // BLOCK_Q), len(BANDS), 4),
            (-(-S // BLOCK_KV), len(BANDS), 4),
        )
        for index, (low, high) in enumerate(BANDS):
            _check(ids, T, low, high, by_query[:, index], by_key[:, index])


def _check(ids, T, low, high, by_query, by_key):
    S, shape = len(ids), (len(by_query), len(by_key))
    row, key = np.arange(T)[:, None], np.arange(S)
    distance = row + S - T - key
    band = (low <= distance) & (distance < high)
    visible = band & (ids[S - T :, None] == ids)
    # Keys before the document of a tile's first query need no visit, nor queries after that of a
    # tile's last key, where ids never fall.
    first = row // BLOCK_Q * BLOCK_Q + S - T
    last = np.minimum(key // BLOCK_KV * BLOCK_KV + BLOCK_KV, S) - 1
    is_after = key >= np.searchsorted(ids, ids[first])
    is_before = row < np.searchsorted(ids, ids[last], "right") - (S - T)
    if (np.diff(ids) < 0).any():
        is_after = is_before = np.ones_like(band)

    def tiles(pairs, fill):
        """[query tiles, key tiles, pairs]."""
        padded = np.full((shape[0] * BLOCK_Q, shape[1] * BLOCK_KV), fill)
        padded[:T, :S] = pairs
        padded = padded.reshape(shape[0], BLOCK_Q, shape[1], BLOCK_KV)
        return padded.swapaxes(1, 2).reshape(*shape, -1)

    def visited(bounds, size):
        """(all, inner) [tiles, size]."""
        tile, bounds = np.arange(size), bounds[:, :, None]
        start, inner_start, inner_stop, stop = bounds.swapaxes(0, 1)
        return (start <= tile) & (tile < stop), (inner_start <= tile) & (tile < inner_stop)

    needed, hidden = tiles(visible, False).any(-1), tiles(~visible, False).any(-1)
    found, inner = visited(by_query, shape[1])
    np.testing.assert_array_equal(found & needed, needed)
    np.testing.assert_array_equal(found, tiles(band & is_after, False).any(-1))
    assert not (inner & hidden).any()
    # Rows after the last query are zeros for the tiles of keys; keys after the last do not exist.
    found_t, inner_t = (x.T for x in visited(by_key, shape[0]))
    np.testing.assert_array_equal(found_t & needed, needed)
    np.testing.assert_array_equal(found_t, tiles(band & is_before, False).any(-1))
    assert not (inner_t & hidden).any()
    if (np.diff(ids) >= 0).all():  # what is whole is inner, from both sides
        whole = tiles(visible, True).all(-1) & needed
        assert (inner_t >= whole).all()
        assert (inner | ~whole | ~tiles(visible, False).all(-1)).all()


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
