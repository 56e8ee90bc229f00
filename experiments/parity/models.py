"""Checks of single layers and of whole language models: outputs and all gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.parity import modules
from experiments.parity.golden import BFLOAT16_NEWTON_SCHULZ, Comparison, Golden, worse, worst
from ttcd_jax.interop import reference
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.block import Block
from ttcd_jax.nn.norm import rms_norm
from ttcd_jax.precision import Precision
from ttcd_jax.train.loss import next_token_loss


def check_layer(golden: Golden, dtype: str) -> Comparison:
    """Kinds *_mlp (y, y_plain), *_layer (a mixer's y) and *_block (y), and all gradients."""
    part = golden.kind.split("_")[-1]
    config = modules.published_config(golden, dtype)

    def layer(config: TransformerConfig) -> Any:
        block = block_configs(config)[golden.info.get("layer_idx", 0)]
        return {"mlp": block.mlp, "layer": block.mixer, "block": block}[part]

    names = layer(config).reference_names

    def load(config: TransformerConfig, dtype: str) -> nnx.Module:
        own = layer(config)
        build = own.build if part != "block" else lambda rngs: Block(own, rngs=rngs)
        params = golden.group("param.")
        return modules.load_module(lambda: build(rngs=nnx.Rngs(0)), params, names, dtype)

    hidden = ("in.hidden",) if "in.hidden" in golden.arrays else ("in.x",)
    given = ("in.x", "in.t") if part == "mlp" else hidden
    inputs = tuple(jnp.asarray(golden.arrays[name], dtype) for name in given)
    run = _with_plain if part == "mlp" else _alone
    y, d_params, d_inputs, ours = modules.value_and_pull(
        load(config, dtype), run, inputs, golden.arrays["in.G"]
    )
    ours |= {"out.y": y}
    ours |= {f"grad_{name}": gradient for name, gradient in zip(given, d_inputs, strict=True)}
    ours |= modules.gradients(reference.module_to_reference(d_params, names))
    result = worst(ours, golden, dtype)
    if "out.y_bf16ns" not in golden.arrays:
        return result
    # The memory, and with it Newton-Schulz, in bfloat16, all else in float32.
    narrow = load(config.replace(precision=Precision(state="bfloat16")), "float32")
    y = modules.evaluate(narrow, *modules.as_dtype("float32", inputs))
    theirs = golden.arrays["out.y_bf16ns"]
    distance = np.linalg.norm(np.asarray(y, np.float64) - theirs) / np.linalg.norm(theirs)
    allowed = BFLOAT16_NEWTON_SCHULZ[golden.kind]
    return worse(result, Comparison("out.y_bf16ns", float(distance), allowed))


def _with_plain(mlp: Any, x: jax.Array, t: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return mlp(x, t), {"out.y_plain": mlp.plain(x)}


def _alone(layer: Any, hidden: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return layer(hidden), {}


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
    return next_token_loss(model, tokens, hidden), model.logits(hidden)


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
