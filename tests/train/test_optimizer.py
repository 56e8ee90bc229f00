"""Learning rates, AdamW and Muon, beyond what the stored steps of the reference prove
(tests/parity); collectives of a sharded stack."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checks import assert_close, distance, draw, refused
from devices import elsewhere
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from small_models import config_of

from ttcd_jax import OptimizerConfig, Precision
from ttcd_jax.sharding.mesh import AXES
from ttcd_jax.train import optimizer as optimizers
from ttcd_jax.train.layers_on_disk import by_name
from ttcd_jax.train.muon import group_of, orthogonalized, parameter_groups
from ttcd_jax.train.optimizer import MuonSettings, ScheduleConfig, build_optimizer
from ttcd_jax.train.state import init_params, logical_axes, state_of, state_shardings


def test_the_floor_of_a_schedule_holds_after_the_last_step():
    rate = optimizers.learning_rate(ScheduleConfig(peak=1.0, steps=10, warmup=2, floor_ratio=0.25))
    assert float(rate(9)) > 0.25
    assert float(rate(10)) == float(rate(1000)) == 0.25
    assert jax.vmap(rate)(jnp.arange(3)).dtype == jnp.float32


def test_global_norm_of_bfloat16_is_summed_wide():
    norm = optimizers.global_norm([jnp.ones(size, jnp.bfloat16) for size in (1000, 1)])
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, np.sqrt(1001), rtol=1e-6)


MATRICES = [f"mixer/{name}" for name in ("query", "key", "value", "out")]
MATRICES += [f"mlp/{name}" for name in ("gate", "up", "down")]
MEMORY = ["mlp/proj", "mlp/teacher_conv", "mlp/student_conv"]
VECTORS = ["mixer/query_norm", "mixer/key_norm", "mixer_norm", "mlp_norm"]
LAYERS = {"num_layers": 4, "fast_layers": (0, 2), "has_qk_norm": True, "has_tied_head": False}
MODEL = config_of("ipttcd", **LAYERS, precision=Precision())


def test_every_parameter_of_a_model_has_its_group_by_its_own_dimensions():
    blocks = {"muon": (MATRICES + MEMORY, MATRICES), "adamw": ([*VECTORS, "mlp/rate"], VECTORS)}
    expected = dict.fromkeys(("embedding", "final_norm", "head"), "adamw")
    for group, names in blocks.items():
        for block, its_names in enumerate(names):
            expected |= dict.fromkeys((f"group_0/block_{block}/{x}" for x in its_names), group)
    axes = logical_axes(MODEL)
    assert by_name(parameter_groups(axes)) == expected
    mixer, mlp = (axes["group_0"]["block_0"][name] for name in ("mixer", "mlp"))
    assert axes["embedding"] == ("vocab", "embed")
    assert mixer["key"] == ("layers", "embed", "kv_heads")
    assert mlp["down"] == ("layers", "mlp", "embed")
    assert mlp["teacher_conv"] == ("layers", "taps", "mlp")
    assert group_of(("layers", "fast_heads", "embed", "mlp")) == "muon"
    assert group_of(("layers", "vocab", "embed")) == "adamw"


def test_a_stack_is_its_layers_and_taps_are_rows(float64):
    (stack,) = draw(1, (3, 2, 8, 12))
    result = orthogonalized(stack, ("layers", "fast_heads", "embed", "mlp"), float)
    single = [[orthogonalized(m, ("embed", "mlp"), float) for m in layer] for layer in stack]
    assert_close(result, jnp.asarray(single))
    result = orthogonalized(stack[0], ("layers", "taps", "mlp"), float)
    rows = [[orthogonalized(row[None], ("mlp", "taps"), float)[0] for row in x.T] for x in stack[0]]
    assert_close(result, jnp.asarray(rows).mT)


def _muon(**settings) -> OptimizerConfig:
    return OptimizerConfig(kind="muon", settings=MuonSettings(**settings), clip_norm=None)


def test_a_momentum_that_does_not_look_ahead(float64):
    """That of Nesterov is compared with the reference."""
    config = _muon(is_nesterov=False, orthogonalization="float64").replace(weight_decay=0.0)
    axes = {"w": ("embed", "mlp")}
    params, first, second = ({"w": w} for w in draw(3, (6, 9), (6, 9), (6, 9)))
    optimizer = build_optimizer(config, lambda _: 1.0, axes)
    _, state = optimizer.update(first, optimizer.init(params), params)
    updates, _ = optimizer.update(second, state, params)
    momentum = 0.95 * first["w"] + second["w"]
    assert_close(updates["w"], -orthogonalized(momentum, axes["w"], float))


def test_state_of_a_model_holds_one_buffer_per_matrix_and_two_moments_for_the_rest():
    axes = logical_axes(MODEL)
    optimizer = build_optimizer(OptimizerConfig(kind="muon"), lambda _: 0.1, axes)
    state = jax.eval_shape(lambda: state_of(optimizer, init_params(MODEL, 0)))
    sizes, groups = {"muon": 0, "adamw": 0}, by_name(parameter_groups(axes))
    for name, leaf in by_name(state["params"]).items():
        sizes[groups[name]] += leaf.size
    held = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if leaf.ndim]
    assert {str(leaf.dtype) for leaf in held} == {"float32"}
    assert sum(leaf.size for leaf in held) == sizes["muon"] + 2 * sizes["adamw"]


def test_an_optimizer_whose_arrays_are_no_moments_is_refused():
    mesh = AbstractMesh((1,) * len(AXES), AXES, (AxisType.Auto,) * len(AXES))
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    words = "keeps an array [8] for a parameter [11, 8]|choose one"
    refused(words, state_shardings, MODEL, factored, mesh)


ROWS, COLUMNS = 64, 128
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
# Layers, mesh, sharding of [layers, rows, columns], and what may move between the devices.
SHARDED = {
    "layers": (8, {"fsdp": 8}, ("fsdp", None, None), set()),
    "rows": (8, {"fsdp": 8}, (None, "fsdp", None), {"all-to-all"}),
    "both": (8, {"fsdp": 4, "tensor": 2}, (None, "fsdp", "tensor"), {"all-to-all"}),
    "twice": (8, {"fsdp": 4, "seq": 2}, (None, ("fsdp", "seq"), None), {"all-to-all"}),
    "copies": (4, {"data": 2, "fsdp": 4}, (None, "fsdp", None), {"all-to-all"}),
    "few": (3, {"data": 2, "fsdp": 4}, (None, "fsdp", None), {"all-to-all"}),
    "uneven": (6, {"fsdp": 8}, (None, None, "fsdp"), {"all-to-all"}),
}


def measured():
    """For every case: the elements of each collective's result by its name, where the new
    parameters are, and how far they are from those of one device."""
    config = _muon(orthogonalization="float32")
    optimizer = build_optimizer(config, lambda _: 1.0, {"w": ("layers", "embed", "mlp")})

    def step(params, grads):
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state

    params, grads = ({"w": w} for w in draw(6, (8, ROWS, COLUMNS), (8, ROWS, COLUMNS)))
    alone, found = jax.jit(step)(params, grads)[0]["w"], {}
    for case, (num_layers, mesh_shape, axes, _) in SHARDED.items():
        kinds = (AxisType.Auto,) * len(mesh_shape)
        mesh = jax.make_mesh(tuple(mesh_shape.values()), tuple(mesh_shape), kinds)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        layers = jax.tree.map(lambda w, count=num_layers: w[:count], (params, grads))
        shards = jax.device_put(layers, sharding)
        compiled = jax.jit(step).lower(*shards).compile()
        moves = COLLECTIVE.findall(compiled.as_text())
        ours = compiled(*shards)[0]["w"]
        is_there = ours.sharding.is_equivalent_to(sharding, 3)
        worst = distance(ours, alone[:num_layers])
        found[case] = [(name, _num_elements(result)) for result, name in moves], is_there, worst
    return found


def _num_elements(shapes: str) -> int:
    """Of "f32[8,64]{1,0}" or a tuple of such."""
    dims = re.findall(r"\w+\[([\d,]*)\]", shapes)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in dims)


def test_shards_are_exchanged_for_whole_matrices():
    """No device ever holds more than one layer's matrix besides its own shard; nothing moves when
    layers are sharded."""
    for case, (moves, is_there, worst) in elsewhere(measured).items():
        assert {name for name, _ in moves} == SHARDED[case][-1], (case, moves)
        assert all(size <= ROWS * COLUMNS for _, size in moves), case
        assert is_there, case
        assert worst <= 1e-5, case
