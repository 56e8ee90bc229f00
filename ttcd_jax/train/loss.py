"""Cross entropy over a large vocabulary without storing all logits.

    loss_t = logsumexp_v(h_t . w_v) - h_t . w_{y_t}

A scan over blocks of rows computes a block's logits, its loss and its part of the gradients: three
matrix products (a backward that recomputes needs four); the largest array is [rows, V] float32.
"""

import functools
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.errors import UserError
from ttcd_jax.memory.chunks import to_chunks
from ttcd_jax.sharding import rules
from ttcd_jax.sharding.rules import TENSOR, Copies, Shard, own_entries

if TYPE_CHECKING:
    from ttcd_jax.models.transformer import Transformer

DEFAULT_ROWS = 1024


def token_scores(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    rows: int = DEFAULT_ROWS,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """(negative log-likelihood in nats, at least float32; whether it is the likeliest entry) of
    every target. For evaluation: only `summed_loss` has an efficient backward."""
    scores = functools.partial(_token_scores, rows=rows)
    run = rules.sharded(scores, (_TOKENS, _HEAD, _TOKENS), (_TOKENS, _TOKENS))
    return run(hidden, head, targets)


def summed_loss(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"] | Copies,
    targets: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    rows: int = DEFAULT_ROWS,
) -> Float[Array, ""]:
    """Sum of the losses of the targets in `loss_mask`, in nats; differentiable in `hidden` and
    `head`. On a mesh tokens are sharded, and the vocabulary along `tensor`; `rows` per device."""

    def on_shard(shard: Shard, *arrays: jax.Array) -> jax.Array:
        total = cast(jax.Array, _summed_loss(shard, rows, *arrays))
        return shard.sum(total, *rules.BATCH, *rules.LENGTH)

    array, axes = rules.table_axes(head)
    run = rules.sharded(on_shard, (_TOKENS, axes, _TOKENS, _TOKENS), ())
    return run(hidden, array, targets, loss_mask)


# The logical axes of the arguments.
_TOKENS = ("batch", "length")
_HEAD = ("vocab",)
Blocks = tuple[jax.Array, ...]  # [blocks, rows, ...] each; in a scan, one block of each


def _token_scores(
    shard: Shard, hidden: jax.Array, head: jax.Array, targets: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    head = head.astype(hidden.dtype)  # before the loop

    def block(_: Any, operands: Blocks) -> tuple[Any, Blocks]:
        h, y = operands
        losses, logits, _ = _block_losses(shard, h, head, y)
        return None, (losses, _is_likeliest(shard, logits, y))

    _, (losses, is_hit) = jax.lax.scan(block, None, _row_blocks(rows, hidden, targets))

    losses, is_hit = (x.reshape(-1)[: targets.size] for x in (losses, is_hit))
    return losses.reshape(targets.shape), is_hit.reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_loss(
    shard: Shard, rows: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array
) -> jax.Array:
    losses, _ = _token_scores(shard, hidden, head, targets, rows)
    return jnp.sum(jnp.where(mask, losses, 0))


def _summed_loss_forward(
    shard: Shard, rows: int, hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss and its gradients, both from one computation of each block's logits."""
    state, stored = jnp.promote_types(hidden.dtype, jnp.float32), head.dtype
    head = head.astype(hidden.dtype)  # before the loop

    def block(carry: Blocks, operands: Blocks) -> tuple[Blocks, jax.Array]:
        total, d_head = carry
        h, y, keep = operands
        losses, logits, lse = _block_losses(shard, h, head, y)
        row, is_own = own_entries(shard, y, len(head))
        chosen = jax.nn.one_hot(row, len(head), dtype=state) * is_own[:, None]
        d_logits = jnp.exp(logits - lse[:, None]) - chosen
        d_logits = jnp.where(keep[:, None], d_logits, 0).astype(h.dtype)
        d_head = d_head + jnp.einsum("XV,XD->VD", d_logits, h, preferred_element_type=state)
        d_hidden = jnp.einsum("XV,VD->XD", d_logits, head)
        return (total + jnp.sum(jnp.where(keep, losses, 0)), d_head), d_hidden

    start = (jnp.zeros((), state), jnp.zeros(head.shape, state))
    blocks = _row_blocks(rows, hidden, targets, mask)
    (total, d_head), d_hidden = jax.lax.scan(block, start, blocks)
    d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
    return total, (d_hidden, d_head.astype(stored))


def _summed_loss_backward(
    shard: Shard, rows: int, saved: tuple[jax.Array, jax.Array], d_total: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """The total is replicated along `tensor`, so its cotangents are summed here; `shard_map` sums
    those of the hidden states, which are replicated too."""
    d_total = shard.sum(d_total, TENSOR)
    d_hidden, d_head = (x * d_total.astype(x.dtype) for x in saved)
    return d_hidden, d_head, None, None


_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def _row_blocks(rows: int, hidden: jax.Array, *rest: jax.Array) -> Blocks:
    """[B, T, ...] -> [blocks, rows, ...], zero-padded: the loss mask excludes the padding."""
    flat = (x.reshape(1, -1, *x.shape[2:]) for x in (hidden, *rest))
    return tuple(to_chunks(x, min(rows, rest[0].size))[0] for x in flat)


def _block_losses(
    shard: Shard, h: jax.Array, head: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(losses [X], logits [X, V] of this device's entries, log-sum-exp [X] over all entries) of
    one block of rows."""
    state = jnp.promote_types(h.dtype, jnp.float32)
    logits = jnp.einsum("XD,VD->XV", h, head, preferred_element_type=state)
    lse = jax.nn.logsumexp(logits, axis=-1)
    row, is_own = own_entries(shard, y, len(head))
    chosen = jnp.where(is_own, jnp.take_along_axis(logits, row[:, None], axis=-1)[:, 0], 0)
    if shard.size(TENSOR) > 1:
        top = shard.max(lse, TENSOR)
        lse = top + jnp.log(shard.sum(jnp.exp(lse - top), TENSOR))
        chosen = shard.sum(chosen, TENSOR)
    return lse - chosen, logits, lse


def _is_likeliest(shard: Shard, logits: jax.Array, y: jax.Array) -> jax.Array:
    """Whether y is the argmax over the whole vocabulary (the first entry of a tie)."""
    best, entry = logits.max(-1), logits.argmax(-1)
    entry = entry + shard.index(TENSOR) * logits.shape[-1]
    is_best = best == shard.max(best, TENSOR)
    return shard.min(jnp.where(is_best, entry, jnp.iinfo(entry.dtype).max), TENSOR) == y


def next_token_loss(
    model: "Transformer", tokens: Int[Array, "B T"], hidden: Float[Array, "B T D"] | None = None
) -> Float[Array, ""]:
    """Mean over B * (T - 1) positions of the cross entropy of token i + 1 given tokens 0 .. i.
    `hidden`: the model's hidden states for `tokens`, if already computed."""
    hidden = model.forward(tokens)[0] if hidden is None else hidden
    targets = tokens[:, 1:]
    if not targets.size:
        raise UserError(f"tokens {list(tokens.shape)} have no next token: give rows of two or more")
    mask = jnp.ones(targets.shape, bool)
    return summed_loss(hidden[:, :-1], model.head_weight(), targets, mask) / targets.size
