"""The objects of a run, built from its `RunConfig`: data, optimizer, jitted step, state."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding

from ttcd_jax import units
from ttcd_jax.data.pipeline import Batches, CallerBatches, MakeBatches, StepBatches
from ttcd_jax.data.sources import BatchesConfig
from ttcd_jax.errors import ResourceError, UserError
from ttcd_jax.models.config import memory_chunk
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import laid_out, num_parts
from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.sharding.distributed import agree
from ttcd_jax.sharding.rules import BATCH, spec
from ttcd_jax.train.bad_steps import no_skips
from ttcd_jax.train.groups import preparation, rate_factors
from ttcd_jax.train.hardware import device_bytes
from ttcd_jax.train.metrics import Measure, in_step, programs
from ttcd_jax.train.optimizer import build_optimizer, learning_rate
from ttcd_jax.train.state import (
    TrainState,
    abstract_params,
    init_params,
    logical_axes,
    placed_as,
    state_of,
    state_shardings,
)
from ttcd_jax.train.step import TrainStep, make_train_step


def batch_fields(config: RunConfig) -> tuple[str, ...]:
    """The fields of a batch on the devices; rows of one document have no segment ids."""
    fields = ("tokens", "targets", "positions", "loss_mask")
    return fields if config.data.rows_are_documents else (*fields, "segment_ids")


def check(config: RunConfig) -> None:
    """Raises `UserError` if vocabulary or lengths of model and data do not fit together, or if the
    model lacks parameters of the optimizer or `memory_warmup`. Warns of narrow parameters."""
    param = config.model.precision.param
    if jnp.finfo(param).bits < 32:
        logging.warning(
            "parameters and moments are %s, in which small steps are lost: a new run with "
            "--param=\"Precision.param='float32'\" keeps them",
            param,
        )
    preparation(config.model, config.optimizer.rates, config.memory_warmup)
    chunk, seq_len = memory_chunk(config.model), config.data.seq_len
    if chunk is not None and chunk >= seq_len:
        raise UserError(
            f"chunk_size {chunk} of the memory is not below the seq_len {seq_len} of the data: no "
            "token would read what a chunk wrote; bind a smaller chunk_size, or its default "
            "holds, or take longer rows"
        )
    needed, there = config.data.vocab_size, config.model.vocab_size
    if there < needed:
        problem = f"model vocab_size {there} is smaller than the data's {needed}"
        if config.start_from is None:
            raise UserError(f"{problem}: set TransformerConfig.vocab_size to at least {needed}")
        logging.warning("%s: a batch with one of the other tokens is refused", problem)


def placement(config: RunConfig, mesh: Mesh) -> Placement:
    """The sharding of the run's batches. Raises `UserError` when they, or the parts in which they
    are computed, do not divide among the devices."""
    devices = math.prod(mesh.shape[axis] for axis in BATCH)
    parts = num_parts(config, mesh)
    rows = config.batch_size // parts
    if rows % devices:
        raise UserError(
            f"batch_size {config.batch_size} in accumulation_steps {parts} makes parts of {rows} "
            f"rows, which do not divide among the {devices} devices of mesh axes "
            f"{' x '.join(BATCH)}: lower accumulation_steps or change MeshConfig"
        )
    return Placement(mesh, batch_size=config.batch_size, length=config.data.seq_len)


def check_bytes(config: RunConfig, mesh: Mesh) -> None:
    """Raises `ResourceError` when a device has fewer bytes than its shards of the state and of the
    batch alone; nothing is allocated."""
    batch = jax.tree.leaves(abstract_batch(config, mesh))
    rows = sum(math.prod(x.shape) * x.dtype.itemsize for x in batch)
    needed, there = shard_bytes(abstract_state(config, mesh)) + rows // mesh.size, device_bytes()
    if needed > there:
        raise ResourceError(
            f"parameters, optimizer and batch take {units.size(needed)} per device, and there are "
            f"{units.size(there)}: use more devices or a smaller configuration; --dry_run prints "
            "the bytes of a step"
        )


def shard_bytes(arrays: Any) -> int:
    """Bytes of one device's shards."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def build_data(
    config: RunConfig, rows: Sequence[int], make: MakeBatches | None = None
) -> tuple[StepBatches, dict[str, Any]]:
    """(batches of the training split, or those that the caller makes; manifest). This process
    uses `rows` of every batch."""
    data, size, entries = config.data, config.batch_size, config.model.vocab_size
    if isinstance(data, BatchesConfig):
        if not callable(make):
            raise UserError(
                f"RunConfig.data is BatchesConfig, and batches are {make!r:.60}: pass a function "
                "of the first step to ttcd_jax.train_run"
            )
        shape = size, data.seq_len + 1
        batches = CallerBatches(_compared(make), shape=shape, vocab_size=entries, rows=rows)
        return batches, {"kind": "batches"}
    if make is not None:
        raise UserError(
            f"RunConfig.data is {type(data).__name__}, which makes batches: set BatchesConfig to "
            "pass them to ttcd_jax.train_run"
        )
    source, manifest = data.rows(config.seed, size)
    return Batches(source, batch_size=size, rows=rows, vocab_size=entries), manifest


def _compared(make: MakeBatches) -> MakeBatches:
    """`make`, whose first 1, 2, 4, ... batches are compared in all processes."""

    def batches(start: int) -> Iterator[Any]:
        so_far = hashlib.sha256()
        for count, batch in enumerate(make(start), 1):
            if jax.process_count() > 1:
                so_far.update(np.asarray(batch).tobytes())
                if count.bit_count() == 1:
                    name = f"batches {start + 1} to {start + count}"
                    agree("batches", {name: so_far.hexdigest()})
            yield batch

    return batches


def _optimizer(config: RunConfig) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """(learning rate, optimizer); a schedule without `steps` takes the run's."""
    schedule = config.optimizer.schedule
    rate = learning_rate(schedule.replace(steps=schedule.steps or config.steps))
    factors = rate_factors(config.model, config.optimizer.rates)
    axes = logical_axes(config.model)
    return rate, build_optimizer(config.optimizer, rate, axes, factors=factors)


def build_step(config: RunConfig, mesh: Mesh) -> TrainStep:
    """The compiled step, to be called under `jax.set_mesh(mesh)`; it donates its state."""
    config = laid_out(config, mesh)
    rate, optimizer = _optimizer(config)
    step = make_train_step(
        config.model,
        optimizer,
        rate,
        accumulation_steps=config.accumulation_steps or 1,
        loss_rows=config.loss_rows,
        spike_factor=config.spike_factor,
        prepare=preparation(config.model, config.optimizer.rates, config.memory_warmup),
        measure=in_step(config.metrics),
    )
    where = _shardings(config, mesh), replicated(mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=where)


def build_measures(config: RunConfig, mesh: Mesh) -> list[Measure]:
    """The compiled metrics that are no part of the step; called as `build_step`."""
    config = laid_out(config, mesh)
    found = programs(config.metrics, config.model, config.accumulation_steps or 1)
    return [jax.jit(measure, out_shardings=replicated(mesh)) for measure in found]


def _shardings(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    shardings = state_shardings(config.model, _optimizer(config)[1], mesh)
    if config.counts_skips:
        shardings["skips"] = dict.fromkeys(jax.eval_shape(no_skips), replicated(mesh))
    return shardings


def abstract_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the training state; nothing is allocated."""
    state = jax.eval_shape(lambda x: _state(config, x), abstract_params(config.model))
    return placed_as(state, _shardings(config, mesh))


def fresh_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """The training state before the first step, drawn from the seed."""

    def drawn() -> TrainState:
        return _state(config, init_params(config.model, config.seed))

    return jax.jit(drawn, out_shardings=_shardings(config, mesh))()


def state_with(config: RunConfig, mesh: Mesh, params: dict[str, Any]) -> TrainState:
    """`fresh_state` with `params`, which are donated."""
    where = _shardings(config, mesh)
    return jax.jit(lambda x: _state(config, x), out_shardings=where, donate_argnums=0)(params)


def _state(config: RunConfig, params: dict[str, Any]) -> TrainState:
    state = state_of(_optimizer(config)[1], params)
    if config.counts_skips:
        state["skips"] = no_skips()
    return state


def abstract_batch(config: RunConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of one batch."""
    shape = (config.batch_size, config.data.seq_len)
    where = NamedSharding(mesh, spec(("batch", "length"), mesh))
    kinds = dict.fromkeys(batch_fields(config), "int32") | {"loss_mask": "bool"}
    return {name: jax.ShapeDtypeStruct(shape, kind, sharding=where) for name, kind in kinds.items()}
