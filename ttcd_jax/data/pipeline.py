"""Batches as a pure function of (seed, step): nothing to save, exact on any number of processes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from ttcd_jax.errors import UserError


class Batches:
    """Batches of a random-access source of rows (dicts of arrays of one shape).

    Row r of step s is number s * batch_size + r of an endless sequence that passes once over the
    source per epoch, shuffled anew each time by `seed` (or in the order of the source). A process
    takes its contiguous part of each batch, so the parts of all processes concatenate to the batch
    of one. Raises `UserError` for a batch that does not divide, or a seed outside 32 bits.
    """

    def __init__(
        self,
        source: grain.sources.RandomAccessDataSource,
        *,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        is_shuffled: bool = True,
    ) -> None:
        assert 0 <= process_index < process_count, (process_index, process_count)
        if batch_size < 1 or batch_size % process_count:
            raise UserError(
                f"batch_size {batch_size} is not a positive multiple of {process_count} processes; "
                "change batch_size or the number of processes"
            )
        if not 0 <= seed < 2**32:
            raise UserError(f"data seed {seed} is outside 0..{2**32 - 1}; choose another")
        if len(source) == 0:
            raise UserError("the data source has no rows; give it at least one")
        rows = grain.MapDataset.source(source)
        if is_shuffled:
            rows = rows.seed(seed).shuffle()
        # grain types rows as optional, for datasets with filters; there are none here.
        self._rows: Any = rows.repeat(None)
        self._batch_size = batch_size
        self._local_size = batch_size // process_count
        self._offset = process_index * self._local_size

    def at(self, step: int) -> dict[str, np.ndarray]:
        """This process's part of the batch of `step`: fields [batch_size / process_count, ...]."""
        assert step >= 0, step
        first = step * self._batch_size + self._offset
        rows = [self._rows[first + i] for i in range(self._local_size)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def iterate(
        self, start_step: int, num_steps: int
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(step, at(step)) for `num_steps` steps, read ahead by a thread that ends with it."""
        steps = grain.MapDataset.range(start_step, start_step + num_steps)
        # One thread: making rows is Python, which a second thread would not speed up.
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        batches = iter(steps.map(self.at).to_iter_dataset(ahead))
        with contextlib.closing(batches):
            yield from zip(range(start_step, start_step + num_steps), batches, strict=True)
