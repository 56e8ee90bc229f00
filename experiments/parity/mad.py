"""Checks of the MAD tasks: instances bit for bit, scores by the published protocol."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.mad.scores import batch_scores
from experiments.mad.tasks.aligned import key_value_map
from experiments.mad.tasks.instances import instances
from experiments.mad.tasks.settings import MADConfig
from experiments.parity.golden import Comparison, Golden, worse, worst
from ttcd_jax.errors import DataError


def check_instances(golden: Golden, dtype: str) -> Comparison:
    """kind mad_instances: rows of both splits and the fixed maps; the error is the share of entries
    that differ and may not be anything but 0, in either dtype."""
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
    surplus = golden.arrays.keys() - ours.keys() - {"config_json"}
    if surplus:
        raise DataError(f"nothing generates {', '.join(sorted(surplus))}")
    return worse(*(Comparison(k, _differing(x, golden.arrays[k]), 0.0) for k, x in ours.items()))


def task_config(source: dict[str, Any]) -> MADConfig:
    sizes = dict(source["config"])
    if not sizes.pop("multi_query", True):
        raise DataError("multi_query=False is not supported: every recall asks for every known key")
    return MADConfig(task=source["task"], **sizes)


def _differing(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        raise DataError(f"shape {ours.shape} against the reference's {theirs.shape}")
    return float((ours != theirs).mean())


def check_metrics(golden: Golden, dtype: str) -> Comparison:
    """kind mad_metrics: every batch, the epoch, and all batches at once."""
    logits = jnp.asarray(golden.arrays["in.logits"], dtype)
    targets = jnp.asarray(golden.arrays["in.targets"], jnp.int32)
    batches = [batch_scores(*batch) for batch in zip(logits, targets, strict=True)]
    macro = [scores.macro_accuracy for scores in batches]
    ours = {
        "out.batch_macro_acc": macro,
        "out.batch_micro_acc": [scores.micro_accuracy for scores in batches],
        "out.batch_loss": [scores.loss for scores in batches],
        "out.epoch_macro_acc": np.mean(np.asarray(macro, np.float64)),
        "out.global_macro_acc": batch_scores(logits, targets).macro_accuracy,
    }
    return worst(ours, golden, dtype)
