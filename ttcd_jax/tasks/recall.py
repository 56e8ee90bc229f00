"""Accuracy of stated values by distance back to them: in one pass, and after a haystack."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.config import DISTINCT, Positive
from ttcd_jax.data.sources import synthetic_data
from ttcd_jax.data.synthetic import (
    HELD_OUT,
    EvidenceConfig,
    Needles,
    RecallConfig,
    SyntheticConfig,
    SyntheticRows,
)
from ttcd_jax.errors import UserError
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.prefill import MemoryMode, prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import (
    Arrays,
    Differences,
    RowTask,
    Series,
    Subject,
    Task,
    register,
    row_scores,
)
from ttcd_jax.models.config import TransformerConfig, block_configs, has_in_place_memory
from ttcd_jax.nn.attention import AttentionConfig

_BUCKETS_BEYOND = 4
_MAX_NEEDLES = 4
By = Literal["decode", "prefill"]  # how a haystack is read


class DistanceAccuracy(NamedTuple):
    """The accuracy of queries at such distances; `is_total`: of all beyond the reach."""

    distance: str
    queries: int
    accuracy: float
    is_total: bool = False


class OnDrawnData(Task):
    """Accuracy of a run on `data`."""

    record = DistanceAccuracy
    key = "distance"
    interval = "queries"
    data: ClassVar[type[SyntheticConfig]]

    @classmethod
    def differences(
        cls, seeds: Sequence[Sequence[DistanceAccuracy]], base: Sequence[Sequence[DistanceAccuracy]]
    ) -> Differences:
        """For one seed over the queries, after Agresti and Caffo (2000)."""
        found = super().differences(seeds, base)
        if len(seeds) > 1:
            return found
        variances = dict.fromkeys(found, 0.0)
        for x in (x for records in (*seeds, *base) for x in records if x.distance in found):
            share = (x.accuracy * x.queries + 1) / (x.queries + 2)
            variances[x.distance] += share * (1 - share) / (x.queries + 2)
        halves = {name: 1.96 * variance**0.5 for name, variance in variances.items()}
        return {x: (mean, mean - halves[x], mean + halves[x]) for x, (mean, *_) in found.items()}

    @classmethod
    def data_of(cls, subject: Subject) -> SyntheticConfig:
        """Raises `UserError` for a run on other data."""
        if not isinstance(config := synthetic_data(subject.data), cls.data):
            known = "ppl" if config is None else config.kind
            raise UserError(
                f"{subject.run_dir} was not trained on {cls.data.kind} data: use --task={known}"
            )
        return config

    def chance(self, subject: Subject) -> float:
        return 1 / self.data_of(subject).num_values


@register
class Recall(OnDrawnData, RowTask[DistanceAccuracy]):
    """Accuracy at queries by the distance back to their value."""

    name = "recall"
    title = "Recall accuracy by distance"
    x_label = "distance from the query back to the value (tokens)"
    rank = 45
    data = RecallConfig

    def source(self, subject: Subject) -> SyntheticRows:
        return SyntheticRows(self.data_of(subject), seed=HELD_OUT, num_rows=self.max_rows)

    def measure(self, scorer: Scorer, rows: Arrays, subject: Subject) -> Iterator[DistanceAccuracy]:
        """Within the reach of attention, in equal buckets beyond it, and over all beyond."""
        losses, is_hit = row_scores(scorer, rows)
        is_hit = np.where(np.isnan(losses), np.nan, is_hit)  # no prediction
        distance, mask = rows["distance"], rows["loss_mask"]
        longest, reach = int(distance.max()), attention_reach(subject.model.config)
        reach = longest if reach is None else min(reach, longest)
        edges = np.unique(np.linspace(reach, longest, _BUCKETS_BEYOND + 1).astype(int))
        buckets = [(0, reach, False), *((*x, False) for x in itertools.pairwise(edges.tolist()))]
        for low, high, is_total in (*buckets, (reach, longest, True)):
            chosen = mask & (distance > low) & (distance <= high)
            if chosen.any():
                name = f"beyond {low}" if is_total else f"{low + 1}-{high}"
                accuracy = float(is_hit[chosen].mean())
                yield DistanceAccuracy(name, int(chosen.sum()), accuracy, is_total)


@register
class Evidence(Recall):
    """Accuracy at keys by the distance back to their value. Chance knows which values a row has."""

    name = "evidence"
    title = "Evidence: accuracy by distance"
    rank = 44
    data = EvidenceConfig

    def chance(self, subject: Subject) -> float:
        return 1 / EvidenceConfig.from_dict(subject.data).num_facts


@register
class Needle(OnDrawnData):
    """Accuracy of a prompt's values after each of `distances` tokens of other facts. They are read
    by "decode", one by one, with the memory on, and off, as published, or by "prefill" in one pass,
    with fast weights on and off, for thousands of them (`by`), in `num_rows` rows."""

    name = "needle"
    title = "Needles read back"
    data = SyntheticConfig
    x_label = "tokens of other facts between the value and the query"
    rank = 46

    distances: Annotated[tuple[Positive, ...], DISTINCT] = (16, 32, 64, 128, 256, 512)
    num_rows: Positive = 16
    by: By = "decode"

    def rows(self, subject: Subject) -> Needles:
        if jax.process_count() > 1:
            raise UserError(
                f"task needle decodes in one process, not in {jax.process_count()}: leave "
                "--distributed out"
            )
        config = self.data_of(subject)
        return config.needles(
            seed=HELD_OUT,
            num_rows=self.num_rows,
            num_needles=max(1, min(_MAX_NEEDLES, config.num_keys // 2)),
            num_tokens=max(self.distances),
        )

    def series(self, subject: Subject, rows: Needles) -> Series[DistanceAccuracy]:
        if self.by == "prefill" or not has_in_place_memory(subject.model.config):
            return super().series(subject, rows)
        modes = {f"{subject.name}, memory {mode}": mode for mode in get_args(MemoryMode)}
        scorer = self.scorer(subject, subject.name, subject.model)
        return {x: [*self.measure(scorer, rows, subject, memory)] for x, memory in modes.items()}

    def measure(
        self, scorer: Scorer, rows: Needles, subject: Subject, memory: MemoryMode = "kept"
    ) -> Iterator[DistanceAccuracy]:
        return read_back(scorer.inference, rows, self.distances, memory, self.by)


def attention_reach(config: TransformerConfig) -> int | None:
    """The number of positions back that stacked windows reach, Y (w - 1); None: unlimited; 0
    without attention."""
    layers = (x for block in block_configs(config) for x in block.sublayers.values())
    if not any(isinstance(x, AttentionConfig) or hasattr(x, "attention") for x in layers):
        return 0
    window = config.stream_window
    return None if window is None else config.num_layers * (window - 1)


def read_back(
    model: InferenceModel, needles: Needles, distances: Iterable[int], memory: MemoryMode, by: By
) -> Iterator[DistanceAccuracy]:
    """Accuracy at the needles of a prompt after each of `distances` tokens of haystack, at most all
    of it, read one by one or in one pass."""
    max_length = sum(part.shape[-1] for part in needles[:3])
    state = start_state(model, len(needles.facts), max_length=max_length)
    _, state = prefill(model, state, needles.facts, memory=memory)
    read = 0
    for distance in sorted(distances):
        tokens = needles.haystack[:, read:distance]
        if by == "prefill":
            _, state = prefill(model, state, tokens, memory=memory)
        else:
            for column in tokens.T:
                _, state = decode(model, state, column, memory=memory)
        read = distance
        is_hit = np.empty(needles.values.shape)
        for index, question in enumerate(needles.questions.swapaxes(0, 1)):
            asked = jax.tree.map(jnp.copy, state)  # reading donates a state
            if (before := question[:, :-1]).size:
                _, asked = prefill(model, asked, before, memory=memory)
            logits, _ = decode(model, asked, question[:, -1], memory=memory)
            found = np.asarray(logits)
            hits = found.argmax(-1) == needles.values[:, index]
            is_hit[:, index] = np.where(np.isnan(found).any(-1), np.nan, hits)
        yield DistanceAccuracy(str(distance), is_hit.size, float(is_hit.mean()))
