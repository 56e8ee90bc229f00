"""The shapes decode attention is measured at."""

from typing import NamedTuple

import numpy as np

from ttcd_kernels.measure import SetName


class Case(NamedTuple):
    """One call: row b is at `first_position` + 7 b. Windows count the query itself."""

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    teacher_window: int
    student_window: int
    num_slots: int | None = None  # None: as many as the teacher's window
    first_position: int = 100_000  # far beyond any window
    dtype: str = "bfloat16"
    rounds: int = 5

    @property
    def positions(self) -> np.ndarray:
        return self.first_position + 7 * np.arange(self.batch, dtype=np.int32)


def _at_batches(case: Case) -> list[Case]:
    return [case._replace(name=f"B{n} {case.name}", batch=n) for n in (1, 8, 64)]


SHAPES: dict[SetName, tuple[Case, ...]] = {
    "tiny": (Case("B3 16/8", 3, 4, 2, 8, 16, 8, num_slots=20, dtype="float32", rounds=3),),
    "cpu": (
        Case("B1 2048/1024 H24 D64", 1, 24, 24, 64, 2048, 1024, dtype="float32"),
        Case("B8 2048/1024 H16/8 D64", 8, 16, 8, 64, 2048, 1024, dtype="float32"),
    ),
    "paper": (
        *_at_batches(Case("8192/4096 H16/8 D128", 1, 16, 8, 128, 8192, 4096)),
        *_at_batches(Case("2048/1024 H24 D64", 1, 24, 24, 64, 2048, 1024)),
    ),
    "parity": (
        Case("300/100 H16/8 D128, 517 slots", 3, 16, 8, 128, 300, 100, num_slots=517),
        Case("1000/999 H17 of one kv head D64", 2, 17, 1, 64, 1000, 999, dtype="float16"),
        Case("256/256 H6/2 D32", 4, 6, 2, 32, 256, 256),
        Case("300/1 H24 D64, beginning", 9, 24, 24, 64, 300, 1, first_position=0, dtype="float32"),
    ),
}
