"""The next token of every row, drawn from its logits by the row's own settings.

In the order and meaning of Hugging Face's logits processors: repetition penalty, temperature,
top-k, top-p, min-p. A draw is an argmax of logits with Gumbel noise whose key is a function of the
row's seed and index alone, so a text depends neither on its neighbours nor on its place in a batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.config import Bound, Config, Fraction, NonNegativeFloat, PositiveFloat

_ALL_TOKENS = np.iinfo(np.int32).max  # top_k of a row without one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """How one text is drawn; the defaults take the likeliest token.

    `temperature` divides the logits, 0 is greedy. `top_k` keeps the k likeliest tokens (and those
    as likely as the k-th), `top_p` the smallest set of likeliest tokens whose mass reaches p,
    `min_p` the tokens with at least this share of the top probability. `repetition_penalty` r
    divides positive logits of tokens seen before by r and multiplies negative ones (CTRL).
    """

    temperature: NonNegativeFloat = 0.0
    top_k: Annotated[int, Bound("between 1 and 2**31 - 1", lambda k: 1 <= k < 2**31)] | None = None
    top_p: Annotated[float, Bound("above 0 and at most 1", lambda p: 0 < p <= 1)] = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: PositiveFloat = 1.0
    seed: Annotated[int, Bound("between 0 and 2**32 - 1", lambda seed: 0 <= seed < 2**32)] = 0


class Sampler(NamedTuple):
    """The settings of all rows of a batch, as arrays [B]."""

    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    repetition_penalty: jax.Array  # float32
    seed: jax.Array  # uint32


def batch_sampler(configs: Sequence[SamplingConfig]) -> Sampler:
    """The settings of a batch, one configuration per row."""
    top_k = [_ALL_TOKENS if config.top_k is None else config.top_k for config in configs]
    return Sampler(
        temperature=jnp.array([config.temperature for config in configs], jnp.float32),
        top_k=jnp.array(top_k, jnp.int32),
        top_p=jnp.array([config.top_p for config in configs], jnp.float32),
        min_p=jnp.array([config.min_p for config in configs], jnp.float32),
        repetition_penalty=jnp.array([config.repetition_penalty for config in configs], "float32"),
        seed=jnp.array([config.seed for config in configs], jnp.uint32),
    )


def sample(
    logits: Float[Array, "B V"],
    sampler: Sampler,
    seen: Bool[Array, "B V"],
    index: Int[Array, "B"],
) -> Int[Array, "B"]:
    """One token per row, int32; `seen` are the tokens that the repetition penalty counts, `index`
    is the place of the draw in the row's text (the same seed and index: the same noise). Computed
    in float32; a batch in which no row cuts anything off is not sorted.
    """
    logits = _penalized(logits.astype(jnp.float32), sampler, seen)
    is_greedy = (sampler.temperature == 0)[:, None]
    # Of differences to the largest, the quotient is finite where it matters, however cold.
    scores = logits - logits.max(-1, keepdims=True)
    scores = scores / jnp.where(is_greedy, 1, sampler.temperature[:, None])
    noise = jnp.where(is_greedy, 0, _gumbel(sampler.seed, index, logits.shape[-1]))
    cuts = (sampler.top_k < logits.shape[-1]) | (sampler.top_p < 1) | (sampler.min_p > 0)
    any_cuts = jnp.any(cuts & (sampler.temperature > 0))
    return jax.lax.cond(any_cuts, _draw_of_kept, _draw, scores, noise, sampler)


def _penalized(logits, sampler: Sampler, seen):
    penalty = sampler.repetition_penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _gumbel(seed, index, size: int):
    """Standard Gumbel noise [B, size]."""

    def draw(seed, index):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), index), (size,))

    return jax.vmap(draw)(seed, index)


def _draw(scores, noise, sampler: Sampler):
    return jnp.argmax(scores + noise, axis=-1).astype(jnp.int32)


def _draw_of_kept(scores, noise, sampler: Sampler):
    """The draw among the tokens that top-k, top-p and min-p leave: a beginning of the sorted row.
    The noise belongs to the token, not to its rank, so near ties may change places."""
    k, p, min_p = (x[:, None] for x in (sampler.top_k, sampler.top_p, sampler.min_p))
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
