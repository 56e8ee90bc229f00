"""The models of the MAD tasks as problems of `sweep` (model, loss, measures): two small blocks of
any method, and a head for tokens or a decoder.

Next-token tasks take a `Transformer` with an untied head. Compression takes an `Autoencoder`: the
row is decoded from the hidden state of its last token alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.studies.mad.records import MADMethod
from experiments.studies.mad.tasks import IGNORE, MADConfig
from ttcd_jax.axes import param
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.models.config import TransformerConfig, switched_off
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.linear import linear, normal_param, rms_norm
from ttcd_jax.tasks.distillation import key_ranks
from ttcd_jax.train.step import Batch, Metrics


def mad_config(
    method: MADMethod,
    task: MADConfig,
    *,
    window: int | None = None,
    corrects_errors: bool = False,
    **fields: Any,
) -> TransformerConfig:
    """Two layers with four heads, both fast where a method has fast layers, of the published sizes
    unless `fields` change them. The teacher's window is 16 for tasks of 32 tokens, 32 for the
    others, or `window`; the student's and the chunk are half of it.

    Methods are as published for training from scratch. With `corrects_errors` IP-TTCD is that of
    method/ipttcd_corrected.gin. The publication of LaCT does not specify its initial state: here
    full matrices, one fast head per attention head, no Muon.
    """
    window = window or (16 if task.task in ("compression", "memorization") else 32)
    chunk, in_place = window // 2, {"window": window, "fast_layers": (0, 1)}
    sizes = {"vocab_size": task.vocab_size, "dim": 128, "mlp_dim": 256, "has_tied_head": False}
    sizes |= {"num_layers": 2, "num_heads": 4, "method": method}
    memory = MemoryConfig(chunk_size=chunk, block_chunks=1)
    if corrects_errors:
        taps = {"teacher_conv_init": "identity", "student_conv_init": "previous"}
        memory = memory.replace(corrects_errors=True, **taps)
    target = TargetMemoryConfig(chunk_size=chunk, block_chunks=1)
    by_method = {
        "ipttcd": in_place | {"student_window": chunk, "memory": memory},
        "ipttt": in_place | {"memory": target},
        "lact": {"window": window, "memory": LaCTMemoryConfig(chunk_size=chunk, low_rank=None)},
        "swa": {"window": window},
    }
    return TransformerConfig(**sizes | by_method.get(method, {}) | fields)


def sinusoids(length: int, dim: int) -> Float[Array, "T D"]:
    """[sin | cos] of n * 10000^(-k / (dim/2 - 1)), k = 0 .. dim/2 - 1."""
    half = dim // 2
    frequencies = 10_000.0 ** -(jnp.arange(half) / max(half - 1, 1))
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class _DecoderLayer(nnx.Module):
    """gelu(RMSNorm(y) W + b)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        D, dtype = config.dim, config.precision.param_dtype
        self.norm = param(jnp.ones((D,), dtype), ("embed",))
        self.kernel = normal_param(rngs, (D, D), ("embed", "embed_out"), config.init_std, dtype)
        self.bias = param(jnp.zeros((D,), dtype), ("embed_out",))

    def __call__(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = rms_norm(y, self.norm[...], self.config.norm_eps)
        y = linear(y, self.kernel[...], self.config.precision.compute_dtype)
        return jax.nn.gelu(y + self.bias[...].astype(y.dtype), approximate=False)


class Autoencoder(Transformer):
    """Logits [B, T, V] of the tokens [B, T] from the state c [B, D] of their last position alone:

        y_n = gelu(RMSNorm(gelu(RMSNorm(c + sinusoids_n) W_1 + b_1)) W_2 + b_2)

    The transformer's final norm and untied head are applied to y, not to the blocks' output.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.decoder_1 = _DecoderLayer(config, rngs=rngs)
        self.decoder_2 = _DecoderLayer(config, rngs=rngs)

    def normed(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = h[:, -1:] + sinusoids(*h.shape[1:]).astype(h.dtype)
        return super().normed(self.decoder_2(self.decoder_1(y)))


class Problem(NamedTuple):
    """One run's functions: `init(key)` gives parameters, `loss_sum(params, batch)` the loss summed
    over the scored targets of a batch (`sweep.take_rows`), `measure(params, batch)` the `Measures`
    that are averaged over the batches of the test rows."""

    init: Callable[[jax.Array], Any]
    loss_sum: Callable[[Any, Batch], jax.Array]
    measure: Callable[[Any, Batch], Metrics]


def mad_problem(task: MADConfig, config: TransformerConfig) -> Problem:
    """The problem of a task, of which `config` is the model."""
    model_class = Autoencoder if task.task == "compression" else Transformer
    off = switched_off(config, task.num_positions)

    def init(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(model_class(config, rngs=nnx.Rngs(key)), nnx.Param))

    def model_with(params: dict[str, Any], config: TransformerConfig = config) -> Transformer:
        model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
        nnx.update(model, params)
        return model

    def loss_sum(params: dict[str, Any], batch: Batch) -> jax.Array:
        return summed_loss(model_with(params)(batch["tokens"]), batch["targets"])

    def measure(params: dict[str, Any], batch: Batch) -> Metrics:
        tokens, targets = batch["tokens"], batch["targets"]
        model = model_with(params)
        hidden, stats = model.forward(tokens)
        metrics = batch_scores(model.logits(hidden), targets)
        if stats is not None:
            metrics |= stats._asdict()
        if (ranks := key_ranks(model, tokens)) is not None:
            metrics["key_rank"] = ranks
        if off is not None:
            without = batch_scores(model_with(params, off)(tokens), targets)
            metrics |= {f"{name}_off": value for name, value in without.items()}
        return metrics

    return Problem(init, loss_sum, measure)


def summed_loss(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, ""]:
    """Cross entropy summed over scored positions in nats, float32 or better. Differentiable in
    `logits`."""
    state = jnp.promote_types(logits.dtype, jnp.float32)
    log_probs = jax.nn.log_softmax(logits.astype(state), axis=-1)
    classes = jnp.maximum(targets, 0)
    losses = -jnp.take_along_axis(log_probs, classes[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(targets != IGNORE, losses, 0))


def batch_scores(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Metrics:
    """macro_accuracy (the published score), micro_accuracy (the share of scored positions that are
    right) and loss, the mean cross entropy in nats, of one batch; targets of -100 are not scored.

    Macro accuracy is the mean recall over the classes that a batch has as targets *or as
    predictions*: a class that is only predicted counts as a recall of 0. The score of an epoch is
    the plain mean over its batches, not the score of all at once. The prediction is the first of
    the likeliest classes. All are NaN without a scored position.
    """
    predictions, is_scored = jnp.argmax(logits, axis=-1), targets != IGNORE
    is_hit = is_scored & (predictions == targets)

    def count(classes: jax.Array, chosen: jax.Array) -> jax.Array:
        weights = chosen.ravel().astype(jnp.int32)
        return jnp.bincount(classes.ravel(), weights, length=logits.shape[-1])

    num_targets, num_hits = count(targets, is_scored), count(targets, is_hit)
    num_present = jnp.sum(num_targets + count(predictions, is_scored) > 0)
    recalls = num_hits / jnp.maximum(num_targets, 1)
    return {
        "macro_accuracy": jnp.sum(recalls) / num_present,
        "micro_accuracy": jnp.sum(is_hit) / jnp.sum(is_scored),
        "loss": summed_loss(logits, targets) / jnp.sum(is_scored),
    }
