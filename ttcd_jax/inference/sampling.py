"""Sampling: the next token of every row from its logits, by the row's own settings.

Repetition penalty, temperature, top-k, top-p, min-p, defined and ordered as in Hugging Face's
logits processors. A draw is an argmax of logits with Gumbel noise whose key depends on the row's
seed and index alone, so a text depends neither on other rows nor on its row in the batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.config import Bound, Config, Fraction, NonNegativeFloat, PositiveFloat

_ALL_TOKENS = np.iinfo(np.int32).max  # top_k of a row without one


class SamplingConfig(Config):
    """The settings of one text; the defaults are greedy.

    `temperature` divides the logits, 0 is greedy. `top_k` keeps the k likeliest tokens (and ties
    with the k-th), `top_p` the smallest set of likeliest tokens whose mass reaches p, `min_p` the
    tokens with at least this share of the top probability. `repetition_penalty` r divides positive
    logits of tokens seen before by r and multiplies negative ones (CTRL). `seed` decides the draws.
    """

    temperature: NonNegativeFloat = 0.0
    top_k: Annotated[int, Bound("between 1 and 2**31 - 1", lambda k: 1 <= k < 2**31)] | None = None
    top_p: Annotated[float, Bound("above 0 and at most 1", lambda p: 0 < p <= 1)] = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: PositiveFloat = 1.0
    seed: Annotated[int, Bound("between 0 and 2**32 - 1", lambda seed: 0 <= seed < 2**32)] = 0


type Sampler = dict[str, jax.Array]  # by a field of `SamplingConfig`, of all rows [B]


def batch_sampler(configs: Sequence[SamplingConfig]) -> Sampler:
    """The settings of a batch, one configuration per row: int32 `top_k`, uint32 `seed`, float32."""
    dtypes = {"top_k": jnp.int32, "seed": jnp.uint32}
    names = [field.name for field in dataclasses.fields(SamplingConfig)]
    columns = {x: [getattr(config, x) for config in configs] for x in names}
    columns["top_k"] = [_ALL_TOKENS if k is None else k for k in columns["top_k"]]
    return {x: jnp.array(column, dtypes.get(x, jnp.float32)) for x, column in columns.items()}


def sample(
    logits: Float[Array, "B V"], sampler: Sampler, seen: Bool[Array, "B V"], index: Int[Array, "B"]
) -> Int[Array, "B"]:
    """One token per row, int32; `seen`: the tokens that the repetition penalty counts, `index`: the
    position of the draw in the row's text. Computed in float32; sorted only if some row cuts."""
    logits, penalty = logits.astype(jnp.float32), sampler["repetition_penalty"][:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    is_greedy = (sampler["temperature"] == 0)[:, None]
    # Subtracting the largest logit keeps the likeliest tokens finite at any temperature.
    scores = logits - logits.max(-1, keepdims=True)
    scores = scores / jnp.where(is_greedy, 1, sampler["temperature"][:, None])
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))
    noise = jnp.where(is_greedy, 0, noise(keys(sampler["seed"], index)))
    cuts = (sampler["top_k"] < logits.shape[-1]) | (sampler["top_p"] < 1) | (sampler["min_p"] > 0)
    any_cuts = jnp.any(cuts & (sampler["temperature"] > 0))
    return jax.lax.cond(any_cuts, _draw_of_kept, _draw, scores, noise, sampler)


def _draw(scores: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
    return jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)


def _draw_of_kept(scores: jax.Array, noise: jax.Array, sampler: Sampler) -> jax.Array:
    """The draw among the tokens that top-k, top-p and min-p keep, a prefix of the sorted row. The
    noise is that of the token, not of its rank."""
    k, p, min_p = (sampler[x][:, None] for x in ("top_k", "top_p", "min_p"))
    order = jnp.argsort(-scores, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scores, order, axis=-1)
    least = jnp.take_along_axis(ranked, jnp.minimum(k, ranked.shape[-1]) - 1, axis=-1)
    ranked = jnp.where(ranked >= least, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    is_kept = ((mass_before < p) | (p >= 1)) & (jnp.exp(ranked) >= min_p)
    ranked = jnp.where(is_kept, ranked, -jnp.inf)
    chosen = jnp.argmax(ranked + jnp.take_along_axis(noise, order, axis=-1), -1, keepdims=True)
    return jnp.take_along_axis(order, chosen, axis=-1)[:, 0].astype(jnp.int32)
