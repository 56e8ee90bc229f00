import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from ttcd_jax.data.pipeline import Batches
from ttcd_jax.errors import UserError

NUM_ROWS = 24


class Numbers:
    """Row i holds i, so that a batch tells which rows it took."""

    def __init__(self, num_rows: int = NUM_ROWS, broken_row: int = -1) -> None:
        self._num_rows = num_rows
        self._broken_row = broken_row

    def __len__(self):
        return self._num_rows

    def __getitem__(self, index):
        if index == self._broken_row:
            raise OSError(f"row {index} is unreadable")
        return {"row": np.int32(index), "line": np.full(3, index, np.int32)}


def _rows(batches, steps):
    return [batches.at(step)["row"].tolist() for step in steps]


def test_batch_is_a_pure_function_of_seed_and_step():
    batches = Batches(Numbers(), batch_size=4, seed=1)
    before = batches.at(5)
    batches.at(3)
    after = Batches(Numbers(), batch_size=4, seed=1).at(5)
    for batch in (batches.at(5), after):
        assert before.keys() == batch.keys()
        assert all(np.array_equal(before[name], batch[name]) for name in before)
    assert before["row"].shape == (4,)
    assert before["line"].shape == (4, 3)


def test_other_seeds_give_other_orders():
    orders = {str(_rows(_batches(seed), range(6))) for seed in (0, 1, 2, 2**32 - 1)}
    assert len(orders) == 4


def _batches(seed, **options):
    return Batches(Numbers(), batch_size=4, seed=seed, **options)


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_every_epoch_takes_every_row_once(is_shuffled):
    batches = _batches(0, is_shuffled=is_shuffled)
    epochs = [np.ravel(_rows(batches, range(6 * e, 6 * e + 6))).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    in_order = [epoch == list(range(NUM_ROWS)) for epoch in epochs]
    assert in_order == [not is_shuffled] * 3
    assert (epochs[0] == epochs[1]) == (not is_shuffled)


def test_epoch_coverage_when_the_batch_does_not_divide_the_rows():
    batches = Batches(Numbers(10), batch_size=4, seed=0)
    order = np.ravel(_rows(batches, range(5)))
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))


@pytest.mark.parametrize("shares", [[(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], [(0, 3), (1, 2)]])
def test_processes_make_one_batch_together(shares):
    for step in (0, 7, 123456):
        together = np.concatenate([_batches(0, rows=rows).at(step)["line"] for rows in shares])
        np.testing.assert_array_equal(
            together, _batches(0).at(step)["line"][np.concatenate(shares)]
        )


def test_iterate_equals_at():
    batches = _batches(0)
    seen = list(batches.iterate(3, 10))
    assert [step for step, _ in seen] == list(range(3, 13))
    for step, batch in seen:
        assert batch.keys() == batches.at(step).keys()
        assert all(np.array_equal(batch[name], batches.at(step)[name]) for name in batch)
    assert list(batches.iterate(3, 0)) == []


@contextlib.contextmanager
def _threads_end():
    """Fails when a prefetch thread that the body started goes on after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_iterate_left_early_ends_its_thread():
    num_threads = threading.active_count()
    with _threads_end():
        iterator = _batches(0).iterate(0, 1000)
        next(iterator)
        assert threading.active_count() > num_threads
        iterator.close()


def test_iterate_left_open_at_exit_prints_nothing():
    script = (
        "import numpy as np\n"
        "from ttcd_jax.data.pipeline import Batches\n"
        "rows = [{'row': np.int32(i)} for i in range(8)]\n"
        "iterator = Batches(rows, batch_size=2, seed=0).iterate(0, 10**6)\n"
        "print(next(iterator)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"0", b"")


def test_an_error_in_the_source_reaches_the_reader():
    batches = Batches(Numbers(broken_row=9), batch_size=4, seed=0, is_shuffled=False)
    steps = batches.iterate(0, 6)
    with _threads_end():
        assert [next(steps)[0], next(steps)[0]] == [0, 1]
        with pytest.raises(OSError, match="row 9 is unreadable") as caught:
            next(steps)
    assert caught.tb  # the traceback still holds the iterator: it was closed, not collected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"source": Numbers(0)}, "no rows"),
        ({"seed": -1}, "data seed -1 is outside"),
        ({"seed": 2**32}, "data seed 4294967296 is outside"),
    ],
)
def test_errors(options, message):
    with pytest.raises(UserError, match=message):
        Batches(**({"source": Numbers(), "batch_size": 4, "seed": 0} | options))
