"""The sizes of a MAD task, the published ones, and the limits of each task."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError

TaskName = Literal[
    "in-context-recall",
    "noisy-in-context-recall",
    "fuzzy-in-context-recall",
    "memorization",
    "compression",
    "selective-copying",
]
# Every fuzzy row shuffles all motifs of each length; beyond this it would take seconds per row.
_MAX_MOTIFS = 2**24

Rule = tuple[bool, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MADConfig(Config):
    """A task and its sizes, with the published defaults. A task refuses sizes it does not read.

    Every recall is multi-query: the value of each key that appeared before is asked for, not that
    of the last alone. Noise is read by noisy recall only, as in every published setting.
    """

    task: TaskName
    vocab_size: int = 16
    seq_len: int = 128
    frac_noise: float = 0.0
    noise_vocab_size: int = 0
    num_tokens_to_copy: int = 0
    k_motif_size: int = 1
    v_motif_size: int = 1

    def validate(self) -> None:
        for holds, rule in itertools.chain(_unread(self), _minima(self), _ids(self)):
            if not holds:
                raise UserError(f"MADConfig of {self.task}: {rule}")

    @property
    def num_positions(self) -> int:
        """T of a row. Exact recall loses a token to the shift; fuzzy recall is padded by one."""
        is_exact_recall = self.task in ("in-context-recall", "noisy-in-context-recall")
        return self.seq_len - 1 if is_exact_recall else self.seq_len


# The sizes of a task apart from vocab_size and seq_len.
_READS: dict[str, tuple[str, ...]] = {
    "noisy-in-context-recall": ("frac_noise", "noise_vocab_size"),
    "fuzzy-in-context-recall": ("k_motif_size", "v_motif_size"),
    "selective-copying": ("num_tokens_to_copy",),
}


def _unread(config: MADConfig) -> Iterator[Rule]:
    reads = ("task", "vocab_size", "seq_len", *_READS.get(config.task, ()))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        yield (
            field.name in reads or value == field.default,
            f"{field.name} {value} is not read by this task; leave it at {field.default}",
        )


def _minima(config: MADConfig) -> Iterator[Rule]:
    """The smallest value of each size, and the fault of one below it."""
    copied, pair = config.num_tokens_to_copy, config.k_motif_size + config.v_motif_size
    recall, small = ("seq_len", 4, "holds no pair and probe"), "is too small"
    two_pairs = ("seq_len", 2 * pair + 1, f"is too short for two pairs of {pair} tokens")
    room = ("seq_len", 2 * copied + 2, f"has no blank with num_tokens_to_copy {copied}")
    content = "has no content"
    minima: dict[TaskName, list[tuple[str, int, str]]] = {
        "in-context-recall": [recall],
        "noisy-in-context-recall": [recall, ("noise_vocab_size", 1, small)],
        "fuzzy-in-context-recall": [*((f"{x}_motif_size", 1, small) for x in "kv"), two_pairs],
        "memorization": [("seq_len", 2, "holds no key")],
        "compression": [("vocab_size", 2, content), ("seq_len", 2, "holds no content")],
        "selective-copying": [("vocab_size", 3, content), ("num_tokens_to_copy", 1, small), room],
    }
    for name, least, fault in minima[config.task]:
        value = getattr(config, name)
        yield value >= least, f"{name} {value} {fault}; take {least} or more"


def _ids(config: MADConfig) -> Iterator[Rule]:
    """The vocabulary and the lengths allow keys and values."""
    if config.task == "fuzzy-in-context-recall":
        yield from _motifs(config)
    if config.task == "noisy-in-context-recall":
        frac_noise = config.frac_noise
        yield 0 < frac_noise < 1, f"frac_noise {frac_noise} must be between 0 and 1, both excluded"
    if config.task in ("in-context-recall", "noisy-in-context-recall", "memorization"):
        special = "the insert id" if config.task == "memorization" else "noise"
        num_ids = config.vocab_size - (config.noise_vocab_size or config.task == "memorization")
        yield (
            num_ids >= 2,
            f"vocab_size {config.vocab_size} without {special} leaves {num_ids} ids; "
            "a key and a value need 2 at least",
        )
        yield config.seq_len % 2 == 0, f"seq_len {config.seq_len} is odd; pairs need an even one"


def _motifs(config: MADConfig) -> Iterator[Rule]:
    num_keys = (config.vocab_size - 1) // 2
    kinds = (
        ("k_motif_size", config.k_motif_size, num_keys, "key"),
        ("v_motif_size", config.v_motif_size, config.vocab_size - 1 - num_keys, "value"),
    )
    for name, size, num_tokens, kind in kinds:
        has = f"vocab_size {config.vocab_size} has {num_tokens} {kind} tokens"
        yield (
            size <= num_tokens,
            f"{has}, {name} {size} needs {size} distinct ones; take a larger vocab_size",
        )
        num_motifs = math.perm(max(num_tokens, 0), size)
        yield (
            num_motifs <= _MAX_MOTIFS,
            f"{has}, so {num_motifs} motifs of {name} {size}, which every row would shuffle; "
            f"{_MAX_MOTIFS} is the most",
        )


_PUBLISHED = (
    MADConfig(task="in-context-recall"),
    MADConfig(task="noisy-in-context-recall", vocab_size=32, frac_noise=0.2, noise_vocab_size=16),
    MADConfig(task="fuzzy-in-context-recall", k_motif_size=3, v_motif_size=3),
    MADConfig(task="memorization", vocab_size=256, seq_len=32),
    MADConfig(task="compression", seq_len=32),
    MADConfig(task="selective-copying", seq_len=256, num_tokens_to_copy=16),
)
BASELINES: dict[str, MADConfig] = {config.task: config for config in _PUBLISHED}
