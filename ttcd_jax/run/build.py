"""The objects of a run, built from its `RunConfig`: data, and the program on the devices."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from ttcd_jax import units
from ttcd_jax.data.pipeline import Batches, CallerBatches, Fields, MakeBatches, StepBatches
from ttcd_jax.data.sources import BatchesConfig
from ttcd_jax.data.synthetic import SyntheticConfig
from ttcd_jax.data.tokenizer import build_tokenizer
from ttcd_jax.errors import ResourceError, UserError
from ttcd_jax.inference.state import reads_ahead
from ttcd_jax.measure.task import Subject
from ttcd_jax.models.config import memory_chunk
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import laid_out, run_mesh
from ttcd_jax.sharding.distributed import agree
from ttcd_jax.sharding.rules import Placement, replicated
from ttcd_jax.train import state as train_state
from ttcd_jax.train.bad_steps import no_skips
from ttcd_jax.train.groups import preparation, rate_factors
from ttcd_jax.train.hardware import device_bytes
from ttcd_jax.train.metrics import in_step, programs
from ttcd_jax.train.optimizer import build_optimizer, learning_rate
from ttcd_jax.train.step import Batch, make_train_step


def check(config: RunConfig) -> None:
    """Raises `UserError` if model and data do not fit together; warns of narrow parameters."""
    param = config.model.precision.param
    if jnp.finfo(param).bits < 32:
        logging.warning(
            "parameters and moments are %s, in which small steps are lost: a new run with "
            "--param=\"Precision.param='float32'\" keeps them",
            param,
        )
    chunk, seq_len = memory_chunk(config.model), config.data.seq_len
    if chunk is not None and chunk >= seq_len:
        raise UserError(
            f"chunk_size {chunk} of the memory is not below the seq_len {seq_len} of the data: no "
            "token would read what a chunk wrote; bind a smaller chunk_size, or its default "
            "holds, or take longer rows"
        )
    if not getattr(config.model.settings, "is_conv_causal", True) and reads_ahead(config.model):
        logging.warning(
            "is_conv_causal=False lets a prediction depend on tokens that come after it: losses "
            "are not those of a language model, and no text can be generated"
        )
    needed, there = config.data.vocab_size, config.model.vocab_size
    if there < needed:
        problem = f"model vocab_size {there} is smaller than the data's {needed}"
        if config.start_from is None:
            raise UserError(f"{problem}: set TransformerConfig.vocab_size to at least {needed}")
        logging.warning("%s: a batch with one of the other tokens is refused", problem)


def build_data(
    config: RunConfig, rows: Sequence[int], make: MakeBatches | None = None
) -> tuple[StepBatches, dict[str, Any]]:
    """(batches of training or of the caller, manifest). This process uses `rows` of each."""
    data, size, entries = config.data, config.batch_size, config.model.vocab_size
    if isinstance(data, BatchesConfig):
        if config.data_workers:
            raise UserError(f"data_workers {config.data_workers} with BatchesConfig: leave it out")
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
    options: Any = {"vocab_size": entries, "num_workers": config.data_workers}
    return Batches(source, batch_size=size, rows=rows, **options), manifest


def untrained(config: RunConfig, run_dir: Path) -> Subject:
    """What evaluations make their rows for, before the run has parameters."""
    reads = getattr(config.data, "tokenizer", None)
    tokenizer = reads and build_tokenizer(reads)
    model = train_state.abstract_model(config.model)
    return Subject(model, tokenizer, config.data.to_dict(), run_dir)


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


class Program:
    """The training program of a run on `mesh` (default: `run_mesh`), derived once from the run's
    configuration: its state, its batches and its step. Nothing is on the devices before
    `fresh_state` or `state_with`.

    `config` is the run's with its layout (`ttcd_jax.run.layout`). `state` and `batch` are the
    training state and a batch as `jax.ShapeDtypeStruct`s with their shardings; `skips` are
    the counts of bad steps, which a state may lack, `placement.rows` those that this process makes.
    `step` and `measures` are lowered under `jax.set_mesh(mesh)`. Raises `UserError` for rows or
    parameters that do not divide among the devices, and for parameters that `OptimizerConfig.rates`
    or `RunConfig.memory_warmup` needs and the model lacks.
    """

    def __init__(self, config: RunConfig, mesh: Mesh | None = None) -> None:
        self.mesh = mesh = mesh or run_mesh(config)
        self.config = laid_out(config, mesh)
        model, optimizer = self.config.model, config.optimizer
        length = config.data.seq_len
        self.placement = Placement(mesh, batch_size=config.batch_size, length=length)
        ids = () if isinstance(config.data, SyntheticConfig | BatchesConfig) else ("segment_ids",)
        kinds = dict.fromkeys(("tokens", "targets", "positions", *ids), "int32")
        self.batch = self.placement.abstract(kinds | {"loss_mask": "bool"})
        factors = rate_factors(model, optimizer.rates)
        self._prepare = preparation(model, factors, config.memory_warmup)
        schedule = optimizer.schedule
        self._rate = learning_rate(schedule.replace(steps=schedule.steps or config.steps))
        axes = train_state.logical_axes(model)
        self._optimizer = build_optimizer(optimizer, self._rate, axes, factors=factors)
        self._shardings = train_state.state_shardings(model, self._optimizer, mesh)
        skips = jax.eval_shape(no_skips)
        self.skips = train_state.placed_as(skips, where := dict.fromkeys(skips, replicated(mesh)))
        if config.counts_skips:
            self._shardings["skips"] = where
        state = jax.eval_shape(self._state_of, train_state.abstract_params(model))
        self.state = train_state.placed_as(state, self._shardings)

    def placed(self, batch: Fields) -> Batch:
        """The fields of a batch that the step reads, on the devices, from this process's rows."""
        return self.placement({name: batch[name] for name in self.batch})

    def check_bytes(self) -> None:
        """Raises `ResourceError` for a device smaller than its shards of state and batch."""
        needed, there = shard_bytes(self.state) + shard_bytes(self.batch), device_bytes()
        if needed > there:
            raise ResourceError(
                f"parameters, optimizer and batch take {units.size(needed)} per device, and there "
                f"are {units.size(there)}: use more devices or a smaller configuration; --dry_run "
                "prints the bytes of a step"
            )

    def step(self) -> jax.stages.Lowered:
        """The step, lowered; it donates its state."""
        config = self.config
        step = make_train_step(
            config.model,
            self._optimizer,
            self._rate,
            accumulation_steps=config.accumulation_steps or 1,
            loss_rows=config.loss_rows,
            spike_factor=config.spike_factor,
            prepare=self._prepare,
            measure=in_step(config.metrics),
        )
        where = self._shardings, replicated(self.mesh)
        return jax.jit(step, donate_argnums=0, out_shardings=where).lower(self.state, self.batch)

    def measures(self) -> list[jax.stages.Lowered]:
        """The metrics that are no part of the step, lowered."""
        config, where = self.config, replicated(self.mesh)
        found = programs(config.metrics, config.model, config.accumulation_steps or 1)
        shapes = self.state["params"], self.batch
        return [jax.jit(measure, out_shardings=where).lower(*shapes) for measure in found]

    def fresh_state(self) -> train_state.TrainState:
        """The training state before the first step, drawn from the seed."""
        model, seed, where = self.config.model, self.config.seed, self._shardings
        return jax.jit(
            lambda: self._state_of(train_state.init_params(model, seed)), out_shardings=where
        )()

    def state_with(self, params: train_state.Params) -> train_state.TrainState:
        """`fresh_state` with `params`, which are donated."""
        return jax.jit(self._state_of, out_shardings=self._shardings, donate_argnums=0)(params)

    def resumed(self, state: dict[str, Any]) -> train_state.TrainState:
        """The state of a checkpoint, with counts of bad steps if this run has them, and if it lacks
        them from 0; the earlier run may have done otherwise."""
        if "skips" not in state:
            state["skips"] = jax.jit(no_skips, out_shardings=replicated(self.mesh))()
        return train_state.TrainState(**{name: state[name] for name in self.state})

    def _state_of(self, params: train_state.Params) -> train_state.TrainState:
        state = train_state.state_of(self._optimizer, params)
        if self.config.counts_skips:
            state["skips"] = no_skips()
        return state


def shard_bytes(arrays: Any) -> int:
    """Bytes of one device's shards."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
