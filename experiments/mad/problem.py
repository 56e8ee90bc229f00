"""A MAD setting and a method as a problem of `sweep`: model, loss, measures."""

from typing import Any

import jax
from flax import nnx

from experiments.mad.key_rank import key_ranks
from experiments.mad.models import mad_model
from experiments.mad.scores import batch_scores, summed_loss
from experiments.mad.sweep import Problem
from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.settings import TASKS
from ttcd_jax.models.config import TransformerConfig, switched_off
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.train.step import Batch, Metrics

# The teacher's window by task; the student's and the chunk are half of it.
WINDOWS = dict.fromkeys(TASKS, 32) | {"compression": 16, "memorization": 16}


def mad_problem(task: MADConfig, model: TransformerConfig) -> Problem:
    """Parameters, training loss, and the measures of test rows: the scores of MAD, the same with
    the memory switched off (`*_off`, where it can be), and of each fast layer [layers]
    `memory_ratio`, |eta S| / |W_base| after the last token, `gate_mean`, and `key_rank`, the
    effective rank of the keys."""
    is_autoencoder = task.task == "compression"
    off = switched_off(model, task.num_positions)

    def build(config: TransformerConfig, rngs: nnx.Rngs) -> Transformer:
        return mad_model(config, is_autoencoder=is_autoencoder, rngs=rngs)

    def init(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(build(model, nnx.Rngs(key)), nnx.Param))

    def with_params(config: TransformerConfig, params: dict[str, Any]) -> Transformer:
        graph, state = nnx.split(nnx.eval_shape(lambda: build(config, nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def loss_sum(params: dict[str, Any], batch: Batch) -> jax.Array:
        return summed_loss(with_params(model, params)(batch["tokens"]), batch["targets"])

    def measure(params: dict[str, Any], batch: Batch) -> Metrics:
        tokens, targets = batch["tokens"], batch["targets"]
        module = with_params(model, params)
        hidden, stats = module.forward(tokens)
        metrics: Metrics = batch_scores(module.logits(hidden), targets)._asdict()
        metrics |= stats._asdict() if stats is not None else {}
        ranks = key_ranks(module, tokens)
        metrics |= {"key_rank": ranks} if ranks is not None else {}
        if off is not None:
            scores = batch_scores(with_params(off, params)(tokens), targets)
            metrics |= {f"{name}_off": value for name, value in scores._asdict().items()}
        return metrics

    return Problem(init, loss_sum, measure)
