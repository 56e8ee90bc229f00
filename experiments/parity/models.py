"""Checks of single layers and of whole language models: outputs and all gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.parity import modules
from experiments.parity.golden import BFLOAT16_NEWTON_SCHULZ, Comparison, Golden, worse, worst
from ttcd_jax.inference.model import inference_model
from ttcd_jax.interop import reference
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.block import Block
from ttcd_jax.precision import Precision
from ttcd_jax.train.loss import next_token_loss_of


def check_layer(golden: Golden, dtype: str) -> Comparison:
    """Kinds *_mlp (y, y_plain), *_layer (a mixer's y) and *_block (y), and all gradients."""
    part = golden.kind.split("_")[-1]
    config = modules.published_config(golden, dtype)

    def layer(config: TransformerConfig) -> Any:
        block = block_configs(config)[golden.info.get("layer_idx", 0)]
        return {"mlp": block.mlp, "layer": block.mixer, "block": block}[part]

    names = layer(config).reference_names
    params = reference.module_from_reference(golden.group("param."), names)

    def load(config: TransformerConfig, dtype: str) -> nnx.Module:
        own = layer(config)
        build = functools.partial(Block, own) if part == "block" else own.build
        return modules.with_params(build, params, dtype)

    hidden = ("in.hidden",) if "in.hidden" in golden.arrays else ("in.x",)
    given = ("in.x", "in.t") if part == "mlp" else hidden
    inputs = tuple(jnp.asarray(golden.arrays[name], dtype) for name in given)
    run = _with_plain if part == "mlp" else _alone
    y, d_params, d_inputs, ours = modules.value_and_pull(
        run, load(config, dtype), inputs, golden.arrays["in.G"]
    )
    ours |= {"out.y": y}
    ours |= {f"grad_{name}": gradient for name, gradient in zip(given, d_inputs, strict=True)}
    ours |= _gradients(reference.module_to_reference(jax.device_get(d_params), names))
    result = worst(ours, golden, dtype)
    if "out.y_bf16ns" not in golden.arrays:
        return result
    # The memory, and with it Newton-Schulz, in bfloat16, all else in float32.
    narrow = load(config.replace(precision=Precision(state="bfloat16")), "float32")
    wide = (x.astype("float32") for x in inputs)
    y = modules.evaluate(type(narrow).__call__, narrow, *wide)
    theirs = golden.arrays["out.y_bf16ns"]
    distance = np.linalg.norm(np.asarray(y, np.float64) - theirs) / np.linalg.norm(theirs)
    allowed = BFLOAT16_NEWTON_SCHULZ[golden.kind]
    return worse(result, Comparison("out.y_bf16ns", float(distance), allowed))


def _with_plain(mlp: Any, x: jax.Array, t: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return mlp(x, t), {"out.y_plain": mlp.plain(x)}


def _alone(layer: Any, hidden: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return layer(hidden), {}


def _gradients(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"grad.{name}": value for name, value in tensors.items()}


def check_model(golden: Golden, dtype: str) -> Comparison:
    """Kinds *_model: logits, loss, all gradients; hidden states and evaluation-mode logits if
    stored."""
    config = modules.published_config(golden, dtype)
    tensors = golden.group("param.")

    def load(config: TransformerConfig, tensors: dict[str, np.ndarray]) -> Transformer:
        params = reference.model_from_reference(tensors, config)
        return modules.with_params(functools.partial(Transformer, config), params, dtype)

    model, tokens = load(config, tensors), jnp.asarray(golden.arrays["in.input_ids"])
    loss, d_params, _, logits = modules.value_and_pull(_loss_and_logits, model, (tokens,), 1.0)
    ours = {"out.logits": logits, "out.loss": loss}
    # On the host, where a layer's row of a stacked gradient compiles no program.
    ours |= _gradients(reference.model_to_reference(jax.device_get(d_params), config))
    if "out.hidden_states" in golden.arrays:
        ours["out.hidden_states"] = modules.evaluate(_hidden_states, model, tokens)
    if "out.logits_eval" in golden.arrays:
        # In evaluation mode the reference skips the whole fast path of inputs under one chunk, and
        # the hybrid's delta rule always.
        method = "full" if config.window is None else "swa"
        plain = config.replace(method=method, fast_layers=(), memory=None)
        base = {name: value for name, value in tensors.items() if not _is_fast(name)}
        ours["out.logits_eval"] = modules.evaluate(Transformer.__call__, load(plain, base), tokens)
    return worst(ours, golden, dtype)


def _loss_and_logits(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, _ = model.forward(tokens)
    return next_token_loss_of(hidden, model.head_weight(), tokens), model.logits(hidden)


def _is_fast(name: str) -> bool:
    return ".mlp.ttt_" in name or ".dn_" in name or name.endswith(".mlp.b_proj")


def _hidden_states(model: Transformer, tokens: jax.Array) -> jax.Array:
    """[Y + 1, B, T, D]: the input of every block, then the output of the final norm."""
    unstacked = inference_model(model)
    h = embeddings = unstacked.embedding[...][tokens]
    states = []
    for graph, params in zip(unstacked.blocks, unstacked.layers, strict=True):
        states.append(h)
        h = nnx.merge(graph, params)(h, embeddings=embeddings)
    return jnp.stack([*states, model.normed(h)])
