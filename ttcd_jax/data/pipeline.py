"""Batches as a pure function of (seed, step): nothing to save, the same for any process count."""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from ttcd_jax.errors import DataError, ResourceError
from ttcd_jax.tokens import check_tokens

# start step -> the caller's batches from that step on, each int [batch_size, seq_len + 1].
MakeBatches = Callable[[int], Iterable[Any]]
Fields = dict[str, np.ndarray]
RowSource = grain.sources.RandomAccessDataSource
ENDLESS = 2**31 - 1  # rows: more than any run takes


class Batches:
    """Batches of a random-access source of rows (dicts of arrays of one shape).

    Row r of step s is row s * batch_size + r of the source, which is repeated forever. `rows`: the
    rows of a batch that this process makes, by default all, in `num_workers` processes, or in a
    thread if that is 0. With `vocab_size`, raises `DataError` for a batch with tokens outside.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        batch_size: int,
        rows: Sequence[int] | None = None,
        vocab_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        # grain types rows as optional, for datasets with filters; here are no filters.
        self._data: Any = grain.MapDataset.source(source).repeat(None)
        self._batch_size, self._vocab_size = batch_size, vocab_size
        self._rows, self._num_workers = range(batch_size) if rows is None else rows, num_workers

    def at(self, step: int) -> Fields:
        """The rows of the batch of `step`: fields [len(rows), ...]."""
        assert step >= 0, step
        rows = [self._data[step * self._batch_size + row] for row in self._rows]
        fields = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        if self._vocab_size is not None:
            check_tokens([fields["tokens"], fields["targets"]], self._vocab_size)
        return fields

    def iterate(self, start_step: int, num_steps: int) -> Iterator[tuple[int, Fields]]:
        """(step, at(step)) for `num_steps` steps, made ahead by a thread or by processes that end
        with it. Raises `ResourceError` when one of these is killed."""
        steps = grain.MapDataset.range(start_step, start_step + num_steps).map(self.at)
        # One thread: making rows is Python, which a second thread would not speed up.
        ahead, count = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4), self._num_workers
        dataset = _in_processes(steps, count) if count else steps.to_iter_dataset(ahead)
        with contextlib.closing(iter(dataset)) as batches:
            try:
                yield from enumerate(batches, start_step)
            except RuntimeError as error:
                if not (killed := re.search(r"exit code (-\d+)", str(error))):
                    raise
                raise ResourceError(
                    f"one of {count} processes that make batches was killed (status {killed[1]}), "
                    "perhaps out of memory: lower RunConfig.data_workers"
                ) from error


def _in_processes(dataset: grain.MapDataset, count: int) -> grain.IterDataset:
    """The elements in their order, of which each process makes every `count`-th."""
    flags.FLAGS.mark_as_parsed()  # grain asks for one of its own, in a library's caller too
    one_by_one = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Arrays go through pipes: a container has 64 MB of shared memory.
    copied = grain.experimental.DatasetOptions(min_shm_size=2**62)
    return grain.experimental.WithOptionsIterDataset(one_by_one, copied).mp_prefetch(
        grain.MultiprocessingOptions(count, per_worker_buffer_size=2),
        lambda *_: follow_parent("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"),
    )


def follow_parent(*left_to_it: str) -> None:
    """Ignores signals in a worker, and ends it when its parent is killed."""
    for name in left_to_it:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


class CallerBatches:
    """Batches from the caller, whole in every process, which uses its `rows` of them. A row is one
    document; its last token is only a target. Raises `DataError` for a batch of another shape or
    with tokens outside the vocabulary, and when there are too few."""

    def __init__(
        self, make: MakeBatches, *, shape: tuple[int, int], vocab_size: int, rows: Sequence[int]
    ) -> None:
        self._make, self._shape, self._vocab_size = make, shape, vocab_size
        self._rows = list(rows)

    def iterate(self, start_step: int, num_steps: int) -> Iterator[tuple[int, Fields]]:
        """(step, fields of its batch) for `num_steps` steps."""
        batches = iter(self._make(start_step))
        for step in range(start_step, start_step + num_steps):
            if (batch := next(batches, None)) is None:
                raise DataError(
                    f"the batches end before step {step + 1} of {start_step + num_steps}: make "
                    "more, or lower RunConfig.steps"
                )
            yield step, self._fields(step, np.asarray(batch))

    def _fields(self, step: int, batch: np.ndarray) -> Fields:
        if batch.shape != self._shape or batch.dtype.kind not in "iu":
            raise DataError(
                f"the batch of step {step + 1} is {batch.dtype} {batch.shape}, not integers "
                f"{self._shape}: batch_size rows of seq_len + 1 tokens"
            )
        check_tokens(batch, self._vocab_size)
        tokens = batch[self._rows].astype(np.int32)
        shape = tokens[:, 1:].shape
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
            "loss_mask": np.ones(shape, bool),
        }


type StepBatches = Batches | CallerBatches
