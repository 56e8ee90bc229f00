"""Sizes of a MAD task, the published ones, and which sizes cannot be."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
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

    Every recall is multi-query: each value that its key's earlier appearance gives away is asked
    for, not the last alone. Noise is read by noisy recall only, as in every published setting.
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
        fields, rules = _TASKS[self.task]
        for holds, rule in itertools.chain(_unread(self, fields), rules(self)):
            if not holds:
                raise UserError(f"MADConfig of {self.task}: {rule}")

    @property
    def num_positions(self) -> int:
        """T of a row. Exact recall loses a token to the shift; fuzzy recall is padded by one."""
        is_exact_recall = self.task in ("in-context-recall", "noisy-in-context-recall")
        return self.seq_len - 1 if is_exact_recall else self.seq_len


def _unread(config: MADConfig, fields: tuple[str, ...]) -> Iterator[Rule]:
    for field in dataclasses.fields(config):
        if field.name not in ("task", "vocab_size", "seq_len", *fields):
            value = getattr(config, field.name)
            yield (
                value == field.default,
                f"{field.name} {value} is not read by this task; leave it at {field.default}",
            )


def _pair_rules(config: MADConfig, special: str, num_ids: int) -> Iterator[Rule]:
    yield (
        num_ids >= 2,
        f"vocab_size {config.vocab_size}{special} leaves {num_ids} ids; "
        "a key and a value need 2 at least",
    )
    yield config.seq_len % 2 == 0, f"seq_len {config.seq_len} is odd; pairs need an even one"


def _recall_rules(config: MADConfig) -> Iterator[Rule]:
    noise = config.noise_vocab_size
    yield from _pair_rules(config, f" with noise_vocab_size {noise}", config.vocab_size - noise)
    yield config.seq_len >= 4, f"seq_len {config.seq_len} holds no pair and probe; take 4 or more"


def _noisy_recall_rules(config: MADConfig) -> Iterator[Rule]:
    frac_noise, noise_vocab_size = config.frac_noise, config.noise_vocab_size
    yield 0 < frac_noise < 1, f"frac_noise {frac_noise} must lie between 0 and 1, both excluded"
    yield noise_vocab_size >= 1, f"noise_vocab_size {noise_vocab_size} must be 1 or more"
    yield from _recall_rules(config)


def _fuzzy_recall_rules(config: MADConfig) -> Iterator[Rule]:
    num_keys = (config.vocab_size - 1) // 2
    kinds = (
        ("k_motif_size", config.k_motif_size, num_keys, "key"),
        ("v_motif_size", config.v_motif_size, config.vocab_size - 1 - num_keys, "value"),
    )
    for name, size, num_tokens, kind in kinds:
        yield size >= 1, f"{name} {size} must be 1 or more"
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
    longest = config.k_motif_size + config.v_motif_size
    yield (
        config.seq_len > 2 * longest,
        f"seq_len {config.seq_len} is too short for two pairs of {longest} tokens; "
        f"take {2 * longest + 1} or more",
    )


def _memorization_rules(config: MADConfig) -> Iterator[Rule]:
    yield from _pair_rules(config, " without the insert id", config.vocab_size - 1)
    yield config.seq_len >= 2, f"seq_len {config.seq_len} holds no key; take 2 or more"


def _compression_rules(config: MADConfig) -> Iterator[Rule]:
    yield config.vocab_size >= 2, f"vocab_size {config.vocab_size} has no content; take 2 or more"
    yield config.seq_len >= 2, f"seq_len {config.seq_len} holds no content; take 2 or more"


def _copying_rules(config: MADConfig) -> Iterator[Rule]:
    num_copied = config.num_tokens_to_copy
    yield config.vocab_size >= 3, f"vocab_size {config.vocab_size} has no content; take 3 or more"
    yield num_copied >= 1, f"num_tokens_to_copy {num_copied} must be 1 or more"
    yield (
        config.seq_len > 2 * num_copied + 1,
        f"seq_len {config.seq_len} leaves no blank beside num_tokens_to_copy {num_copied}; "
        f"take {2 * num_copied + 2} or more",
    )


# What each task reads beside vocab_size and seq_len, and what must hold.
_TASKS: dict[str, tuple[tuple[str, ...], Callable[[MADConfig], Iterator[Rule]]]] = {
    "in-context-recall": ((), _recall_rules),
    "noisy-in-context-recall": (("frac_noise", "noise_vocab_size"), _noisy_recall_rules),
    "fuzzy-in-context-recall": (("k_motif_size", "v_motif_size"), _fuzzy_recall_rules),
    "memorization": ((), _memorization_rules),
    "compression": ((), _compression_rules),
    "selective-copying": (("num_tokens_to_copy",), _copying_rules),
}

# The published baseline of each task.
BASELINES: dict[str, MADConfig] = {
    config.task: config
    for config in (
        MADConfig(task="in-context-recall"),
        MADConfig(
            task="noisy-in-context-recall", vocab_size=32, frac_noise=0.2, noise_vocab_size=16
        ),
        MADConfig(task="fuzzy-in-context-recall", k_motif_size=3, v_motif_size=3),
        MADConfig(task="memorization", vocab_size=256, seq_len=32),
        MADConfig(task="compression", seq_len=32),
        MADConfig(task="selective-copying", seq_len=256, num_tokens_to_copy=16),
    )
}
