"""The published sweep: the sizes of a task, 66 settings, each the baseline of a task or one change
of it, and scores."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

from ttcd_jax.config import Config, Decay, NonNegative, Positive

TaskName = Literal[
    "in-context-recall",
    "noisy-in-context-recall",
    "fuzzy-in-context-recall",
    "memorization",
    "compression",
    "selective-copying",
]
TASKS: tuple[TaskName, ...] = get_args(TaskName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MADConfig(Config):
    """A task and its sizes, with the published defaults; sizes of other tasks keep theirs.

    Every recall is multi-query: the value of each key that appeared before is asked for, not that
    of the last alone.
    """

    task: TaskName
    vocab_size: Positive = 16  # noise ids are part of it
    seq_len: Positive = 128
    frac_noise: Decay = 0.0
    noise_vocab_size: NonNegative = 0
    num_tokens_to_copy: NonNegative = 0
    k_motif_size: Positive = 1
    v_motif_size: Positive = 1

    @property
    def num_positions(self) -> int:
        """T of a row. Exact recall loses a token to the shift; fuzzy recall is padded by one."""
        is_exact_recall = self.task in ("in-context-recall", "noisy-in-context-recall")
        return self.seq_len - 1 if is_exact_recall else self.seq_len


class Setting(NamedTuple):
    """A task at one size. `name` is "default" or the change, e.g. "seq_len=256"."""

    name: str
    config: MADConfig
    num_train: int


_PUBLISHED = (
    MADConfig(task="in-context-recall"),
    MADConfig(task="noisy-in-context-recall", vocab_size=32, frac_noise=0.2, noise_vocab_size=16),
    MADConfig(task="fuzzy-in-context-recall", k_motif_size=3, v_motif_size=3),
    MADConfig(task="memorization", vocab_size=256, seq_len=32),
    MADConfig(task="compression", seq_len=32),
    MADConfig(task="selective-copying", seq_len=256, num_tokens_to_copy=16),
)
BASELINES: dict[str, MADConfig] = {config.task: config for config in _PUBLISHED}
# Task -> the other values that each size takes.
_RECALL: dict[str, tuple[float, ...]] = {
    "vocab_size": (32, 64, 128),
    "seq_len": (256, 512, 1024),
    "num_train": (6400, 3200, 1600, 800),
}
_NOISE = {"vocab_size": (48, 80, 144), "frac_noise": (0.4, 0.6, 0.8)}
_CHANGES: dict[str, dict[str, tuple[float, ...]]] = {
    "in-context-recall": _RECALL,
    "noisy-in-context-recall": _RECALL | _NOISE,
    "fuzzy-in-context-recall": _RECALL,
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "compression": _RECALL | {"seq_len": (64, 128, 256)},
    "selective-copying": _RECALL | {"seq_len": (512, 1024), "num_tokens_to_copy": (32, 64, 96)},
}
# The published table, in percent, in the order of TASKS: best of 3 rates and 2 decays for each of
# the 66 settings. Its "overall" of DeltaNet, Gated DeltaNet and LaCT is not the mean of the six.
PUBLISHED: dict[str, dict[str, float]] = {
    method: dict(zip(TASKS, values, strict=True))
    for method, values in {
        "ipttcd": (99.3, 98.8, 56.2, 88.9, 50.0, 99.2),
        "ipttt": (98.1, 97.1, 52.4, 82.9, 43.4, 96.6),
        "deltanet": (99.9, 86.7, 25.1, 55.5, 42.3, 100.0),
        "gated_deltanet": (99.9, 99.7, 18.2, 86.9, 47.3, 99.9),
        "lact": (100.0, 100.0, 18.6, 80.7, 48.3, 99.8),
    }.items()
}


def settings(task: str) -> tuple[Setting, ...]:
    """All settings of a task, its baseline first."""
    first = Setting("default", BASELINES[task], num_train=256 if task == "memorization" else 12_800)
    changes = [(field, value) for field, values in _CHANGES[task].items() for value in values]
    return (first, *(_changed(first, *change) for change in changes))


def _changed(baseline: Setting, field: str, value: Any) -> Setting:
    name = f"{field}={value}"
    if field == "num_train":
        return baseline._replace(name=name, num_train=value)
    return baseline._replace(name=name, config=baseline.config.replace(**{field: value}))
