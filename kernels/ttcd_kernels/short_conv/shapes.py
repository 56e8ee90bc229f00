"""The shapes the convolved residual is measured at."""

from typing import NamedTuple

from ttcd_kernels.measure import SetName


class Case(NamedTuple):
    """One call on `chunks` chunks of `length` tokens each."""

    name: str
    chunks: int
    length: int
    num_features: int
    num_taps: int = 5
    is_causal: bool = True
    normalizes_keys: bool = True
    has_documents: bool = False  # three in every chunk
    batch: int = 1
    dtype: str = "bfloat16"
    rounds: int = 5


SHAPES: dict[SetName, tuple[Case, ...]] = {
    "tiny": (
        Case("2 x 16 F32", 2, 16, 32, batch=2, dtype="float32", rounds=3),
        Case("2 x 16 F32 symmetric", 2, 16, 32, is_causal=False, dtype="float32", rounds=3),
    ),
    "cpu": (
        Case("4K chunk 1024 F2816", 4, 1024, 2816, dtype="float32", rounds=3),
        Case("4K chunk 1024 F2816 bf16", 4, 1024, 2816, rounds=3),
    ),
    "paper": (
        Case("760M: 32K chunk 1024 F4096", 32, 1024, 4096),
        Case("760M: 32K chunk 1024 F4096, documents", 32, 1024, 4096, has_documents=True),
        Case("760M: 32K chunk 1024 F4096, plain keys", 32, 1024, 4096, normalizes_keys=False),
        Case("760M: 4 x 32K chunk 1024 F4096", 32, 1024, 4096, batch=4),
        Case("340M: 4 x 32K chunk 1024 F2816", 32, 1024, 2816, batch=4),
        Case("64K chunk 4096 F3072", 16, 4096, 3072),
    ),
    "parity": (
        Case("2 x 2 x 300 F200", 2, 300, 200, batch=2, dtype="float32"),
        Case("2 x 2 x 300 F200", 2, 300, 200, batch=2),
        Case("3 x 131 F513 R4 symmetric", 3, 131, 513, 4, is_causal=False, dtype="float16"),
        Case("3 x 131 F264 documents", 3, 131, 264, has_documents=True),
        Case("2 x 7 F1000 R3 plain keys", 2, 7, 1000, 3, normalizes_keys=False),
    ),
}
