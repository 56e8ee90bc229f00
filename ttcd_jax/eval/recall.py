"""Recall accuracy by distance: how far back a model can look a value up."""

from typing import Any

import numpy as np

from ttcd_jax.eval.scorer import Scores
from ttcd_jax.models.catalog import TransformerConfig

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
