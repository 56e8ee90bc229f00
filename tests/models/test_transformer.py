import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    TWO_ROWS,
    assert_close,
    assert_same,
    dot_operand_types,
    randomize,
    temporary_bytes,
    traced,
    value_and_gradients,
)
from flax import nnx
from small_models import config_of

from ttcd_jax.axes import LOGICAL_AXES
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import Run, Slot, Transformer, scan_plan, slot_of_layer
from ttcd_jax.precision import Precision
from ttcd_jax.train.loss import next_token_loss

V = 11
TOKENS = np.random.default_rng(0).integers(0, V, TWO_ROWS.shape)


def _config(**changes) -> TransformerConfig:
    fields = {"num_layers": 4, "window": 6, "student_window": 3, "fast_layers": (0, 2)} | changes
    return config_of("ipttcd" if fields["fast_layers"] else "swa", **fields)


def _model(**changes) -> Transformer:
    return randomize(Transformer, _config(**changes), std=0.3)


def _abstract(config) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def test_a_regular_pattern_is_one_unit_repeated():
    blocks = block_configs(_config(num_layers=24, fast_layers=(0, 6, 12, 18)))
    assert scan_plan(blocks) == (Run(blocks[:6], 4),)


@pytest.mark.parametrize(
    ("num_layers", "fast_layers", "runs"),
    [
        (4, (), [(1, 4)]),
        (4, (0, 1, 2, 3), [(1, 4)]),
        (1, (0,), [(1, 1)]),
        (2, (1,), [(1, 1), (1, 1)]),
        (6, (1, 3, 5), [(2, 3)]),
        (7, (0, 1, 5), [(1, 2), (1, 3), (1, 1), (1, 1)]),
        (5, (2,), [(1, 2), (1, 1), (1, 2)]),
    ],
)
def test_plans_hold_every_layer_in_order(num_layers, fast_layers, runs):
    blocks = block_configs(_config(num_layers=num_layers, fast_layers=fast_layers))
    plan = scan_plan(blocks)
    assert [(len(run.unit), run.repeats) for run in plan] == runs
    assert sum((run.unit * run.repeats for run in plan), ()) == blocks


@pytest.mark.parametrize("fast_layers", [(0, 6, 12, 18), (0, 1, 5), ()])
def test_every_layer_has_its_own_place_with_its_configuration(fast_layers):
    config = _config(num_layers=24, fast_layers=fast_layers)
    blocks, plan = block_configs(config), scan_plan(block_configs(config))
    slots = [slot_of_layer(config, layer) for layer in range(24)]
    assert len(set(slots)) == 24
    for layer, place in enumerate(slots):
        run = plan[int(place.group.removeprefix("group_"))]
        assert run.unit[int(place.block.removeprefix("block_"))] == blocks[layer]
        assert place.row < run.repeats
    with pytest.raises(IndexError, match="layer 24 of 24"):
        slot_of_layer(config, 24)


def test_rows_of_the_stack_count_repeats_of_the_unit():
    config = _config(num_layers=24, fast_layers=(0, 6, 12, 18))
    assert slot_of_layer(config, 12) == Slot("group_0", "block_0", 2)
    assert slot_of_layer(config, 23) == Slot("group_0", "block_5", 3)


def _gradients(tokens=TOKENS, **changes):
    return value_and_gradients(
        _model(**changes), lambda m, tokens, ids: _summary(m, tokens, ids), tokens, TWO_ROWS
    )[:2]


def _summary(model, tokens, ids):
    hidden, stats = model.forward(tokens, ids)
    return jnp.concatenate([hidden.ravel(), stats.memory_ratio, stats.gate_mean])


@pytest.fixture(scope="module")
def scanned():
    with jax.enable_x64(True):
        return _gradients()


@pytest.mark.parametrize(
    "changes",
    [{"scans_layers": False}, {"remat": "block"}, {"remat": "dots"}, {"remat": "offload"}],
    ids=str,
)
def test_unrolled_and_recomputed_models_equal_the_scanned_one(changes, scanned, float64):
    """Hidden states, statistics in layer order, and all gradients."""
    assert_close(_gradients(**changes), scanned)


def _gradient_of_loss(config):
    """(gradient of a model's loss, abstract arguments)"""
    graph, params = nnx.split(_abstract(config))

    def loss(params, tokens):
        return next_token_loss(nnx.merge(graph, params), tokens)

    return jax.grad(loss), (params, jax.ShapeDtypeStruct((2, 16), jnp.int32))


def _count(config, name):
    """Equations of one kind in the gradient of a model's loss; abstract."""
    gradient, args = _gradient_of_loss(config)
    return sum(eqn.primitive.name == name for eqn in traced(gradient, *args))


@pytest.mark.parametrize(("remat", "place"), [("block", "float32"), ("offload", "float32<host>")])
def test_the_backward_keeps_one_stream_per_block_and_no_other_activation(remat, place):
    gradient, args = _gradient_of_loss(_config(precision=Precision(), remat=remat))
    scans = [eqn for eqn in traced(gradient, *args) if eqn.primitive.name == "scan"]
    kept = [
        str(var.aval) for eqn in scans for var in eqn.outvars if var.aval.shape[1:] == (2, 16, 8)
    ]
    assert kept == [f"{place}[2,2,16,8]"] * 2  # the unit is two blocks


def test_on_a_gpu_the_offloaded_stream_waits_in_pinned_host_memory():
    config = _config(precision=Precision(), remat="offload", attention_implementation="xla")
    gradient, args = _gradient_of_loss(config)
    lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    slots = re.findall(r'_xla_buffer_placement = "(\w+)"', lowered)
    assert sorted(slots) == ["device", "device", "pinned_host", "pinned_host"]


def test_recomputed_blocks_save_memory_also_outside_a_loop():
    def temp_bytes(remat):
        config = _config(fast_layers=(), precision=Precision(), scans_layers=False, remat=remat)
        gradient, (params, _) = _gradient_of_loss(config)
        return temporary_bytes(gradient, params, jax.ShapeDtypeStruct((2, 512), jnp.int32))

    assert temp_bytes("block") < 0.7 * temp_bytes("none")


def _products(num_layers, fast_layers, **changes):
    """Matrix products in the traced gradient: every one of them is compiled."""
    config = _config(
        num_layers=num_layers, fast_layers=fast_layers, precision=Precision(), **changes
    )
    return _count(config, "dot_general")


@pytest.mark.parametrize("remat", ["none", "block"])
def test_twenty_four_layers_are_compiled_as_one_unit(remat):
    deep = _products(24, (0, 6, 12, 18), remat=remat)
    assert deep == _products(12, (0, 6), remat=remat)
    assert deep < 1.1 * _products(6, (0,), remat=remat, scans_layers=False)


def test_an_irregular_stack_compiles_a_block_for_each_stretch():
    assert _products(24, (7,)) == _products(16, (7,))


def test_copies_of_a_unit_are_drawn_apart():
    model = Transformer(_config(precision=Precision()), rngs=nnx.Rngs(0))
    weight = model.group_0.block_0.mlp.gate[...]
    assert weight.shape == (2, 8, 12)
    assert 0.01 < float(jnp.std(weight[0] - weight[1])) < 0.05


@pytest.mark.parametrize("has_tied_head", [True, False])
def test_every_parameter_names_its_axes(has_tied_head):
    config = _config(
        has_tied_head=has_tied_head, has_qk_norm=True, fast_layers=(1,), precision=Precision()
    )
    params = dict(nnx.to_flat_state(nnx.state(_abstract(config), nnx.Param)))
    for path, variable in params.items():
        axes = variable.get_metadata("axes")
        assert len(axes) == len(variable.shape), path
        assert set(axes) <= set(LOGICAL_AXES), path
        assert (axes[0] == "layers") == (path[0].startswith("group_")), path
        assert "layers" not in axes[1:], path
    axes = {path: variable.get_metadata("axes") for path, variable in params.items()}
    assert axes["embedding",] == ("vocab", "embed")
    assert axes["group_1", "block_0", "mlp", "down"] == ("layers", "mlp", "embed")
    assert axes["group_1", "block_0", "mlp", "teacher_conv"] == ("layers", "taps", "mlp")
    assert axes["group_0", "block_0", "mixer", "key"] == ("layers", "embed", "kv_heads")
    assert (("head",) in axes) != has_tied_head


def test_a_tied_head_is_the_embedding(float64):
    shared = {"num_layers": 1, "fast_layers": ()}
    tied, untied = _model(**shared), _model(has_tied_head=False, **shared)
    tokens = jnp.asarray(TOKENS)
    assert_same(tied.head_weight(), tied.embedding[...])
    assert_same(untied.head_weight(), untied.head[...])
    untied.head[...] = untied.embedding[...]
    for path in ("group_0", "final_norm"):
        setattr(untied, path, getattr(tied, path))
    untied.embedding[...] = tied.embedding[...]
    untied.head[...] = tied.embedding[...]
    logits, gradient, _ = value_and_gradients(tied, lambda m, x: m(x), tokens)
    same, apart, _ = value_and_gradients(untied, lambda m, x: m(x), tokens)
    assert logits.shape == (*TOKENS.shape, V)
    assert_close(same, logits)
    assert_close(apart["embedding"] + apart["head"], gradient["embedding"])


def test_logits_are_causal_and_documents_do_not_meet(float64):
    """To the last bit: changed tokens reach neither the past nor other documents nor rows."""
    model = _model()
    run = jax.jit(model)
    logits = run(TOKENS, TWO_ROWS)
    changed = TOKENS.copy()
    changed[0, 9:] = (changed[0, 9:] + 1) % V
    changed[1, 3:6] = (changed[1, 3:6] + 1) % V  # the start of the document in 3 .. 10
    difference = np.asarray(run(changed, TWO_ROWS) != logits).any(-1)
    assert difference[0].tolist() == [False] * 9 + [True] * 5
    assert difference[1].tolist() == [False] * 3 + [True] * 8 + [False] * 3


@pytest.mark.parametrize("length", [1, 9])
def test_any_length_has_finite_logits_and_gradients(length):
    model = Transformer(_config(precision=Precision()), rngs=nnx.Rngs(0))
    result = value_and_gradients(model, lambda m, x: m(x), jnp.asarray(TOKENS[:1, :length]))
    assert result[0].shape == (1, length, V)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result[:2]))


def test_positions_matter_by_their_differences(float64):
    run = jax.jit(lambda positions: _model().forward(jnp.asarray(TOKENS), None, positions)[0])
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1], dtype=jnp.int32), TOKENS.shape)
    assert_close(run(positions + 100), run(positions), 1e-4)


def test_models_without_a_memory_have_no_statistics():
    model = _model(fast_layers=(), precision=Precision())
    assert jax.eval_shape(model.forward, jnp.asarray(TOKENS[:, :4]))[1] is None


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    def logits(compute):
        model = _model(precision=Precision(compute=compute), has_qk_norm=True)
        return model, jax.jit(model)(jnp.asarray(TOKENS))

    narrow, ours = logits("bfloat16")
    assert ours.dtype == jnp.bfloat16
    assert_close(ours, logits("float32")[1], 0.06)
    graph, params = nnx.split(narrow)

    def loss(params, tokens):
        return next_token_loss(nnx.merge(graph, params), tokens)

    eqns = traced(jax.grad(loss), params, jnp.asarray(TOKENS))
    assert dot_operand_types(eqns) == {"bfloat16"}


def test_a_document_reads_as_a_row_of_its_own_also_by_absolute_positions(float64):
    """A memory of LaCT is not shift-invariant: positions restart with documents."""
    model = randomize(Transformer, config_of("lact"), std=0.3)
    ids = jnp.asarray(np.repeat([[0, 7]], 8, axis=1))  # the second begins at a chunk
    tokens = jnp.asarray(np.concatenate([TOKENS[:1, :8], TOKENS[1:, :8]], axis=1))
    together = nnx.jit(lambda model, tokens, ids: model(tokens, ids))(model, tokens, ids)
    alone = nnx.jit(lambda model, tokens: model(tokens))(model, tokens[:, 8:])
    assert_close(together[:, 8:], alone, 1e-6)  # angles are float32


def test_a_token_outside_the_vocabulary_is_nan_where_it_cannot_be_refused():
    model = randomize(Transformer, config_of("swa", precision=Precision()))
    tokens = jnp.asarray([[1, 2, V, 3], [1, -1, 2, 3], [1, 2, 3, 4]])
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert jnp.isnan(logits[0, 2:]).all()
    assert jnp.isnan(logits[1, 1:]).all()
    assert jnp.isfinite(logits[2]).all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("method", ["ipttcd", "lact", "deltanet_hybrid"])
def test_no_tokens_give_no_logits_and_no_gradient(method, shape):
    model = randomize(Transformer, config_of(method, precision=Precision()))
    tokens = jnp.zeros(shape, jnp.int32)
    assert model(tokens, tokens).shape == (*shape, V)
    gradient = nnx.grad(lambda model: model(tokens).sum())(model)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
