"""What the fast-weight layer and a training step cost: peak memory from the compiler, time from
runs. Programs are compiled from shapes; arrays exist only while something is timed."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ttcd_jax.models.block import IPTTCDBlock, IPTTCDBlockConfig
from ttcd_kernels import measure

from ttcd_jax.memory.chunks import MemoryMask
from ttcd_jax.memory.prefix import Form, MemoryRule, apply_memory
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.models.config import Remat, TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.nn.dual_window import DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.train.loss import summed_loss

# "memory": the read alone, `apply_memory`.
Layer = Literal["memory", "IPTTCDMLP", "IPTTCDBlock"]
# What the read costs at least, for "memory" only: its matrix products and nothing else.
PRODUCTS = "products"


class Sizes(NamedTuple):
    """One layer on one row of `seq_len` tokens."""

    dim: int
    mlp_dim: int
    num_heads: int
    seq_len: int
    chunk_size: int
    window: int
    student_window: int


class LayerRow(NamedTuple):
    """Forward and gradient for parameters and inputs. `seconds` is None where it was not run."""

    layer: str
    form: str
    seconds: float | None
    temp_bytes: int
    tera_flop: float  # multiply-adds times two, estimated
    note: str


class StepRow(NamedTuple):
    """Compile-only peak memory of a training gradient."""

    remat: str
    length: int
    temp_bytes: int
    bytes_per_token: float


def layer_costs(
    sizes: Sizes,
    layers: Iterable[Layer],
    forms: Iterable[Form | Literal["products"]],
    *,
    rounds: int,
    max_seconds: float,
) -> list[LayerRow]:
    """Every layer in every form of the memory. What would not fit in memory, or would take longer
    than `max_seconds` a call at this machine's matmul rate, is only compiled."""
    rate = _matmul_rate()
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    rows = []
    for layer, form in itertools.product(layers, forms):
        if form == PRODUCTS and layer != "memory":
            continue
        compiled, draw = _compile_layer(layer, form, sizes)
        flop = _flop(layer, form, sizes)
        note = _why_not_run(compiled, flop / rate, max_seconds)
        if not note:
            calls[layer, form] = functools.partial(compiled, *draw())
        memory = measure.temp_bytes(compiled)
        rows.append(LayerRow(layer, form, None, memory, flop / 1e12, note))
    seconds = measure.median_seconds(calls, rounds)
    return [row._replace(seconds=seconds.get((row.layer, row.form))) for row in rows]


def _why_not_run(compiled: jax.stages.Compiled, estimate: float, max_seconds: float) -> str:
    limit = measure.usable_bytes()
    if measure.needed_bytes(compiled) > limit:
        return f"memory only: does not fit in {measure.gibibytes(limit)}"
    if estimate > max_seconds:
        return f"memory only: about {estimate:.0f} s a call, the limit is {max_seconds:g} s"
    return ""


def _compile_layer(layer: Layer, form: Form | Literal["products"], sizes: Sizes):
    """(compiled gradient, a function that draws its arguments)."""
    if layer == "memory":
        return _compile_memory(form, sizes)
    assert form != PRODUCTS

    def build() -> nnx.Module:
        mlp, mixer = _layer_configs(form, sizes)
        if layer == "IPTTCDMLP":
            return IPTTCDMLP(mlp, rngs=nnx.Rngs(0))
        return IPTTCDBlock(IPTTCDBlockConfig(mixer=mixer, mlp=mlp), rngs=nnx.Rngs(0))

    graph, params = nnx.split(nnx.eval_shape(build))
    hidden = jax.ShapeDtypeStruct((1, sizes.seq_len, sizes.dim), jnp.float32)
    inputs = (hidden, hidden) if layer == "IPTTCDMLP" else (hidden,)

    def loss(params, inputs):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(*inputs)))

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    def draw():
        rng = np.random.default_rng(0)
        arrays = (rng.standard_normal(x.shape, np.float32) for x in inputs)
        return jax.jit(lambda: nnx.split(build())[1])(), tuple(map(jnp.asarray, arrays))

    return gradient.lower(params, inputs).compile(), draw


def _compile_memory(form: Form | Literal["products"], sizes: Sizes):
    """Forward and gradient of the read, in chunks; (compiled, a function that draws)."""
    D, F, L = sizes.dim, sizes.mlp_dim, sizes.chunk_size
    chunks = 1, sizes.seq_len // L, L
    shapes = [(*chunks, F), (*chunks, F), (*chunks, D), (F, D), (*chunks, D)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def gradient(z, keys, errors, w_base, dy):
        def read(z, keys, errors, w_base):
            assert form != PRODUCTS
            rule = MemoryRule(eta=0.3, form=form)
            return apply_memory(rule, z, keys, errors, w_base, MemoryMask(None, None, None))

        (y, _), pull = jax.vjp(read, z, keys, errors, w_base)
        return y, pull((dy, jnp.zeros((1, F, D))))

    def draw():
        rng = np.random.default_rng(0)
        return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]

    function = _products if form == PRODUCTS else gradient
    return jax.jit(function).lower(*inputs).compile(), draw


def _products(z, keys, errors, w_base, dy):
    """The nine products of the blocked form, forward and backward, each from the inputs; one state
    stands for all."""
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    state = w_base + 1
    once = (
        dot("BCLF,FD->BCLD", z, w_base),
        dot("BCLF,FD->BCLD", z, state),
        dot("BCLF,BCLD->BCFD", keys, errors),
        dot("BCLD,FD->BCLF", dy, w_base),
        dot("BCLD,FD->BCLF", dy, state),
        dot("BCLF,BCLD->BCFD", z, dy),
        dot("BCLF,FD->BCLD", keys, state),
        dot("BCLD,FD->BCLF", errors, state),
    )
    # The backward makes the states once more: the same product, which the compiler must not share.
    again = dot("BCLF,BCLD->BCFD", keys + 1, errors)
    return once, again


def _layer_configs(form: Form, sizes: Sizes) -> tuple[IPTTCDConfig, DualWindowConfig]:
    """The memory writes and reads at initialisation, so that nothing is optimised away."""
    memory = MemoryConfig(chunk_size=sizes.chunk_size, form=form, teacher_conv_init="identity")
    attention = AttentionConfig(
        dim=sizes.dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.dim // sizes.num_heads,
        window=sizes.window,
    )
    mlp = MLPConfig(dim=sizes.dim, hidden_dim=sizes.mlp_dim)
    mixer = DualWindowConfig(attention=attention, student_window=sizes.student_window)
    return IPTTCDConfig(mlp=mlp, memory=memory), mixer


def _flop(layer: Layer, form: Form | Literal["products"], sizes: Sizes) -> float:
    """Forward and gradient at three times the forward. With u = 2 T D F: teacher and student
    features 4u, error 1u, read 1u; then delta_w and its read 2u, or the attention form's T^2 (D +
    F) twice over."""
    T, D, F = sizes.seq_len, sizes.dim, sizes.mlp_dim
    unit = 2 * T * D * F
    if layer == "memory":
        return 3.0 * (unit + 2 * T * T * (D + F)) if form == "attention" else 9.0 * unit
    forward = 6 * unit + (2 * T * T * (D + F) if form == "attention" else 2 * unit)
    if layer == "IPTTCDBlock":
        projections = 10 * T * D * D  # q, k, v and the output of both windows
        forward += projections + 4 * T * min(sizes.window, T) * D
    return 3.0 * forward


def _matmul_rate() -> float:
    """FLOP per second of a float32 product of 1,024 square."""
    x = jnp.ones((1024, 1024))
    product = jax.jit(jnp.matmul)
    seconds = measure.median_seconds({"matmul": lambda: product(x, x)}, rounds=3)["matmul"]
    return 2 * 1024**3 / seconds


def step_memory(
    config: TransformerConfig, lengths: Iterable[int], remats: Iterable[Remat]
) -> list[StepRow]:
    """Peak memory of the gradient of one row's loss, at every length and rematerialisation."""
    rows = []
    for remat in remats:
        for length in lengths:
            memory = measure.temp_bytes(_compile_step(config.replace(remat=remat), length))
            rows.append(StepRow(remat, length, memory, memory / length))
    return rows


def _compile_step(config: TransformerConfig, length: int) -> jax.stages.Compiled:
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(params, tokens, targets):
        model = nnx.merge(graph, params)
        hidden, _ = model.forward(tokens)
        return summed_loss(hidden, model.head_weight(), targets, jnp.ones(targets.shape, bool))

    return jax.jit(jax.value_and_grad(loss)).lower(params, tokens, tokens).compile()
