"""Batches as a pure function of (seed, step), made by several processes and read ahead."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.records import TokenRecords, prepare_records
from ttcd_jax.data.sources import MixtureConfig, RecordsConfig, TextConfig, corpus_rows
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError

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


def test_steps_repeat_the_source_in_its_order():
    seen = [(step, batch["row"].tolist()) for step, batch in _batches().iterate(3, 10)]
    assert seen == [(n, [(4 * n + row) % NUM_ROWS for row in range(4)]) for n in range(3, 13)]
    assert list(_batches().iterate(3, 0)) == []


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


WORKERS = """
import os
import sys
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.errors import ResourceError

class Rows:
    def __len__(self): return 8
    def __getitem__(self, index): return {"process": os.getpid()}

def read(num_workers):
    for step, batch in Batches(Rows(), batch_size=2, num_workers=num_workers).iterate(0, 10**6):
        print(step, *batch["process"], flush=True)
        sys.stdin.readline()

if __name__ == "__main__":
    try:
        read(2)
    except ResourceError as error:
        print(error, flush=True)
    read(1)
"""


def test_workers_make_the_batches_of_a_thread_of_records_and_text(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(200)))
    corpus = CorpusConfig(kind="text", path=str(tmp_path / "text.txt"))
    (tmp_path / "records").mkdir()
    prepare_records(corpus, TokenizerConfig(), tmp_path / "records", shard_tokens=200)
    text = TextConfig(corpus=corpus, tokenizer=TokenizerConfig(), seq_len=8)
    parts = text, RecordsConfig(paths=str(tmp_path / "records"), seq_len=8, packing="best_fit")
    options = {"batch_size": 4, "rows": (1, 3), "vocab_size": 258}
    source, _ = MixtureConfig(parts=parts, weights=(1, 2), seq_len=8).rows(0, 4)
    thread, workers = (Batches(source, **options, num_workers=n) for n in (0, 2))
    for (step, ours), (expected, theirs) in zip(
        workers.iterate(7, 8), thread.iterate(7, 8), strict=True
    ):
        assert (step, ours.keys()) == (expected, theirs.keys())
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(DataError, match="outside the vocabulary of 3"):  # at the first batch
        next(Batches(source, **options | {"vocab_size": 3}, num_workers=1).iterate(0, 9))


def _is_alive(process):
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(") ")[2][0] != "Z"  # which nobody has waited for
    return False


def _wait_for_end(processes):
    deadline = time.monotonic() + 30
    while any(map(_is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_keep_on_after_signals_and_end_with_their_parent(tmp_path):
    (tmp_path / "program.py").write_text(WORKERS)
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, tmp_path / "program.py"], text=True, **pipes) as parent:

        def next_line():
            parent.stdin.write("\n")
            parent.stdin.flush()
            return parent.stdout.readline()

        seen = []
        for step in range(16):  # more than are made ahead
            if step == 2:
                for worker in {*seen}:
                    for name in ("INT", "TERM", "HUP", "USR1", "USR2"):
                        os.kill(worker, signal.Signals[f"SIG{name}"])
            number, *processes = map(int, next_line().split())
            seen.append(processes[0])
            assert (number, processes) == (step, [seen[step % 2]] * 2)
        assert len({*seen}) == 2
        os.kill(seen[0], signal.SIGKILL)
        while (line := next_line())[0].isdigit():  # made before
            pass
        killed = "one of 2 processes that make batches was killed (status -9), perhaps out of"
        assert line.startswith(killed)
        _wait_for_end(seen)
        worker = int(next_line().split()[1])
        assert _is_alive(worker)
        parent.kill()
    _wait_for_end([worker])
