"""Batches as a pure function of (seed, step), made by several processes and read ahead."""

import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest
from checks import assert_same

from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.sources import RecordsConfig, corpus_rows

NUM_ROWS = 24


class Numbers:
    """Row i holds i, so that a batch tells which rows it took; one is broken."""

    def __init__(self, broken_row: int) -> None:
        self._broken_row = broken_row

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        if index == self._broken_row:
            raise OSError(f"row {index} is unreadable")
        return {"row": np.int32(index), "line": np.full(3, index, np.int32)}


def _batches(broken_row=-1):
    return Batches(Numbers(broken_row), batch_size=4)


def _shuffled(seed, num_rows=NUM_ROWS):
    """Batches of a corpus of one document, whose row i has the tokens 2 i and 2 i + 1."""
    ids = np.arange(2 * num_rows + 1)
    records = TokenRecords([ids], np.array([0, ids.size]), eos_id=0)
    rows, count = corpus_rows(records, RecordsConfig(paths="x", seq_len=2), seed, seed)
    assert count == num_rows
    return Batches(rows, batch_size=4)


def _order(batches, steps):
    """The numbers of the rows of `steps`."""
    return np.concatenate([batches.at(step)["tokens"][:, 0] // 2 for step in steps]).tolist()


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 10])  # of four rows, which divide 24
def test_every_epoch_takes_every_row_once_in_another_order(num_rows):
    order = _order(_shuffled(0, num_rows), range(3 * NUM_ROWS // 4))
    epochs = [order[i : i + num_rows] for i in range(0, 2 * num_rows, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert list(range(num_rows)) not in epochs
    orders = [_order(_shuffled(x, num_rows), range(6)) for x in (0, 0, 1, 2, 2**32 - 1)]
    assert len(set(map(str, orders))) == 4


def test_iterate_equals_at_and_repeats_the_source_in_its_order():
    batches = _batches()
    seen = list(batches.iterate(3, 10))
    assert [step for step, _ in seen] == list(range(3, 13))
    for step, batch in seen:
        assert_same(batch, batches.at(step))
        assert batch["row"].tolist() == [(4 * step + row) % NUM_ROWS for row in range(4)]
    assert list(batches.iterate(3, 0)) == []


@contextlib.contextmanager
def _threads_end():
    """The threads before; fails when a prefetch thread that the body started goes on after it."""
    before = set(threading.enumerate())
    yield before
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_iterate_left_early_ends_its_thread():
    with _threads_end() as before:
        iterator = _batches().iterate(0, 1000)
        next(iterator)
        assert set(threading.enumerate()) - before
        iterator.close()


def test_iterate_left_open_at_exit_prints_nothing():
    script = (
        "import numpy as np\n"
        "from ttcd_jax.data.pipeline import Batches\n"
        "rows = [{'row': np.int32(i)} for i in range(8)]\n"
        "iterator = Batches(rows, batch_size=2).iterate(0, 10**6)\n"
        "print(next(iterator)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"0", b"")


def test_an_error_in_the_source_reaches_the_reader():
    steps = _batches(broken_row=9).iterate(0, 6)
    with _threads_end():
        assert [next(steps)[0], next(steps)[0]] == [0, 1]
        with pytest.raises(OSError, match="row 9 is unreadable") as caught:
            next(steps)
    assert caught.tb  # the traceback still holds the iterator: it was closed, not collected
