"""The shapes dual-window attention is measured at."""

from typing import NamedTuple

from ttcd_kernels.measure import SetName


class Case(NamedTuple):
    """One call: windows count the query itself, `None` sees everything."""

    name: str
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    teacher_window: int | None
    student_window: int
    batch: int = 1
    dtype: str = "bfloat16"
    rounds: int = 5

    @property
    def pairs(self) -> tuple[int, int]:
        """Query-key pairs of one head in the teacher's and in the student's window."""

        def count(window: int | None) -> int:
            window = min(window or self.length, self.length)
            return window * self.length - window * (window - 1) // 2

        return count(self.teacher_window), count(self.student_window)


SHAPES: dict[SetName, tuple[Case, ...]] = {
    "tiny": (
        Case("64 tokens, 16/8", 64, 4, 2, 8, 16, 8, batch=2, dtype="float32", rounds=3),
        Case("48 tokens, full/8", 48, 2, 2, 8, None, 8, dtype="float32", rounds=3),
    ),
    "cpu": (
        Case("4K 2048/1024 H16 D64", 4096, 16, 16, 64, 2048, 1024, dtype="float32", rounds=3),
        Case("32K 2048/1024 H16 D64", 32768, 16, 16, 64, 2048, 1024, dtype="float32", rounds=1),
    ),
    "paper": (
        Case("64K 8192/4096 H16/8 D128", 65536, 16, 8, 128, 8192, 4096),
        Case("4 x 64K 8192/4096 H16/8 D128", 65536, 16, 8, 128, 8192, 4096, batch=4),
        Case("64K 2048/1024 H16/8 D128", 65536, 16, 8, 128, 2048, 1024),
        Case("64K 16384/8192 H16/8 D128", 65536, 16, 8, 128, 16384, 8192),
        Case("64K 8192/7936 H16/8 D128", 65536, 16, 8, 128, 8192, 7936),
        Case("64K full/2048 H16/8 D128", 65536, 16, 8, 128, None, 2048),
        Case("760M: 32K 2048/1024 H24 D64", 32768, 24, 24, 64, 2048, 1024),
        Case("760M: 4 x 32K 2048/1024 H24 D64", 32768, 24, 24, 64, 2048, 1024, batch=4),
        Case("340M: 4 x 32K 2048/1024 H16 D64", 32768, 16, 16, 64, 2048, 1024, batch=4),
        Case("256K 8192/4096 H16/8 D128", 262_144, 16, 8, 128, 8192, 4096, rounds=3),
        Case("1M 8192/4096 H16/8 D128", 1_048_576, 16, 8, 128, 8192, 4096, rounds=3),
    ),
    "parity": (
        Case("300, 100/45 H4/2 D64", 300, 4, 2, 64, 100, 45, dtype="float32"),
        Case("300, 100/45 H4/2 D64", 300, 4, 2, 64, 100, 45, batch=2),
        Case("257, 130/129 H2/2 D128", 257, 2, 2, 128, 130, 129, dtype="float16"),
        Case("200, full/1 H2/1 D32", 200, 2, 1, 32, None, 1),
    ),
}
