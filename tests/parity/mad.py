"""Checks of the MAD tasks: instances bit for bit, scores by the published protocol."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.mad.sweep import batch_scores
from experiments.studies.mad.tasks import MADConfig, instances, key_value_map
from tests.parity.golden import Comparison, Golden, worst
from ttcd_jax.errors import DataError


def check_instances(golden: Golden, dtype: str) -> Comparison:
    """Kind mad_instances: rows of both splits and the fixed maps, equal entry by entry."""
    ours: dict[str, np.ndarray] = {}
    for source in golden.info["configs"]:
        name, config = source["name"], task_config(source)
        splits = instances(
            config,
            seed=source["seed"],
            num_train=source["num_train_examples"],
            num_test=source["num_test_examples"],
        )
        for split, rows in zip(("train", "test"), splits, strict=True):
            ours[f"{name}.{split}.inputs"] = rows.inputs
            ours[f"{name}.{split}.targets"] = rows.targets
        if f"{name}.kv_keys" in golden.arrays:
            keys, values = key_value_map(config, source["seed"])
            ours |= {f"{name}.kv_keys": keys, f"{name}.kv_values": values}
    return worst(ours, golden, dtype)


def task_config(source: dict[str, Any]) -> MADConfig:
    sizes = dict(source["config"])
    if not sizes.pop("multi_query", True):
        raise DataError("multi_query=False is not supported: every recall asks for every known key")
    return MADConfig(task=source["task"], **sizes)


def check_metrics(golden: Golden, dtype: str) -> Comparison:
    """Kind mad_metrics: scores of each batch, their mean, and the score of all batches at once."""
    logits = jnp.asarray(golden.arrays["in.logits"], dtype)
    targets = jnp.asarray(golden.arrays["in.targets"], jnp.int32)
    batches = jax.jit(jax.vmap(batch_scores))(logits, targets)
    ours = {
        "out.batch_macro_acc": batches["macro_accuracy"],
        "out.batch_micro_acc": batches["micro_accuracy"],
        "out.batch_loss": batches["loss"],
        "out.epoch_macro_acc": np.mean(np.asarray(batches["macro_accuracy"], np.float64)),
        "out.global_macro_acc": batch_scores(logits, targets)["macro_accuracy"],
    }
    return worst(ours, golden, dtype)
