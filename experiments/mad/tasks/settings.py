"""The 66 settings of the published sweep: each task's baseline and its one-at-a-time changes."""

from typing import Any, NamedTuple, get_args

from experiments.mad.tasks.config import BASELINES, MADConfig, TaskName

NUM_TEST = 1280
DEFAULT = "default"
_NUM_TRAIN = {"memorization": 256}
_USUAL_NUM_TRAIN = 12_800
_FEWER_ROWS = (6400, 3200, 1600, 800)
_LENGTHS = (256, 512, 1024)

# Task -> the values each size takes beside the baseline's. Noise ids are part of the vocabulary.
_CHANGES: dict[str, dict[str, tuple[float, ...]]] = {
    "in-context-recall": {
        "vocab_size": (32, 64, 128),
        "seq_len": _LENGTHS,
        "num_train": _FEWER_ROWS,
    },
    "noisy-in-context-recall": {
        "vocab_size": (48, 80, 144),
        "seq_len": _LENGTHS,
        "num_train": _FEWER_ROWS,
        "frac_noise": (0.4, 0.6, 0.8),
    },
    "fuzzy-in-context-recall": {
        "vocab_size": (32, 64, 128),
        "seq_len": _LENGTHS,
        "num_train": _FEWER_ROWS,
    },
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "compression": {
        "vocab_size": (32, 64, 128),
        "seq_len": (64, 128, 256),
        "num_train": _FEWER_ROWS,
    },
    "selective-copying": {
        "vocab_size": (32, 64, 128),
        "seq_len": (512, 1024),
        "num_train": _FEWER_ROWS,
        "num_tokens_to_copy": (32, 64, 96),
    },
}
TASKS: tuple[TaskName, ...] = get_args(TaskName)


class Setting(NamedTuple):
    """A task at one size. `name` is "default" or the change, as "seq_len=256"."""

    name: str
    config: MADConfig
    num_train: int


def settings(task: str) -> tuple[Setting, ...]:
    """All settings of a task, its baseline first."""
    baseline, rows = BASELINES[task], _NUM_TRAIN.get(task, _USUAL_NUM_TRAIN)
    changed = [
        _changed(baseline, rows, field, value)
        for field, values in _CHANGES[task].items()
        for value in values
    ]
    return (Setting(DEFAULT, baseline, rows), *changed)


def _changed(baseline: MADConfig, num_train: int, field: str, value: Any) -> Setting:
    name = f"{field}={value}"
    if field == "num_train":
        return Setting(name, baseline, value)
    return Setting(name, baseline.replace(**{field: value}), num_train)
