"""The check of whole language models: logits, loss, all gradients, hidden states."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.parity import modules
from experiments.parity.golden import Comparison, Golden, worst
from ttcd_jax.interop import reference
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.block import Block
from ttcd_jax.nn.norm import rms_norm
from ttcd_jax.train.loss import next_token_loss_of


def check_model(golden: Golden, dtype: str) -> Comparison:
    """kinds *_model: logits, loss, all gradients; hidden states and evaluation-mode logits if
    stored."""
    config = modules.published_config(golden, dtype)
    tensors = golden.group("param.")
    tokens = jnp.asarray(golden.arrays["in.input_ids"])
    loss, d_params, _, logits = modules.value_and_pull(
        _load(config, tensors, dtype), _loss_and_logits, (tokens,), 1.0
    )
    ours = {"out.logits": logits, "out.loss": loss}
    ours |= modules.gradients(reference.model_to_reference(d_params, config))
    if "out.hidden_states" in golden.arrays:
        ours["out.hidden_states"] = _hidden_states(golden, config, dtype)
    if "out.logits_eval" in golden.arrays:
        # In evaluation mode the reference skips the whole fast path of inputs under one chunk, and
        # the hybrid's delta rule always.
        method = "full" if config.window is None else "swa"
        plain = config.replace(method=method, fast_layers=(), memory=None)
        base = {name: value for name, value in tensors.items() if not _is_fast(name)}
        ours["out.logits_eval"] = modules.evaluate(_load(plain, base, dtype), tokens)
    return worst(ours, golden, dtype)


def _loss_and_logits(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, _ = model.forward(tokens)
    return next_token_loss_of(hidden, model.head_weight(), tokens), model.logits(hidden)


def _is_fast(name: str) -> bool:
    return ".mlp.ttt_" in name or ".dn_" in name or name.endswith(".mlp.b_proj")


def _load(config: TransformerConfig, tensors: Mapping[str, np.ndarray], dtype: str) -> Transformer:
    params = modules.as_dtype(dtype, reference.model_from_reference(tensors, config))
    return modules.with_params(lambda: Transformer(config, rngs=nnx.Rngs(0)), params)


def _hidden_states(golden: Golden, config: TransformerConfig, dtype: str) -> jax.Array:
    """[Y + 1, B, T, D]: the input of every block, then the output of the final norm."""
    table, norm = (
        jnp.asarray(golden.arrays[f"param.model.{name}.weight"], dtype)
        for name in ("embeddings", "norm")
    )
    embeddings = table[golden.arrays["in.input_ids"]]
    states = [embeddings]
    for layer, block in enumerate(block_configs(config)):
        own = golden.group(f"param.model.layers.{layer}.")
        module = modules.load_module(
            lambda block=block: Block(block, rngs=nnx.Rngs(0)), own, block.reference_names, dtype
        )
        states.append(modules.evaluate(module, states[-1], None, None, embeddings))
    states[-1] = rms_norm(states[-1], norm, config.norm_eps)
    return jnp.stack(states)
