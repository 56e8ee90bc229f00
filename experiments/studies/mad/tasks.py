"""The six synthetic tasks of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid
Architectures"): rows that are bit-equal to the published ones, 66 settings, published scores.

Recall tasks train on every next token, noise and padding included, and are tested on the values a
model can know. The others have the same kind of targets in both splits, aligned with the inputs
instead of shifted.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from ttcd_jax.config import Bound, Config, Decay, NonNegative, Positive
from ttcd_jax.measure.page import published

IGNORE = -100
# The published scores in percent, by method and task. Its "overall" of DeltaNet, Gated DeltaNet and
# LaCT is not the mean of the six.
PUBLISHED = {row["method"]: row for x in published("mad") for row in x.table}
TASKS = tuple(PUBLISHED["ipttcd"])[1:]  # after "method"
TaskName = Annotated[str, Bound(f"one of {', '.join(TASKS)}", TASKS.__contains__)]
Motif = tuple[int, ...]
Piece = tuple[Motif, bool]  # tokens of a recall row, and whether the test asks for them
Row = tuple[Any, Any]  # inputs and targets, T tokens each


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
        return self.seq_len - (_TASKS[self.task][0] is recall)


class Rows(NamedTuple):
    """`inputs` and `targets`, int32 [N, T], of the host or a device; a target of -100 is not
    scored."""

    inputs: Any
    targets: Any


class Draws(NamedTuple):
    """The random streams of a data set, those of the published code, which training rows begin and
    test rows continue: `default_rng(seed)`, and numpy's global state after `seed(seed)`."""

    seed: int
    generator: np.random.Generator
    legacy: np.random.RandomState

    def below(self, n: int) -> int:
        return int(self.generator.integers(n))


def recall(config: MADConfig, draws: Draws, is_training: bool) -> Row:
    """In-context recall, plain and noisy: a repeated key is followed by its value. T = L - 1.

    Ids: keys, values, noise, in this order; keys are half of what noise leaves, values the rest. A
    row is L / 2 slots of two tokens. One slot, drawn first, is never noise; each other becomes two
    noise tokens with probability `frac_noise`. The last slot asks for a key of an earlier one.
    """
    num_ids = config.vocab_size - config.noise_vocab_size
    num_keys, num_slots, below = num_ids // 2, config.seq_len // 2, draws.below
    clean_slot, pieces, value_of = below(num_slots), [], {}
    for slot in range(num_slots - 1):
        may_be_noise = config.frac_noise > 0 and slot != clean_slot
        if may_be_noise and draws.generator.random() < config.frac_noise:
            noise = tuple(num_ids + below(config.noise_vocab_size) for _ in range(2))
            pieces.append((noise, False))
            continue
        key = below(num_keys)
        is_known = key in value_of
        if not is_known:
            value_of[key] = (num_keys + below(num_ids - num_keys),)
        pieces += [((key,), False), (value_of[key], is_known)]
    if not value_of:  # noise alone: no key to ask for, and the published code fails
        return recall(config, draws, is_training)
    probe = list(value_of)[below(len(value_of))]
    pieces += [((probe,), False), (value_of[probe], True)]
    return _recall_row(pieces, config.seq_len, 0, is_training)


def _recall_row(pieces: list[Piece], length: int, pad: int, is_training: bool) -> Row:
    """The row of a sequence of `length` T + 1, padded on the left: training asks for every next
    token, the test for the marked ones, the values of keys that were presented before."""
    marked = [(token, is_target) for piece, is_target in pieces for token in piece]
    marked = [(pad, False)] * (length - len(marked)) + marked
    targets = [token if is_training or is_target else IGNORE for token, is_target in marked]
    return [token for token, _ in marked[:-1]], targets[1:]


_motifs = functools.cache(lambda tokens, length: [*itertools.permutations(tokens, length)])


def fuzzy_recall(config: MADConfig, draws: Draws, is_training: bool) -> Row:
    """Fuzzy in-context recall: keys and values are motifs, tuples of distinct tokens. T = L.

    Ids: key tokens, value tokens, and the last id pads. Training draws a key's length from
    1 .. k_motif_size, the test takes the longest; a value's is drawn from 1 .. v_motif_size. One
    pair, the probe, is drawn first, inserted at the first pair from a drawn position on unless its
    key was drawn before, and asked for at the end (rarely it was never presented). Lengths are
    drawn for every pair; those of a known key or of the probe are not used.
    """
    pad, most_k, most_v = config.vocab_size - 1, config.k_motif_size, config.v_motif_size
    lengths = range(1 if is_training else most_k, most_k + 1), range(1, most_v + 1)
    ids = range(pad // 2), range(pad // 2, pad)
    every = [{n: _motifs(x, n) for n in y} for x, y in zip(ids, lengths, strict=True)]
    # The published code shuffles all motifs for every row.
    orders = [{n: draws.generator.permutation(len(x[n])) for n in x} for x in every]

    def draw_sizes() -> list[int]:
        return [x[draws.below(len(x))] for x in lengths]

    def draw(kind: int, sizes: list[int]) -> Motif:
        """A key (kind 0) or value (1)."""
        motifs, order = every[kind][sizes[kind]], orders[kind][sizes[kind]]
        return motifs[order[draws.below(len(motifs))]]

    sizes = draw_sizes()
    probe = draw(0, sizes)
    value_of = {probe: draw(1, sizes)}
    probe_position = draws.below(config.seq_len - 2 * sum(sizes))
    room = config.seq_len - sum(sizes) - most_k - most_v
    pieces, presented, num_tokens = [], set(), 0
    while num_tokens < room:
        sizes = draw_sizes()
        is_probe = num_tokens >= probe_position and probe not in presented
        key = probe if is_probe else draw(0, sizes)
        if key not in value_of:
            value_of[key] = draw(1, sizes)
        pieces += [(key, False), (value_of[key], key in presented)]
        presented.add(key)
        num_tokens += len(key + value_of[key])
    pieces += [(probe, False), (value_of[probe], True)]
    return _recall_row(pieces, config.seq_len + 1, pad, is_training)


def key_value_map(config: MADConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, their values) of memorization, [(V - 1) // 2] each, in the shuffled order that rows
    index. A surplus value is left out."""
    num_keys = (config.vocab_size - 1) // 2
    generator = np.random.default_rng(seed)
    keys = generator.permutation(num_keys)
    return keys, num_keys + generator.permutation(config.vocab_size - 1 - num_keys)[:num_keys]


def memorization(config: MADConfig, draws: Draws, _is_training: bool) -> Row:
    """The insert id V - 1 follows a key, and its target is the value in a fixed map, which is never
    in the context, so that only weights can hold it. Keys are half of 0 .. V - 2, values the rest.
    """
    keys, values = key_value_map(config, draws.seed)
    x, t = np.full(config.seq_len, config.vocab_size - 1), np.full(config.seq_len, IGNORE)
    num_slots = config.seq_len // 2
    draws.below(num_slots)  # the slot that noise would leave out; this task has none
    chosen = draws.generator.integers(0, len(keys), num_slots)
    x[0::2], t[1::2] = keys[chosen], values[chosen]
    return x, t


def compression(config: MADConfig, draws: Draws, _is_training: bool) -> Row:
    """Drawn tokens 0 .. V - 2, then the compression id V - 1; every token is its own target. The
    model makes it a task: its decoder sees the last position's output alone."""
    last = config.vocab_size - 1
    x = [*draws.generator.integers(0, last, config.seq_len - 1), last]
    return x, x


def copying(config: MADConfig, draws: Draws, _is_training: bool) -> Row:
    """Selective copying: repeat the content, 0 .. V - 3, in order, without the blanks V - 2 between
    it. A row reads content with blanks, the copy id V - 1, then as many blanks as there is content;
    there the content is the target."""
    num_copied, blank = config.num_tokens_to_copy, config.vocab_size - 2
    content = draws.generator.integers(0, blank, num_copied)
    # A blank goes before the content element it drew, so never right before the copy id.
    before = draws.legacy.randint(0, num_copied, config.seq_len - 2 * num_copied - 1)
    x = [*np.insert(content, before, blank), blank + 1, *[blank] * num_copied]
    return x, [*[IGNORE] * (len(x) - num_copied), *content]


def instances(config: MADConfig, *, seed: int, num_train: int, num_test: int) -> list[Rows]:
    """The published training and test rows of a seed, 0 .. 2^32 - 1: a pure function of its
    arguments. One stream serves the training rows first, then the test rows: these change with
    `num_train`, while a shorter training split is a prefix of a longer one."""
    draws = Draws(seed, np.random.default_rng(seed), np.random.RandomState(seed))
    draw, splits = _TASKS[config.task][0], []
    for num_rows, is_training in ((num_train, True), (num_test, False)):
        rows = np.empty((2, num_rows, config.num_positions), np.int32)
        for row in range(num_rows):
            rows[:, row] = draw(config, draws, is_training)
        splits.append(Rows(*rows))
    return splits


_ROWS = {"num_train": (6400, 3200, 1600, 800)}
_RECALL = {"vocab_size": (32, 64, 128), "seq_len": (256, 512, 1024)} | _ROWS
_NOISE = {"vocab_size": 32, "frac_noise": 0.2, "noise_vocab_size": 16}
_NOISY = _RECALL | {"vocab_size": (48, 80, 144), "frac_noise": (0.4, 0.6, 0.8)}
_MAP = {"vocab_size": 256, "seq_len": 32, "num_train": 256}
_COPIED = _RECALL | {"seq_len": (512, 1024), "num_tokens_to_copy": (32, 64, 96)}
# What draws the next row of a task, the sizes of its baseline that are no defaults, and the other
# values that its sizes take.
_TASKS: dict[TaskName, tuple[Callable[..., Row], dict[str, Any], dict[str, Any]]] = {
    "in-context-recall": (recall, {}, _RECALL),
    "noisy-in-context-recall": (recall, _NOISE, _NOISY),
    "fuzzy-in-context-recall": (fuzzy_recall, {"k_motif_size": 3, "v_motif_size": 3}, _RECALL),
    "memorization": (memorization, _MAP, {"vocab_size": (512, 1024, 2048, 4096, 8192)}),
    "compression": (compression, {"seq_len": 32}, _RECALL | {"seq_len": (64, 128, 256)}),
    "selective-copying": (copying, {"seq_len": 256, "num_tokens_to_copy": 16}, _COPIED),
}


class Setting(NamedTuple):
    """A task at one size. `name` is "default" or the change, e.g. "seq_len=256"."""

    name: str
    config: MADConfig
    num_train: int


def settings(task: TaskName) -> list[Setting]:
    """All settings of a task, its baseline first."""
    _, sizes, others = _TASKS[task]
    changes = [{size: x} for size, values in others.items() for x in values]
    found = []
    for change in ({}, *changes):
        values = {"num_train": 12_800} | sizes | change
        name, num_train = "".join(f"{x}={y}" for x, y in change.items()), values.pop("num_train")
        found.append(Setting(name or "default", MADConfig(task=task, **values), num_train))
    return found


BASELINES = {task: settings(task)[0].config for task in TASKS}
