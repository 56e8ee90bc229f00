"""Checks of single layers and of whole language models: outputs and all gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from ttcd_kernels.normalize import PUBLISHED_ZERO_SLOPE

from tests.parity.golden import BFLOAT16_NEWTON_SCHULZ, Comparison, Golden, worse, worst
from ttcd_jax.errors import DataError
from ttcd_jax.inference.model import inference_model
from ttcd_jax.interop import reference
from ttcd_jax.interop.reference_config import transformer_config
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.block import Block, Names
from ttcd_jax.precision import Precision
from ttcd_jax.train.layers_on_disk import by_name, misfit, stacked
from ttcd_jax.train.loss import next_token_loss
from ttcd_jax.train.state import abstract_params


def check_layer(golden: Golden, dtype: str) -> Comparison:
    """Kinds *_mlp (y, y_plain), *_layer (a mixer's y) and *_block (y), and all gradients."""
    part = golden.kind.split("_")[-1]
    config = published_config(golden, dtype)

    def layer(config: TransformerConfig) -> Any:
        block = block_configs(config)[golden.info.get("layer_idx", 0)]
        return {"mlp": block.mlp, "layer": block.mixer, "block": block}[part]

    names = layer(config).reference_names
    params = module_from_reference(golden.group("param."), names)

    def load(config: TransformerConfig, dtype: str) -> nnx.Module:
        target = layer(config)
        build = functools.partial(Block, target) if part == "block" else target.build
        return with_params(build, params, dtype)

    hidden = ("in.hidden",) if "in.hidden" in golden.arrays else ("in.x",)
    given = ("in.x", "in.t") if part == "mlp" else hidden
    inputs = tuple(jnp.asarray(golden.arrays[name], dtype) for name in given)
    run = _with_plain if part == "mlp" else _alone
    y, d_params, d_inputs, ours = value_and_pull(
        run, load(config, dtype), inputs, golden.arrays["in.G"]
    )
    ours |= {"out.y": y}
    ours |= {f"grad_{name}": gradient for name, gradient in zip(given, d_inputs, strict=True)}
    ours |= _gradients(module_to_reference(jax.device_get(d_params), names))
    result = worst(ours, golden, dtype)
    if "out.y_bf16ns" not in golden.arrays:
        return result
    # The memory, and with it Newton-Schulz, in bfloat16, all else in float32: the same program
    # for either `dtype`, compiled once.
    with jax.enable_x64(False):
        narrow = load(config.replace(precision=Precision(state="bfloat16")), "float32")
        wide = (jnp.asarray(golden.arrays[name], "float32") for name in given)
        y = evaluate(type(narrow).__call__, narrow, *wide)
    theirs = golden.arrays["out.y_bf16ns"]
    distance = np.linalg.norm(np.asarray(y, np.float64) - theirs) / np.linalg.norm(theirs)
    allowed = BFLOAT16_NEWTON_SCHULZ[golden.kind]
    return worse(result, Comparison("out.y_bf16ns", float(distance), allowed))


def module_from_reference(tensors: dict[str, np.ndarray], names: Names) -> reference.Params:
    """Our parameters of one MLP or block. Raises `KeyError` for an unknown name."""
    items = [(*names[name], value) for name, value in tensors.items()]
    ours = {path: reference.LAYOUTS[kind].to_ours(value) for path, kind, value in items}
    return unflatten_dict(ours, sep="/")


def module_to_reference(params: reference.Params, names: Names) -> dict[str, np.ndarray]:
    """The inverse of `module_from_reference`, of gradients too."""
    flat = by_name(params)
    return {
        name: reference.LAYOUTS[layout].to_theirs(np.asarray(flat[path]))
        for name, (path, layout) in names.items()
        if path in flat
    }


def model_from_reference(
    tensors: dict[str, np.ndarray], config: TransformerConfig
) -> reference.Params:
    """The stacked parameters of a whole model. Raises `KeyError` for a name that is unknown or
    missing."""
    names = reference.names_on_disk(config)
    rows = {names[x].path: names[x].layout.to_ours(value) for x, value in tensors.items()}
    return stacked_params(rows, config)


def stacked_params(rows: dict[str, Any], config: TransformerConfig) -> reference.Params:
    """Parameters by their names on disk as those of a model. `rows` is emptied."""
    return unflatten_dict(stacked(config, rows, by_name(abstract_params(config))), sep="/")


def _with_plain(mlp: Any, x: jax.Array, t: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return mlp(x, t), {"out.y_plain": mlp.plain(x)}


def _alone(layer: Any, hidden: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return layer(hidden), {}


def _gradients(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"grad.{name}": value for name, value in tensors.items()}


def check_model(golden: Golden, dtype: str) -> Comparison:
    """Kinds *_model: logits, loss, all gradients; hidden states and evaluation-mode logits if
    stored."""
    config = published_config(golden, dtype)
    tensors = golden.group("param.")

    def load(config: TransformerConfig, tensors: dict[str, np.ndarray]) -> Transformer:
        params = model_from_reference(tensors, config)
        return with_params(functools.partial(Transformer, config), params, dtype)

    model, tokens = load(config, tensors), jnp.asarray(golden.arrays["in.input_ids"])
    loss, d_params, _, logits = value_and_pull(_loss_and_logits, model, (tokens,), 1.0)
    ours = {"out.logits": logits, "out.loss": loss}
    # On the host: on a device every slice of a stacked gradient would compile a program.
    ours |= _gradients(reference.model_to_reference(jax.device_get(d_params), config))
    if "out.hidden_states" in golden.arrays:
        ours["out.hidden_states"] = evaluate(_hidden_states, model, tokens)
    if "out.logits_eval" in golden.arrays:
        # In evaluation mode the reference skips the fast path for inputs shorter than one chunk,
        # and the hybrid's delta rule always.
        method = "full" if config.window is None else "swa"
        plain = config.replace(method=method, fast_layers=(), memory=None)
        base = {name: value for name, value in tensors.items() if not _is_fast(name)}
        ours["out.logits_eval"] = evaluate(Transformer.__call__, load(plain, base), tokens)
    return worst(ours, golden, dtype)


def _loss_and_logits(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, _ = model.forward(tokens)
    return next_token_loss(model, tokens, hidden), model.logits(hidden)


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


def model_type(golden: Golden) -> str:
    """The `model_type` of a file's `config.json`; delta models are identified by parameters."""
    fixed = {"ipttcd": "ipttcdv9", "ipttt": "ipttt", "lact": "lact"}
    family = golden.kind.split("_")[0]
    if family in fixed:
        return fixed[family]
    names = golden.group("param.")
    if any(".dn_" in name for name in names):
        return "deltanet_baseline"
    return "gated_deltanet" if any("A_log" in name for name in names) else "delta_net"


def published_config(golden: Golden, dtype: str) -> TransformerConfig:
    """Our configuration of a file's model. A file of one layer states only that layer: the rest is
    filled in with ones."""
    source = golden.config
    if not golden.kind.endswith("_model"):
        layer = golden.info.get("layer_idx", 0)
        rest = {"vocab_size": 1, "num_hidden_layers": layer + 1, "intermediate_size": 1}
        if golden.kind.endswith("_mlp"):
            rest |= {"num_heads": 1, "head_dim": 2, "ttt_layers": [layer]}
        source = rest | source
    precision = Precision.from_dict(dict.fromkeys(("param", "compute", "state"), dtype))
    config = transformer_config(source | {"model_type": model_type(golden)}, precision=precision)
    # The rows are short: "auto" would take the attention form, unlike long rows.
    published = {"form": "blocked", "zero_slope": PUBLISHED_ZERO_SLOPE}
    if config.memory is None:
        return config
    known = {name: value for name, value in published.items() if hasattr(config.memory, name)}
    return config.replace(memory=config.memory.replace(**known))


def with_params[M: nnx.Module](build: Callable[..., M], params: reference.Params, dtype: str) -> M:
    """The module that `build(rngs=...)` makes, with these parameters in `dtype`. Raises `DataError`
    for parameters that do not fit."""
    module = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    state = nnx.state(module, nnx.Param)
    if problem := misfit(by_name(nnx.to_pure_dict(state)), by_name(params)):
        raise DataError(problem)
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: jnp.asarray(x, dtype), params))
    nnx.update(module, state)
    return module


@functools.partial(nnx.jit, static_argnums=0)
def value_and_pull(
    run: Callable[..., Any], module: nnx.Module, inputs: tuple, cotangent: np.ndarray | float
) -> tuple[Any, Any, Any, Any]:
    """(value, parameter gradients as a pure dict, input gradients, aux): one compiled function,
    shared by files of one configuration and shape. `run(module, *inputs)` gives (value, aux)."""
    graph, state = nnx.split(module)
    value, pull, aux = jax.vjp(
        lambda s, x: run(nnx.merge(graph, s), *x), state, inputs, has_aux=True
    )
    d_state, d_inputs = pull(jnp.asarray(cotangent, value.dtype))
    return value, nnx.to_pure_dict(d_state), d_inputs, aux


@functools.partial(nnx.jit, static_argnums=0)
def evaluate(run: Callable[..., jax.Array], module: nnx.Module, *inputs: Any) -> jax.Array:
    """`run(module, *inputs)`, compiled once for equal modules."""
    return run(module, *inputs)
