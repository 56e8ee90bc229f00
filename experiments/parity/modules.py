"""Flax modules that hold reference parameters: building, running, differentiating."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from ttcd_kernels.normalize import PUBLISHED_ZERO_SLOPE

from experiments.parity.golden import Golden
from ttcd_jax.errors import DataError
from ttcd_jax.interop import reference
from ttcd_jax.interop.reference_config import transformer_config
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.precision import Precision


def model_type(golden: Golden) -> str:
    """The `model_type` of a file's `config.json`; delta models differ by their parameters."""
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
    # The rows are short: "auto" would take the attention form, which no long row does.
    published = {"form": "blocked", "zero_slope": PUBLISHED_ZERO_SLOPE}
    if config.memory is None:
        return config
    own = {name: value for name, value in published.items() if hasattr(config.memory, name)}
    return config.replace(memory=config.memory.replace(**own))


def with_params[M: nnx.Module](build: Callable[..., M], params: reference.Params, dtype: str) -> M:
    """The module that `build(rngs=...)` makes, with these parameters in `dtype`. Raises `DataError`
    for one that misfits."""
    module = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    state = nnx.state(module, nnx.Param)
    trees = nnx.to_pure_dict(state), params
    needed, given = (flatten_dict(jax.tree.map(jnp.shape, tree), sep="/") for tree in trees)
    for name in sorted(needed.keys() | given.keys()):
        ours, theirs = needed.get(name), given.get(name)
        if ours != theirs:
            raise DataError(f"parameter {name}: shape {theirs} given, {ours} needed")
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
