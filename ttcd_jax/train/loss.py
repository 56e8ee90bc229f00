"""Cross entropy over a large vocabulary without ever holding all logits.

    loss_t = logsumexp_v(h_t . w_v) - h_t . w_{y_t}

A scan over blocks of rows computes a block's logits, its loss and at once its share of the
gradients: three matrix products in all (a recomputing backward needs four), and [rows, V] float32
is the largest array.
"""

import functools
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.sharding import rules
from ttcd_jax.sharding.vocabulary import TENSOR, own_words

if TYPE_CHECKING:
    from ttcd_jax.models.transformer import Transformer

DEFAULT_ROWS = 1024


def token_scores(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    rows: int = DEFAULT_ROWS,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """(negative log-likelihood in nats, whether it is the likeliest) of every target, float32 or
    better. For evaluation: the backward of `summed_loss` is the cheap one."""
    if not rules.is_distributed():
        return _token_scores(None, hidden, head, targets, rows)

    def on_part(
        hidden: jax.Array, head: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return _token_scores(TENSOR, hidden, head, targets, rows)

    run = rules.sharded(on_part, (_HIDDEN, _HEAD, _TOKENS), (_TOKENS, _TOKENS))
    return run(hidden, head, targets)


def summed_loss(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    rows: int = DEFAULT_ROWS,
) -> Float[Array, ""]:
    """Sum of the losses of marked tokens, in nats. Gradient for `hidden` and `head`.

    On a mesh every device takes its own tokens, and its own part of the vocabulary along `tensor`;
    `rows` are a device's."""
    if not rules.is_distributed():
        return cast(jax.Array, _summed_loss(None, hidden, head, targets, loss_mask, rows))

    def on_part(
        hidden: jax.Array, head: jax.Array, targets: jax.Array, loss_mask: jax.Array
    ) -> jax.Array:
        own = _summed_loss(TENSOR, hidden, head, targets, loss_mask, rows)
        return jax.lax.psum(own, (*rules.BATCH, *rules.LENGTH))

    run = rules.sharded(on_part, (_HIDDEN, _HEAD, _TOKENS, _TOKENS), ())
    return run(hidden, head, targets, loss_mask)


# The logical axes of the arguments.
_TOKENS = ("batch", "length")
_HIDDEN = ("batch", "length", None)
_HEAD = ("vocab", None)


# Below, `axis` is the mesh axis that shards the vocabulary, None when nothing does.
Blocks = tuple[jax.Array, ...]  # [blocks, rows, ...] each; in a scan, one block of each
Gradients = tuple[jax.Array, jax.Array]  # for `hidden` and `head`


def _token_scores(
    axis: str | None, hidden: jax.Array, head: jax.Array, targets: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    def block(_: None, operands: Blocks) -> tuple[None, tuple[jax.Array, jax.Array]]:
        h, y = operands
        losses, logits = _block_losses(axis, h, head, y)[:2]
        return None, (losses, _is_likeliest(axis, logits, y))

    _, (losses, is_hit) = jax.lax.scan(block, None, _row_blocks(rows, hidden, targets))

    def unblocked(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[: targets.size].reshape(targets.shape)

    return unblocked(losses), unblocked(is_hit)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _summed_loss(
    axis: str | None,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    loss_mask: jax.Array,
    rows: int,
) -> jax.Array:
    losses, _ = _token_scores(axis, hidden, head, targets, rows)
    return jnp.sum(jnp.where(loss_mask, losses, 0))


def _summed_loss_forward(
    axis: str | None,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    loss_mask: jax.Array,
    rows: int,
) -> tuple[jax.Array, Gradients]:
    """The loss and its gradients: a block's logits serve both, then they are gone."""
    state = jnp.promote_types(hidden.dtype, jnp.float32)

    def block(carry: Blocks, operands: Blocks) -> tuple[Blocks, jax.Array]:
        total, d_head = carry
        h, y, keep = operands
        losses, logits, lse = _block_losses(axis, h, head, y)
        row, is_own = _own_words(axis, y, len(head))
        chosen = jax.nn.one_hot(row, len(head), dtype=state) * is_own[:, None]
        d_logits = jnp.exp(logits - lse[:, None]) - chosen
        d_logits = jnp.where(keep[:, None], d_logits, 0).astype(h.dtype)
        d_head = d_head + jnp.einsum("XV,XD->VD", d_logits, h, preferred_element_type=state)
        d_hidden = jnp.einsum("XV,VD->XD", d_logits, head.astype(h.dtype))
        return (total + jnp.sum(jnp.where(keep, losses, 0)), d_head), d_hidden

    start = (jnp.zeros((), state), jnp.zeros(head.shape, state))
    (total, d_head), d_hidden = jax.lax.scan(
        block, start, _row_blocks(rows, hidden, targets, loss_mask)
    )
    d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
    return total, (d_hidden, d_head.astype(head.dtype))


def _summed_loss_backward(
    axis: str | None, rows: int, saved: Gradients, d_total: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """Every device of `axis` has the same total and its own part of the vocabulary: the cotangents
    of all reach each, and `shard_map` adds up what they give for the hidden states they share."""
    d_hidden, d_head = saved
    d_total = d_total if axis is None else jax.lax.psum(d_total, axis)
    return (
        d_hidden * d_total.astype(d_hidden.dtype),
        d_head * d_total.astype(d_head.dtype),
        None,
        None,
    )


_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def _row_blocks(rows: int, hidden: jax.Array, *rest: jax.Array) -> Blocks:
    """[B, T, ...] -> [blocks, rows, ...], zero-padded: padded rows are unmarked."""
    count = rest[0].size
    rows = min(rows, count)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(count, *x.shape[2:])
        x = jnp.pad(x, ((0, -count % rows),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, rows, *x.shape[1:])

    return tuple(split(x) for x in (hidden, *rest))


def _block_losses(
    axis: str | None, h: jax.Array, head: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(losses [X], logits [X, V] of this device's part of the vocabulary, log-sum-exp [X] over the
    whole) of one block of rows."""
    state = jnp.promote_types(h.dtype, jnp.float32)
    logits = jnp.einsum("XD,VD->XV", h, head.astype(h.dtype), preferred_element_type=state)
    lse = jax.nn.logsumexp(logits, axis=-1)
    row, is_own = _own_words(axis, y, len(head))
    chosen = jnp.where(is_own, jnp.take_along_axis(logits, row[:, None], axis=-1)[:, 0], 0)
    if axis is not None:
        top = jax.lax.pmax(lse, axis)
        lse = top + jnp.log(jax.lax.psum(jnp.exp(lse - top), axis))
        chosen = jax.lax.psum(chosen, axis)
    return lse - chosen, logits, lse


def _own_words(axis: str | None, y: jax.Array, num_words: int) -> tuple[jax.Array, jax.Array]:
    return (y, jnp.ones(y.shape, bool)) if axis is None else own_words(y, num_words)


def _is_likeliest(axis: str | None, logits: jax.Array, y: jax.Array) -> jax.Array:
    """Whether no entry of the vocabulary beats y (of equals the first counts)."""
    best, index = logits.max(-1), logits.argmax(-1)
    if axis is None:
        return index == y
    index = index + jax.lax.axis_index(axis) * logits.shape[-1]
    is_best = best == jax.lax.pmax(best, axis)
    return jax.lax.pmin(jnp.where(is_best, index, jnp.iinfo(index.dtype).max), axis) == y


def next_token_loss(model: "Transformer", tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean over B * (T - 1) positions of the cross entropy of token i + 1 given tokens 0 .. i."""
    return next_token_loss_of(model.forward(tokens)[0], model.head_weight(), tokens)


def next_token_loss_of(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> Float[Array, ""]:
    """The same, of what the model gives for `tokens`."""
    targets = tokens[:, 1:]
    mask = jnp.ones(targets.shape, bool)
    return summed_loss(hidden[:, :-1], head, targets, mask) / targets.size
