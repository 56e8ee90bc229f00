"""Muon against the published steps; which parameter follows it; what a sharded stack costs.

Run as a program, the file prints what the last test asks for: shards need eight devices, which a
process must ask for before jax starts.
"""

import json
import math
import re

import commands
import jax
import jax.numpy as jnp
import optax
import pytest
from checks import assert_close, distance, draw
from devices import environment
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ttcd_jax.errors import UserError
from ttcd_jax.memory.newton_schulz import NEWTON_SCHULZ
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.train.muon import group_of, orthogonalized, parameter_groups
from ttcd_jax.train.optimizer import OptimizerConfig, build_with_schedule
from ttcd_jax.train.state import init_state, logical_axes

# One tensor of every kind, under its published name.
AXES = {
    "model.embeddings.weight": ("vocab", "embed"),
    "model.layers.0.attn_norm.weight": ("embed",),
    "model.layers.0.attn.q_proj.weight": ("embed", "heads"),
    "model.layers.0.attn.o_proj.weight": ("heads", "embed"),
    "model.layers.0.mlp.gate_proj.weight": ("embed", "mlp"),
    "model.layers.0.mlp.down_proj.weight": ("mlp", "embed"),
    "model.layers.0.mlp.ttt_proj.weight": ("embed", "embed_out"),
    "model.layers.0.mlp.ttt_teacher_conv.weight": ("taps", "mlp"),
    "model.layers.0.mlp.b_proj": ("embed",),
    "model.norm.weight": ("embed",),
    "lm_head.weight": ("vocab", "embed"),
}


def _config(**changes) -> OptimizerConfig:
    return OptimizerConfig(kind="muon", clip_norm=None, **changes)


BLOCK = {
    "mixer/query": "muon",
    "mixer/key": "muon",
    "mixer/value": "muon",
    "mixer/out": "muon",
    "mixer/query_norm": "adamw",
    "mixer/key_norm": "adamw",
    "mixer_norm": "adamw",
    "mlp_norm": "adamw",
    "mlp/gate": "muon",
    "mlp/up": "muon",
    "mlp/down": "muon",
}
MEMORY = {
    "mlp/proj": "muon",
    "mlp/teacher_conv": "muon",
    "mlp/student_conv": "muon",
    "mlp/rate": "adamw",
}


def _model() -> TransformerConfig:
    return TransformerConfig(
        vocab_size=32,
        dim=16,
        num_layers=4,
        num_heads=2,
        mlp_dim=24,
        window=16,
        student_window=8,
        method="ipttcd",
        fast_layers=(0, 2),
        has_qk_norm=True,
        has_tied_head=False,
    )


def test_every_parameter_of_a_model_has_its_group():
    leaves, _ = jax.tree_util.tree_flatten_with_path(parameter_groups(logical_axes(_model())))
    groups = {jax.tree_util.keystr(path, simple=True, separator="/"): at for path, at in leaves}
    expected = {"embedding": "adamw", "final_norm": "adamw", "head": "adamw"}
    expected |= {f"group_0/block_0/{name}": group for name, group in (BLOCK | MEMORY).items()}
    expected |= {f"group_0/block_1/{name}": group for name, group in BLOCK.items()}
    assert groups == expected


def test_unstacked_tensors_are_told_by_their_own_dimensions():
    assert group_of(("layers", "embed")) == "adamw"
    assert group_of(("embed", "mlp")) == "muon"
    assert group_of(("layers", "fast_heads", "embed", "mlp")) == "muon"
    assert group_of(("layers", "vocab", "embed")) == "adamw"


def test_a_stack_is_its_layers(float64):
    (stack,) = draw(1, (3, 2, 8, 12))
    result = orthogonalized(stack, ("layers", "fast_heads", "embed", "mlp"), float)
    single = [[orthogonalized(m, ("embed", "mlp"), float) for m in layer] for layer in stack]
    assert_close(result, jnp.asarray(single))


def test_taps_are_rows(float64):
    """A row has one singular value, its length: Newton-Schulz is the polynomial of that number."""
    (taps,) = draw(2, (4, 5, 24))
    length = jnp.linalg.norm(taps, axis=1, keepdims=True)
    value = length / (length + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        value = a * value + b * value**3 + c * value**5
    result = orthogonalized(taps, ("layers", "taps", "mlp"), float)
    assert_close(result, 0.2 * 5**0.5 * value * taps / length)


@pytest.mark.parametrize("orthogonalization", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_nesterov", [True, False])
def test_first_steps_of_the_momentum(is_nesterov, orthogonalization):
    config = _config(weight_decay=0.0, is_nesterov=is_nesterov, orthogonalization=orthogonalization)
    axes = {"w": ("embed", "mlp")}
    params, first, second = ({"w": w} for w in draw(3, (6, 9), (6, 9), (6, 9)))
    optimizer = build_with_schedule(config, lambda _: 1.0, axes)
    _, state = optimizer.update(first, optimizer.init(params), params)
    updates, _ = optimizer.update(second, state, params)
    momentum = 0.95 * first["w"] + second["w"]
    u = second["w"] + 0.95 * momentum if is_nesterov else momentum
    expected = orthogonalized(u, axes["w"], jnp.dtype(orthogonalization))
    assert updates["w"].dtype == jnp.float32
    assert_close(updates["w"], -expected)


def test_no_gradient_only_decays():
    params = dict(zip(AXES, draw(4, *[(6,) * len(names) for names in AXES.values()]), strict=True))
    optimizer = build_with_schedule(_config(weight_decay=0.5), lambda _: 0.1, AXES)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params)
    assert_close(updates, jax.tree.map(lambda p: -0.05 * p, params))


def test_state_of_a_model_holds_one_buffer_per_matrix_and_two_moments_for_the_rest():
    axes = logical_axes(_model())
    optimizer = build_with_schedule(OptimizerConfig(kind="muon"), lambda _: 0.1, axes)
    state = jax.eval_shape(lambda: init_state(_model(), optimizer, 0))
    sizes = {"muon": 0, "adamw": 0}
    for group, leaf in zip(
        jax.tree.leaves(parameter_groups(axes)), jax.tree.leaves(state["params"]), strict=True
    ):
        sizes[group] += leaf.size
    held = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if leaf.ndim]
    assert {str(leaf.dtype) for leaf in held} == {"float32"}
    assert sum(leaf.size for leaf in held) == sizes["muon"] + 2 * sizes["adamw"]


def test_a_quadratic_comes_down():
    target, start = draw(5, (4, 8, 12), (4, 8, 12))
    optimizer = build_with_schedule(
        _config(weight_decay=0.0), lambda step: 0.3 * 0.97**step, {"w": ("layers", "embed", "mlp")}
    )

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: jnp.square(p["w"] - target).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    params = {"w": start}
    _, losses = jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), length=100))()
    assert losses[-1] < 2e-2 * losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sgd"}, "kind must be 'adamw' | 'muon', got 'sgd'"),
        ({"momentum": 1.0}, "OptimizerConfig.momentum 1.0 must be in [0, 1)"),
        ({"is_nesterov": 1}, "is_nesterov must be bool"),
        ({"orthogonalization": "float16"}, "orthogonalization must be 'float64'"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(UserError) as caught:
        OptimizerConfig(**{"kind": "muon"} | change)
    assert message in str(caught.value)


ROWS, COLUMNS = 64, 128
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
# Layers, mesh, sharding of [layers, rows, columns], and what may move between the devices.
SHARDED = {
    "layers": (8, {"fsdp": 8}, ("fsdp", None, None), set()),
    "rows": (8, {"fsdp": 8}, (None, "fsdp", None), {"all-to-all"}),
    "both": (8, {"fsdp": 4, "tensor": 2}, (None, "fsdp", "tensor"), {"all-to-all"}),
    "twice": (8, {"data": 2, "fsdp": 4}, (None, ("data", "fsdp"), None), {"all-to-all"}),
    "uneven": (6, {"fsdp": 8}, (None, None, "fsdp"), {"all-to-all"}),
}


def _measure_shards() -> dict:
    """For every case: the elements of each collective's result by its name, where the new
    parameters lie, and how far they are from those of one device."""
    config = _config(orthogonalization="float32")
    optimizer = build_with_schedule(config, lambda _: 1.0, {"w": ("layers", "embed", "mlp")})

    def step(params, grads):
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state

    measured = {}
    params, grads = ({"w": w} for w in draw(6, (8, ROWS, COLUMNS), (8, ROWS, COLUMNS)))
    alone = jax.jit(step)(params, grads)[0]["w"]
    for case, (num_layers, mesh_shape, axes, _) in SHARDED.items():
        kinds = (AxisType.Auto,) * len(mesh_shape)
        mesh = jax.make_mesh(tuple(mesh_shape.values()), tuple(mesh_shape), kinds)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        layers = jax.tree.map(lambda w, count=num_layers: w[:count], (params, grads))
        shards = jax.device_put(layers, sharding)
        compiled = jax.jit(step).lower(*shards).compile()
        found = COLLECTIVE.findall(compiled.as_text())
        ours = compiled(*shards)[0]["w"]
        measured[case] = {
            "collectives": [(name, _num_elements(result)) for result, name in found],
            "is_where_it_was": ours.sharding.is_equivalent_to(sharding, 3),
            "distance": distance(ours, alone[:num_layers]),
        }
    return measured


def _num_elements(shapes: str) -> int:
    """Of "f32[8,64]{1,0}" or a tuple of such."""
    dims = re.findall(r"\w+\[([\d,]*)\]", shapes)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in dims)


def test_shards_are_exchanged_for_whole_matrices():
    """No device ever holds more than one layer's matrix beside its own shard; nothing moves when
    layers are sharded."""
    output = commands.script(__file__, env=environment(8))
    for case, found in json.loads(output).items():
        assert {name for name, _ in found["collectives"]} == SHARDED[case][-1], (
            f"{case}: {found['collectives']}"
        )
        assert all(size <= ROWS * COLUMNS for _, size in found["collectives"]), case
        assert found["is_where_it_was"], case
        assert found["distance"] <= 1e-5, case


if __name__ == "__main__":
    print(json.dumps(_measure_shards()))
