"""Checks of single layers: outputs and all gradients."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from experiments.parity import modules
from experiments.parity.golden import (
    BFLOAT16_NEWTON_SCHULZ,
    Comparison,
    Golden,
    bound,
    rounded_distance,
    worst,
)
from ttcd_jax.interop import reference
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import Block, BlockConfig
from ttcd_jax.precision import Precision


def _block(golden: Golden, config: TransformerConfig) -> BlockConfig:
    return block_configs(config)[golden.info.get("layer_idx", 0)]


def check_mlp(golden: Golden, dtype: str) -> Comparison:
    """kinds ipttcd_mlp, ipttt_mlp: y, y_plain and all gradients."""
    config = modules.published_config(golden, dtype)
    names = _block(golden, config).mlp.reference_names

    def load(config: TransformerConfig, dtype: str) -> nnx.Module:
        mlp = _block(golden, config).mlp
        return modules.load_module(
            lambda: mlp.build(rngs=nnx.Rngs(0)),
            golden.group("param."),
            names,
            dtype,
        )

    x, t = (jnp.asarray(golden.arrays[name], dtype) for name in ("in.x", "in.t"))
    y, d_params, d_inputs, y_plain = modules.value_and_pull(
        load(config, dtype),
        _remembering_and_plain,
        (x, t),
        golden.arrays["in.G"],
    )
    ours = {"out.y": y, "out.y_plain": y_plain}
    ours |= {"grad_in.x": d_inputs[0], "grad_in.t": d_inputs[1]}
    ours |= modules.gradients(reference.module_to_reference(d_params, names))
    result = worst(ours, golden, lambda name: bound(golden, dtype, name))
    if "out.y_bf16ns" in golden.arrays:
        narrow = load(_narrow(config), "float32")
        y = modules.evaluate(narrow, *modules.as_dtype("float32", (x, t)))
        result = max(result, _rounded(golden, y), key=lambda result: result.ratio)
    return result


def check_mixer(golden: Golden, dtype: str) -> Comparison:
    """kinds delta_layer, lact_layer: y and all gradients."""
    config = modules.published_config(golden, dtype)
    names = _block(golden, config).mixer.reference_names

    def load(config: TransformerConfig, dtype: str) -> nnx.Module:
        mixer = _block(golden, config).mixer
        return modules.load_module(
            lambda: mixer.build(rngs=nnx.Rngs(0)),
            golden.group("param."),
            names,
            dtype,
        )

    name = "in.x" if "in.x" in golden.arrays else "in.hidden"
    hidden = jnp.asarray(golden.arrays[name], dtype)
    y, d_params, (d_hidden,), _ = modules.value_and_pull(
        load(config, dtype), _in_rows, (hidden,), golden.arrays["in.G"]
    )
    ours = {"out.y": y, f"grad_{name}": d_hidden}
    ours |= modules.gradients(reference.module_to_reference(d_params, names))
    result = worst(ours, golden, lambda name: bound(golden, dtype, name))
    if "out.y_bf16ns" in golden.arrays:
        hidden = hidden.astype("float32")
        y = modules.evaluate(load(_narrow(config), "float32"), hidden)
        result = max(result, _rounded(golden, y), key=lambda result: result.ratio)
    return result


def check_block(golden: Golden, dtype: str) -> Comparison:
    """kind ipttcd_block: y and all gradients."""
    config = _block(golden, modules.published_config(golden, dtype))
    names = config.reference_names
    module = modules.load_module(
        lambda: Block(config, rngs=nnx.Rngs(0)), golden.group("param."), names, dtype
    )
    hidden = jnp.asarray(golden.arrays["in.hidden"], dtype)
    y, d_params, (d_hidden,), _ = modules.value_and_pull(
        module, _alone, (hidden,), golden.arrays["in.G"]
    )
    ours: dict[str, Any] = {"out.y": y, "grad_in.hidden": d_hidden}
    ours |= modules.gradients(reference.module_to_reference(d_params, names))
    return worst(ours, golden, lambda name: bound(golden, dtype, name))


def _remembering_and_plain(mlp, x, t):
    return mlp(x, t), mlp.plain(x)


def _in_rows(mixer, hidden):
    return mixer(hidden), None


def _alone(block, hidden):
    return block(hidden), None


def _narrow(config: TransformerConfig) -> TransformerConfig:
    """The memory, and with it Newton-Schulz, in bfloat16, all else in float32."""
    return config.replace(precision=Precision(state="bfloat16"))


def _rounded(golden: Golden, y) -> Comparison:
    return rounded_distance("out.y_bf16ns", y, golden, BFLOAT16_NEWTON_SCHULZ[golden.kind])
