"""The six synthetic tasks of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid
Architectures"): rows that are bit-equal to the published ones, 66 settings, published scores.

Recall tasks train on every next token, noise and padding included, and are tested on the values a
model can know. The others have the same kind of targets in both splits, aligned with the inputs
instead of shifted.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ttcd_jax.config import Config, Decay, NonNegative, Positive

IGNORE = -100
TaskName = Literal[
    "in-context-recall",
    "noisy-in-context-recall",
    "fuzzy-in-context-recall",
    "memorization",
    "compression",
    "selective-copying",
]
Motif = tuple[int, ...]
Piece = tuple[Motif, bool]  # tokens of a recall row, and whether the test asks for them


@dataclasses.dataclass(frozen=True, kw_only=True)
class MADConfig(Config):
    """A task and its sizes, with the published defaults; sizes of other tasks keep theirs. Every
    recall asks for the value of each key that appeared before, not for that of the last alone."""

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


class Rows(NamedTuple):
    """`inputs` and `targets`, int32 [N, T], of the host or a device; a target of -100 is not
    scored."""

    inputs: Any
    targets: Any


class Splits(NamedTuple):
    """Both parts of a data set."""

    train: Rows
    test: Rows


class Draws(NamedTuple):
    """The random streams of a data set, those of the published code, which training rows begin and
    test rows continue: `default_rng(seed)`, and numpy's global state after `seed(seed)`."""

    seed: int
    generator: np.random.Generator
    legacy: np.random.RandomState

    def below(self, n: int) -> int:
        """A number in 0 .. n - 1."""
        return int(self.generator.integers(n))


def draw_recall(config: MADConfig, draws: Draws, num_rows: int, is_training: bool) -> Rows:
    """In-context recall, plain and noisy: a repeated key is followed by its value. T = L - 1.

    Ids: keys, values, noise, in this order; keys are half of what noise leaves, values the rest. A
    row is L / 2 slots of two tokens. One slot, drawn first, is never noise; each other becomes two
    noise tokens with probability `frac_noise`. The last slot asks for a key of an earlier one.
    """
    num_ids = config.vocab_size - config.noise_vocab_size
    num_keys, num_slots = num_ids // 2, config.seq_len // 2
    frac_noise, below, random = config.frac_noise, draws.below, draws.generator.random

    def pieces() -> list[Piece]:
        clean_slot, found, value_of = below(num_slots), [], {}
        for slot in range(num_slots - 1):
            if frac_noise > 0 and slot != clean_slot and random() < frac_noise:
                noise = tuple(num_ids + below(config.noise_vocab_size) for _ in range(2))
                found.append((noise, False))
                continue
            key = below(num_keys)
            is_known = key in value_of
            if not is_known:
                value_of[key] = (num_keys + below(num_ids - num_keys),)
            found += [((key,), False), (value_of[key], is_known)]
        if not value_of:  # noise alone: no key to ask for, and the published code fails
            return pieces()
        probe = list(value_of)[below(len(value_of))]
        return [*found, ((probe,), False), (value_of[probe], True)]

    return _recall_rows(pieces, (num_rows, config.seq_len), 0, is_training)


def _recall_rows(
    pieces: Callable[[], list[Piece]], shape: tuple[int, int], pad: int, is_training: bool
) -> Rows:
    """Rows of sequences [N, T + 1], padded on the left: training asks for every next token, the
    test for the marked ones, the values of keys that were presented before."""
    x, t = np.full(shape, pad, np.int32), np.full(shape, IGNORE, np.int32)
    for row in range(len(x)):
        marked = [(token, is_target) for piece, is_target in pieces() for token in piece]
        x[row, -len(marked) :] = [token for token, _ in marked]
        t[row, -len(marked) :] = [token if is_target else IGNORE for token, is_target in marked]
    return Rows(x[:, :-1], (x if is_training else t)[:, 1:])


def draw_fuzzy_recall(config: MADConfig, draws: Draws, num_rows: int, is_training: bool) -> Rows:
    """Fuzzy in-context recall: keys and values are motifs, tuples of distinct tokens. T = L.

    Ids: key tokens, value tokens, and the last id pads. Training draws a key's length from
    1 .. k_motif_size, the test takes the longest; a value's is drawn from 1 .. v_motif_size. One
    pair, the probe, is drawn first, inserted at the first pair from a drawn position on unless its
    key was drawn before, and asked for at the end (rarely it was never presented). Lengths are
    drawn for every pair; those of a known key or of the probe are not used.
    """
    pad, most_k, most_v = config.vocab_size - 1, config.k_motif_size, config.v_motif_size

    def pieces() -> list[Piece]:
        keys = _Motifs(draws, range(pad // 2), range(1 if is_training else most_k, most_k + 1))
        values = _Motifs(draws, range(pad // 2, pad), range(1, most_v + 1))
        lengths = keys.draw_length(), values.draw_length()
        probe = keys.draw(lengths[0])
        value_of = {probe: values.draw(lengths[1])}
        probe_position = draws.below(config.seq_len - 2 * sum(lengths))
        room = config.seq_len - sum(lengths) - most_k - most_v
        found, presented, num_tokens = [], set(), 0
        while num_tokens < room:
            lengths = keys.draw_length(), values.draw_length()
            is_probe = num_tokens >= probe_position and probe not in presented
            key = probe if is_probe else keys.draw(lengths[0])
            if key not in value_of:
                value_of[key] = values.draw(lengths[1])
            found += [(key, False), (value_of[key], key in presented)]
            presented.add(key)
            num_tokens += len(key + value_of[key])
        return [*found, (probe, False), (value_of[probe], True)]

    return _recall_rows(pieces, (num_rows, config.seq_len + 1), pad, is_training)


class _Motifs:
    """Motifs of several lengths, shuffled as the published code shuffles them for each row."""

    def __init__(self, draws: Draws, tokens: range, lengths: range) -> None:
        self._below, self._lengths = draws.below, lengths
        every = {length: _all_motifs(tokens, length) for length in lengths}
        self._motifs = {x: (y, draws.generator.permutation(len(y))) for x, y in every.items()}

    def draw_length(self) -> int:
        return self._lengths[self._below(len(self._lengths))]

    def draw(self, length: int) -> Motif:
        motifs, order = self._motifs[length]
        return motifs[order[self._below(len(motifs))]]


@functools.cache
def _all_motifs(tokens: range, length: int) -> list[Motif]:
    return list(itertools.permutations(tokens, length))


def key_value_map(config: MADConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, their values) of memorization, [(V - 1) // 2] each, in the shuffled order that rows
    index. A surplus value is left out."""
    num_keys = (config.vocab_size - 1) // 2
    generator = np.random.default_rng(seed)
    keys = generator.permutation(num_keys)
    values = num_keys + generator.permutation(config.vocab_size - 1 - num_keys)
    return keys, values[:num_keys]


def draw_memorization(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """The insert id V - 1 follows a key, and its target is the value in a fixed map, which is never
    in the context, so that only weights can hold it. Keys are half of 0 .. V - 2, values the rest.
    """
    keys, values = key_value_map(config, draws.seed)
    num_slots = config.seq_len // 2
    # Every row first draws a slot that noise would leave out; this task has none.
    limits = np.full((num_rows, 1 + num_slots), len(keys))
    limits[:, 0] = num_slots
    chosen = draws.generator.integers(0, limits)[:, 1:]
    x = np.full((num_rows, config.seq_len), config.vocab_size - 1, np.int32)
    t = np.full_like(x, IGNORE)
    x[:, 0::2], t[:, 1::2] = keys[chosen], values[chosen]
    return Rows(x, t)


def draw_compression(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """Drawn tokens 0 .. V - 2, then the compression id V - 1; every token is its own target. The
    model makes it a task: its decoder sees the last position's output alone."""
    last = config.vocab_size - 1
    x = np.full((num_rows, config.seq_len), last, np.int32)
    x[:, :-1] = draws.generator.integers(0, last, size=(num_rows, config.seq_len - 1))
    return Rows(x, x.copy())


def draw_copying(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """Selective copying: repeat the content, 0 .. V - 3, in order, without the blanks V - 2 between
    it. A row reads content with blanks, the copy id V - 1, then as many blanks as there is content;
    there the content is the target."""
    num_copied, blank = config.num_tokens_to_copy, config.vocab_size - 2
    num_blanks = config.seq_len - 2 * num_copied - 1
    content = draws.generator.integers(0, blank, size=(num_rows, num_copied))
    # A blank goes before the content element it drew, so never right before the copy id.
    before = draws.legacy.randint(0, num_copied, size=(num_rows, num_blanks))
    element = np.broadcast_to(np.arange(num_copied), content.shape)
    order = np.argsort(np.concatenate([before, element], 1), axis=1, kind="stable")
    mixed = np.concatenate([np.full_like(before, blank), content], 1)
    x = np.full((num_rows, config.seq_len), blank, np.int32)
    x[:, : num_blanks + num_copied] = np.take_along_axis(mixed, order, 1)
    x[:, num_blanks + num_copied] = config.vocab_size - 1
    t = np.full_like(x, IGNORE)
    t[:, -num_copied:] = content
    return Rows(x, t)


Changes = dict[str, tuple[float, ...]]  # size -> the other values that it takes


class Task(NamedTuple):
    """A task: the sizes of its baseline that are no defaults, their changes, and `draw(config,
    draws, num_rows, is_training)`, which takes the next rows from the stream."""

    sizes: dict[str, Any]
    changes: Changes
    draw: Callable[[MADConfig, Draws, int, bool], Rows]
    num_train: int = 12_800


class Setting(NamedTuple):
    """A task at one size. `name` is "default" or the change, e.g. "seq_len=256"."""

    name: str
    config: MADConfig
    num_train: int


_ROWS: Changes = {"num_train": (6400, 3200, 1600, 800)}
_RECALL: Changes = {"vocab_size": (32, 64, 128), "seq_len": (256, 512, 1024)} | _ROWS
_NOISY: Changes = _RECALL | {"vocab_size": (48, 80, 144), "frac_noise": (0.4, 0.6, 0.8)}
_MEMORIZED: Changes = {"vocab_size": (512, 1024, 2048, 4096, 8192)}
_COMPRESSED: Changes = _RECALL | {"seq_len": (64, 128, 256)}
_COPIED: Changes = _RECALL | {"seq_len": (512, 1024), "num_tokens_to_copy": (32, 64, 96)}
_TASKS: dict[TaskName, Task] = {
    "in-context-recall": Task({}, _RECALL, draw_recall),
    "noisy-in-context-recall": Task(
        {"vocab_size": 32, "frac_noise": 0.2, "noise_vocab_size": 16}, _NOISY, draw_recall
    ),
    "fuzzy-in-context-recall": Task(
        {"k_motif_size": 3, "v_motif_size": 3}, _RECALL, draw_fuzzy_recall
    ),
    "memorization": Task({"vocab_size": 256, "seq_len": 32}, _MEMORIZED, draw_memorization, 256),
    "compression": Task({"seq_len": 32}, _COMPRESSED, draw_compression),
    "selective-copying": Task({"seq_len": 256, "num_tokens_to_copy": 16}, _COPIED, draw_copying),
}
TASKS: tuple[TaskName, ...] = get_args(TaskName)
BASELINES = {name: MADConfig(task=name, **task.sizes) for name, task in _TASKS.items()}
# The published scores in percent, in the order of TASKS: best of 3 rates and 2 decays for each of
# the 66 settings. Its "overall" of DeltaNet, Gated DeltaNet and LaCT is not the mean of the six.
PUBLISHED: dict[str, dict[str, float]] = {
    method: dict(zip(TASKS, scores, strict=True))
    for method, scores in {
        "ipttcd": (99.3, 98.8, 56.2, 88.9, 50.0, 99.2),
        "ipttt": (98.1, 97.1, 52.4, 82.9, 43.4, 96.6),
        "deltanet": (99.9, 86.7, 25.1, 55.5, 42.3, 100.0),
        "gated_deltanet": (99.9, 99.7, 18.2, 86.9, 47.3, 99.9),
        "lact": (100.0, 100.0, 18.6, 80.7, 48.3, 99.8),
    }.items()
}


def settings(task: TaskName) -> list[Setting]:
    """All settings of a task, its baseline first."""
    found = [Setting("default", BASELINES[task], _TASKS[task].num_train)]
    for size, values in _TASKS[task].changes.items():
        for value in values:
            change: dict[str, Any] = {size: value}
            config, num_train = found[0].config, change.pop("num_train", found[0].num_train)
            found.append(Setting(f"{size}={value}", config.replace(**change), num_train))
    return found


def instances(config: MADConfig, *, seed: int, num_train: int, num_test: int) -> Splits:
    """The published instances of a seed, 0 .. 2^32 - 1: a pure function of its arguments. One
    stream serves the training rows first, then the test rows: these change with `num_train`, while
    a shorter training split is a prefix of a longer one."""
    draws = Draws(seed, np.random.default_rng(seed), np.random.RandomState(seed))
    draw = _TASKS[config.task].draw
    train = draw(config, draws, num_train, True)
    return Splits(train, test=draw(config, draws, num_test, False))
