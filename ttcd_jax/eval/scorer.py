"""Per-token losses and hits of a model over rows of tokens."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from ttcd_jax.models.transformer import Transformer
from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.train.loss import token_scores


class Scores(NamedTuple):
    """Arrays [rows, T]."""

    losses: np.ndarray  # negative log-likelihood of the target, nats
    is_hit: np.ndarray  # whether the target is the likeliest token


def score_rows(model: Transformer, rows: dict[str, np.ndarray], *, batch_size: int) -> Scores:
    """Scores every target of `rows` (fields of `ttcd_jax.data.packing`), masked ones included. On
    the mesh in use the rows of a batch lie on its devices; every process gets all scores."""
    graph, params = nnx.split(model)
    mesh = jax.sharding.get_mesh()
    length = rows["tokens"].shape[1]
    place = None if mesh.empty else Placement(mesh, batch_size=batch_size, length=length)

    @functools.partial(jax.jit, out_shardings=None if mesh.empty else replicated(mesh))
    def score(params, tokens, targets, segment_ids):
        model = nnx.merge(graph, params)
        hidden, _ = model.forward(tokens, segment_ids)
        return token_scores(hidden, model.head_weight(), targets)

    count, results = len(rows["tokens"]), []
    for start in range(0, count, batch_size):
        # The last part is filled up with its first row, so that one shape is compiled.
        index = np.arange(start, start + batch_size)
        index = np.where(index < count, index, start)
        batch = {name: rows[name][index] for name in ("tokens", "targets", "segment_ids")}
        if place is not None:
            batch = place({name: field[list(place.rows)] for name, field in batch.items()})
        results.append(jax.device_get(score(params, **batch)))
    losses, is_hit = (np.concatenate(parts)[:count] for parts in zip(*results, strict=True))
    return Scores(losses, is_hit)
