"""The check of single layers: outputs and all gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.parity import modules
from experiments.parity.golden import BFLOAT16_NEWTON_SCHULZ, Comparison, Golden, worse, worst
from ttcd_jax.interop import reference
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import Block
from ttcd_jax.precision import Precision


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

    given = [name for name in ("in.x", "in.t", "in.hidden") if name in golden.arrays]
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
