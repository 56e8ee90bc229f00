"""Recall accuracy by distance: how far back a model can look a value up, in one pass or while it
decodes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.data.synthetic.recall import Needles
from ttcd_jax.eval.scorer import Scores
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.prefill import Memory, prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.models.config import TransformerConfig

_BUCKETS_BEYOND = 4


def attention_reach(config: TransformerConfig) -> int | None:
    """How many positions back stacked windows can carry anything: Y (w - 1); None without limit."""
    return None if config.window is None else config.num_layers * (config.window - 1)


def by_distance(
    scores: Scores, rows: dict[str, np.ndarray], reach: int | None
) -> list[dict[str, Any]]:
    """Accuracy at query positions: within the reach of attention, in equal buckets beyond it, and
    over everything beyond."""
    distance, mask = rows["distance"], rows["loss_mask"]
    longest = int(distance.max())
    reach = longest if reach is None else min(reach, longest)
    edges = np.unique(np.linspace(reach, longest, _BUCKETS_BEYOND + 1).astype(int))
    buckets = [(0, reach), *zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    if reach < longest:
        buckets.append((reach, longest))
    records = []
    for index, (low, high) in enumerate(buckets):
        chosen = mask & (distance > low) & (distance <= high)
        if not chosen.any():
            continue
        is_total = index == len(buckets) - 1 and reach < longest
        records.append(
            {
                "distance": f"beyond {low}" if is_total else f"{low + 1}-{high}",
                "is_total": is_total,
                "queries": int(chosen.sum()),
                "accuracy": float(scores.is_hit[chosen].mean()),
            }
        )
    return records


def while_decoding(
    model: InferenceModel, needles: Needles, distances: Iterable[int], memory: Memory = "kept"
) -> list[dict[str, Any]]:
    """Accuracy at needles that were read as a prompt, behind `distances` tokens of haystack that
    went through `decode` one by one; up to the length of the haystack."""
    num_rows, num_tokens = needles.haystack.shape
    max_length = needles.pairs.shape[1] + num_tokens + 1
    state = start_state(model, num_rows, max_length=max_length)
    _, state = prefill(model, state, needles.pairs, memory=memory)
    records, read = [], 0
    for distance in sorted(distances):
        for tokens in needles.haystack[:, read:distance].T:
            _, state = decode(model, state, tokens, memory=memory)
        read = distance
        is_hit = np.empty(needles.keys.shape, bool)
        for index, keys in enumerate(needles.keys.T):
            # Every question is asked of a copy: a state that was read on from is gone.
            logits, _ = decode(model, jax.tree.map(jnp.copy, state), keys, memory=memory)
            is_hit[:, index] = np.asarray(logits).argmax(-1) == needles.values[:, index]
        records.append(
            {
                "distance": str(distance),
                "queries": is_hit.size,
                "accuracy": float(is_hit.mean()),
            }
        )
    return records
