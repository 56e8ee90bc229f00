"""Bad steps, which change nothing: a loss or gradient that is not finite, and with a spike factor a
gradient norm far above the average. They are found in the compiled step.

The average is that of the accepted steps, weighted by 0.98^n for the n-th last one, without a bias
to zero. It decides once 50 steps were accepted: norms of the first steps fall fast.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

DECAY, WARMUP = 0.98, 50

Scalars = dict[str, Shaped[Array, ""]]
# `skipped` steps of the run, `accepted` ones, and their `norm`, averaged with a bias to zero.
Skips = Scalars


def no_skips() -> Skips:
    """The counts before the first step; call it under `jax.jit` or `jax.eval_shape`."""
    kinds = {"skipped": jnp.int32, "accepted": jnp.int32, "norm": jnp.float32}
    return {name: jnp.zeros((), kind) for name, kind in kinds.items()}


def judged(
    skips: Skips, metrics: Scalars, is_good: Bool[Array, ""], spike_factor: float | None
) -> tuple[Bool[Array, ""], Skips, Scalars]:
    """(whether the step is accepted, the counts after it, its metrics and these counts). A step is
    accepted if it `is_good` and its gradient norm is not a spike."""
    count, norm = skips["accepted"], metrics["grad_norm"].astype(jnp.float32)
    weight = 1 - jnp.power(jnp.float32(DECAY), jnp.maximum(count, 1))
    average = skips["norm"] / weight
    if spike_factor is not None:
        is_good &= (count < WARMUP) | (norm <= spike_factor * average)
    accepted = DECAY * skips["norm"] + (1 - DECAY) * norm
    after = {
        "skipped": skips["skipped"] + ~is_good,
        "accepted": count + is_good,
        "norm": jnp.where(is_good, accepted, skips["norm"]),
    }
    counts = {"skipped_steps": after["skipped"], "grad_norm_average": average}
    return is_good, after, metrics | counts | {"is_skipped": ~is_good}


def fault(metrics: Mapping[str, Shaped[np.ndarray, "..."]]) -> str | None:
    """The reason why a step with these metrics is bad; None for a good one. Loss and gradient
    decide, as in the compiled step: other metrics may have nothing to measure."""
    for name in ("loss", "grad_norm"):
        if not np.isfinite(metrics.get(name, 0)):
            # Without a target the gradient is 0, with another such loss it is not a number.
            cause = ", as no target of the batch counts" if metrics.get("grad_norm") == 0 else ""
            return f"{name} is {metrics[name]}{cause}"
    if not metrics.get("is_skipped", False):
        return None
    norm, average = metrics["grad_norm"], metrics["grad_norm_average"]
    return f"grad_norm {norm:.4g} is {norm / average:.3g} times its average {average:.4g}"
