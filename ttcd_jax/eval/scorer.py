"""Per-token losses and hits of a model over rows of tokens."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ttcd_jax.models.transformer import Transformer
from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.train.loss import token_scores


class Scores(NamedTuple):
    """Arrays [rows, T]."""

    losses: np.ndarray  # negative log-likelihood of the target, nats
    is_hit: np.ndarray  # whether the target is the likeliest token


def batches(count: int, batch_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """(indices, how many of them count) of `count` rows in batches of one shape: the last is padded
    with its first row."""
    for start in range(0, count, batch_size):
        index = np.arange(start, start + batch_size)
        yield np.where(index < count, index, start), min(batch_size, count - start)


def score_rows(model: Transformer, rows: dict[str, np.ndarray], *, batch_size: int) -> Scores:
    """The scores of every target of `rows` (fields of `ttcd_jax.data.packing`), masked ones too.
    Batches are sharded over the mesh in use; every process gets all scores."""
    graph, params = nnx.split(model)
    mesh = jax.sharding.get_mesh()
    length = rows["tokens"].shape[1]
    placement = None if mesh.empty else Placement(mesh, batch_size=batch_size, length=length)
    results = []
    for index, count in batches(len(rows["tokens"]), batch_size):
        fields = ("tokens", "targets", "segment_ids")
        batch = {name: rows[name][index] for name in fields if name in rows}
        if placement is not None:
            batch = placement({name: field[list(placement.rows)] for name, field in batch.items()})
        results.append([x[:count] for x in jax.device_get(_scored(graph, mesh, params, batch))])
    return Scores(*(np.concatenate(parts) for parts in zip(*results, strict=True)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scored(
    graph: nnx.GraphDef[Transformer], mesh: Mesh, params: nnx.GraphState, batch: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """One program for every evaluation of a model, however often its parameters change."""
    model = nnx.merge(graph, params)
    hidden, _ = model.forward(batch["tokens"], batch.get("segment_ids"))
    scores = token_scores(hidden, model.head_weight(), batch["targets"])
    return scores if mesh.empty else jax.lax.with_sharding_constraint(scores, replicated(mesh))
