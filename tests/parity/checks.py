"""Comparison with reference values: one check per kind of file, of layers and models, operators,
and training.

`golden` reads files and holds all bounds; `mad` has the checks of MAD. A check takes a file and the
dtype to compute in ("float32", "float64") and returns its worst comparison."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict
from ttcd_kernels import dual_window_attention, dual_window_attention_with_lse, window_attention
from ttcd_kernels.normalize import PUBLISHED_ZERO_SLOPE

from tests.parity import mad
from tests.parity.golden import (
    BFLOAT16_MUON,
    BFLOAT16_NEWTON_SCHULZ,
    Comparison,
    Golden,
    bound,
    relative_error,
    worse,
    worst,
)
from ttcd_jax import Block, Precision, Transformer
from ttcd_jax.errors import DataError
from ttcd_jax.inference.model import inference_model
from ttcd_jax.interop import checkpoint as reference
from ttcd_jax.interop.reference_config import transformer_config
from ttcd_jax.memory.delta_rule import DeltaMemory, DeltaWrites, l2_normalize_inside
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.train.layers_on_disk import by_name, misfit, stacked
from ttcd_jax.train.loss import next_token_loss
from ttcd_jax.train.muon import Axes, group_of
from ttcd_jax.train.optimizer import (
    MuonSettings,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    global_norm,
    learning_rate,
)
from ttcd_jax.train.state import abstract_params


def check_layer(golden: Golden, dtype: str) -> Comparison:
    """Kinds *_mlp (y, y_plain), *_layer (a mixer's y) and *_block (y), and all gradients."""
    part, arrays = golden.kind.split("_")[-1], golden.arrays
    config = published_config(golden, dtype)

    def layer(config: TransformerConfig) -> Any:
        block = block_configs(config)[golden.info.get("layer_idx", 0)]
        return {"mlp": block.mlp, "layer": block.mixer, "block": block}[part]

    names = layer(config).reference_names
    # Raises `KeyError` for an unknown name.
    items = ((*names[name], value) for name, value in golden.group("param.").items())
    flat = {path: reference.LAYOUTS[kind].to_ours(value) for path, kind, value in items}
    params = unflatten_dict(flat, sep="/")
    hidden = ("in.hidden",) if "in.hidden" in arrays else ("in.x",)
    given = ("in.x", "in.t") if part == "mlp" else hidden

    def load(config: TransformerConfig, dtype: str) -> tuple[nnx.Module, tuple[jax.Array, ...]]:
        target = layer(config)
        build = functools.partial(Block, target) if part == "block" else target.build
        inputs = tuple(jnp.asarray(arrays[name], dtype) for name in given)
        return with_params(build, params, dtype), inputs

    y, d_params, d_inputs, ours = value_and_pull(_outputs, *load(config, dtype), arrays["in.G"])
    ours |= {"out.y": y} | {f"grad_{x}": dx for x, dx in zip(given, d_inputs, strict=True)}
    flat = by_name(jax.device_get(d_params))
    for name, (path, layout) in names.items():
        if path in flat:
            ours[f"grad.{name}"] = reference.LAYOUTS[layout].to_theirs(np.asarray(flat[path]))
    result = worst(ours, golden, dtype)
    if "out.y_bf16ns" not in arrays:
        return result
    # The memory, and with it Newton-Schulz, in bfloat16, all else in float32: the same program
    # for either `dtype`, compiled once.
    with jax.enable_x64(False):
        narrow, inputs = load(config.replace(precision=Precision(state="bfloat16")), "float32")
        y = evaluate(type(narrow).__call__, narrow, *inputs)
    theirs = arrays["out.y_bf16ns"]
    distance = np.linalg.norm(np.asarray(y, np.float64) - theirs) / np.linalg.norm(theirs)
    allowed = BFLOAT16_NEWTON_SCHULZ[golden.kind]
    return worse(result, Comparison("out.y_bf16ns", float(distance), allowed))


def _outputs(layer: Any, *inputs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    plain = {"out.y_plain": layer.plain(inputs[0])} if hasattr(layer, "plain") else {}
    return layer(*inputs), plain


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
    gradients = reference.model_to_reference(jax.device_get(d_params), config)
    ours |= {f"grad.{name}": value for name, value in gradients.items()}
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


_DELTA_CHUNK = 16  # several chunks in the files' short rows
_HEADS = ("B", "T", "H", "HK", "D")


def check_delta_rule(golden: Golden, dtype: str) -> Comparison:
    """Kind delta_op: outputs, final state and all gradients of the chunk-parallel form."""
    arrays, config = golden.arrays, golden.config
    inputs = {
        name: jnp.asarray(arrays[f"in.{name}"], dtype)
        for name in ("q", "k", "v", "beta", "g", "S0")
        if f"in.{name}" in arrays
    }
    rescale = config["scale"] * inputs["q"].shape[-1] ** 0.5  # ours is 1 / sqrt(K)

    def run(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k = x["q"], x["k"]
        if config["l2norm_inside"]:
            q, k = l2_normalize_inside(q), l2_normalize_inside(k)
        memory = DeltaMemory(_DELTA_CHUNK, jnp.dtype(dtype))
        writes = DeltaWrites(k, x["v"], x["beta"], x.get("g"))
        prepared = memory.prepared(rescale * q, writes, None, length=q.shape[1])
        return memory.row(prepared, x.get("S0"))

    @jax.jit
    def differentiate(x: dict[str, jax.Array], cotangents: Any) -> tuple[Any, Any]:
        results, pull = jax.vjp(run, x)
        return results, pull(cotangents)[0]

    cotangents = tuple(jnp.asarray(arrays[name], dtype) for name in ("in.G_o", "in.G_S"))
    (out, state), grads = differentiate(inputs, cotangents)
    ours = {f"grad_in.{name}": value for name, value in grads.items()}
    return worst({"out.o": out, "out.S": state} | ours, golden, dtype)


def check_attention(golden: Golden, dtype: str) -> Comparison:
    """Kind dual_attn: both outputs, both log-sum-exps, gradients of each output alone."""
    inputs, config = _attention_inputs(golden), golden.config
    q, k, v, d_teacher, d_student = (
        jnp.asarray(inputs.arrays[f"in.{name}"], dtype)
        for name in ("q", "k", "v", "G_teacher", "G_student")
    )
    attention = functools.partial(
        dual_window_attention_with_lse,
        teacher_window=config["window_teacher"],
        student_window=config["window_student"],
        scale=config["scale"],
    )

    @jax.jit
    def run(*operands: jax.Array) -> tuple[Any, ...]:
        (teacher, student, *lse), pull = jax.vjp(attention, *operands)
        nothing, no_lse = jnp.zeros_like(teacher), jnp.zeros_like(lse[0])
        d_of_teacher = pull((d_teacher, nothing, no_lse, no_lse))
        d_of_student = pull((nothing, d_student, no_lse, no_lse))
        return teacher, student, *(x.mT for x in lse), *d_of_teacher, *d_of_student

    outputs = ("out.o_teacher", "out.o_student", "out.lse_teacher", "out.lse_student")
    grads = (f"grad_{which}.{name}" for which in ("teacher", "student") for name in "qkv")
    return worst(dict(zip((*outputs, *grads), run(q, k, v), strict=True)), golden, dtype)


def _attention_inputs(golden: Golden) -> Golden:
    """The file in the same folder with q, k, v and cotangents of its shape."""
    for path in sorted(golden.path.parent.glob("*inputs*.npz")):
        inputs = Golden(path)
        if inputs.kind == "dual_attn_inputs" and all(
            inputs.config[name] == golden.config[name] for name in _HEADS
        ):
            return inputs
    raise DataError(f"no file of kind dual_attn_inputs with the shape of {golden.path.name} here")


def check_attention_inputs(golden: Golden, dtype: str) -> Comparison:
    """Kind dual_attn_inputs: on these inputs one pass over both windows agrees with a call for each
    (the reference's outputs are in the dual_attn files)."""
    q, k, v = (jnp.asarray(golden.arrays[f"in.{name}"], dtype) for name in "qkv")
    T = q.shape[1]
    windows = T // 2, T // 4
    forms = (
        dual_window_attention(q, k, v, teacher_window=windows[0], student_window=windows[1]),
        [window_attention(q, k, v, window=window) for window in windows],
    )
    error = max(relative_error(a, np.asarray(b)) for a, b in zip(*forms, strict=True))
    return Comparison("one sweep against two calls", error, bound(golden, dtype, "out"))


def check_optimizer(golden: Golden, dtype: str) -> Comparison:
    """Kind optimizer: parameters after every step; with Muon also at the published precision."""
    axes = {name: _axes(name, x.shape) for name, x in golden.group("param.").items()}
    after, norms = _run(golden, _optimizer_config(golden, axes, dtype), axes, dtype)
    ours: dict[str, Any] = {f"out.{name}": value for name, value in after.items()}
    if "out.grad_norm" in golden.arrays:
        ours["out.grad_norm"] = norms
    result = worst(ours, golden, dtype)
    rounded = golden.group("out_bf16.")
    if not rounded:
        return result
    with jax.enable_x64(False):  # the same program for either `dtype`, compiled once
        config = _optimizer_config(golden, axes, "bfloat16")
        after, _ = _run(golden, config, axes, "float32")
    for name, theirs in rounded.items():
        change = np.linalg.norm(theirs[-1] - golden.arrays[f"param.{name}"])
        distance = float(np.linalg.norm(after[name][-1] - theirs[-1]) / change)
        result = worse(result, Comparison(f"out_bf16.{name}", distance, BFLOAT16_MUON))
    return result


def _axes(name: str, shape: tuple[int, ...]) -> Axes:
    """Axis names of a tensor; those on the vocabulary axis are chosen as in the reference."""
    if len(shape) == 1:
        return ("embed",)
    if len(shape) == 3:
        return ("mlp", "layers", "taps") if shape[1] == 1 else ("layers", "mlp", "embed")
    if any(part in name for part in ("embeddings", "lm_head", "model.norm")):
        return ("vocab", "embed")
    return ("mlp", "embed")


def _optimizer_config(golden: Golden, axes: dict[str, Axes], dtype: str) -> OptimizerConfig:
    """With Newton-Schulz, if it has any, in `dtype`."""
    source = golden.config
    fields = {name: source[name] for name in ("beta1", "beta2", "eps", "weight_decay")}
    fields["clip_norm"] = source.get("clip_norm")
    if "muon_params" not in golden.info:
        return OptimizerConfig(**fields)
    ours = {name for name, names in axes.items() if group_of(names) == "muon"}
    if ours != set(golden.info["muon_params"]):
        differing = sorted(ours ^ set(golden.info["muon_params"]))
        raise DataError(f"Muon is given other tensors than the reference's: {', '.join(differing)}")
    own = {"momentum": source["momentum"], "is_nesterov": source["nesterov"]}
    muon = MuonSettings.from_dict(own | {"orthogonalization": dtype})
    return OptimizerConfig(kind="muon", settings=muon, **fields)


def _run(
    golden: Golden, config: OptimizerConfig, axes: dict[str, Axes], dtype: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(parameters after every step [steps, ...], gradient norms [steps])."""
    rates = jnp.asarray(golden.arrays["in.lr"], dtype)
    optimizer = build_optimizer(config, lambda step: rates[step], axes)
    params = {name: jnp.asarray(x, dtype) for name, x in golden.group("param.").items()}
    grads = {name: jnp.asarray(x, dtype) for name, x in golden.group("in.grad.").items()}

    def step(carry: tuple[Any, Any], grads: Any) -> tuple[tuple[Any, Any], tuple[Any, jax.Array]]:
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params: Any = optax.apply_updates(params, updates)
        return (params, state), (params, global_norm(grads))

    _, (after, norms) = jax.lax.scan(step, (params, optimizer.init(params)), grads)
    return {name: np.asarray(value) for name, value in after.items()}, np.asarray(norms)


def check_schedule(golden: Golden, dtype: str) -> Comparison:
    """Kind lr_schedule: the rate of every step of every case."""
    ours = {}
    for case, source in golden.config.items():
        floor = source.get("lr_min", 0.0)
        if "lr_min_absolute" in source:
            floor = min(1.0, source["lr_min_absolute"] / source["lr"])
        fields = {name: source[name] for name in ("steps", "warmup", "decay_ratio")}
        fields |= {"peak": source["lr"], "decay": source["decay_type"], "floor_ratio": floor}
        rates = jax.jit(jax.vmap(learning_rate(ScheduleConfig(**fields))))
        ours[f"out.{case}"] = rates(jnp.arange(source["steps"]))
    return worst(ours, golden, dtype)


Check = Callable[[Golden, str], Comparison]

CHECKS: dict[str, Check] = {
    **dict.fromkeys(("ipttcd_mlp", "ipttt_mlp", "ipttcd_block"), check_layer),
    **dict.fromkeys(("delta_layer", "lact_layer"), check_layer),
    **dict.fromkeys(("ipttcd_model", "ipttt_model"), check_model),
    **dict.fromkeys(("delta_model", "lact_model"), check_model),
    "delta_op": check_delta_rule,
    "dual_attn_inputs": check_attention_inputs,
    "dual_attn": check_attention,
    "optimizer": check_optimizer,
    "lr_schedule": check_schedule,
    "mad_instances": mad.check_instances,
    "mad_metrics": mad.check_metrics,
}
