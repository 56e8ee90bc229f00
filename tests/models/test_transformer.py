"""The whole model: its stack of layers, what it keeps and compiles, distances to its teacher."""

import collections

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import launched_kernels
from flax import nnx
from small_models import config_of, model_of

from ttcd_jax import MemoryConfig, Precision, Transformer, TransformerConfig
from ttcd_jax.models.config import block_configs
from ttcd_jax.models.transformer import layer_slots, scan_plan
from ttcd_jax.nn.row import Row
from ttcd_jax.train.loss import next_token_loss

V = 11
TOKENS = np.random.default_rng(0).integers(0, V, checks.TWO_ROWS.shape)


def _config(**changes) -> TransformerConfig:
    fields = {"num_layers": 4, "window": 6, "student_window": 3, "fast_layers": (0, 2)} | changes
    return config_of("ipttcd" if fields["fast_layers"] else "swa", **fields)


def _model(**changes) -> Transformer:
    return checks.randomize(Transformer, _config(**changes), std=0.3)


def _abstract(config) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("num_layers", "fast_layers", "runs"),
    [
        (4, (), [(1, 4)]),
        (1, (0,), [(1, 1)]),
        (6, (1, 3, 5), [(2, 3)]),
        (7, (0, 1, 5), [(1, 2), (1, 3), (1, 1), (1, 1)]),
        (24, (0, 6, 12, 18), [(6, 4)]),
    ],
)
def test_plans_hold_every_layer_in_order(num_layers, fast_layers, runs):
    config = _config(num_layers=num_layers, fast_layers=fast_layers)
    blocks = block_configs(config)
    plan = scan_plan(blocks)
    assert [(len(run.unit), run.repeats) for run in plan] == runs
    assert sum((run.unit * run.repeats for run in plan), ()) == blocks
    slots = layer_slots(config)
    assert len(slots) == len({*slots}) == num_layers
    assert [plan[int(x.group[6:])].unit[int(x.block[6:])] for x in slots] == [*blocks]


def _gradients(**changes):
    def run(model, tokens, ids):
        hidden, stats = model.forward(tokens, ids)
        return jnp.concatenate([hidden.ravel(), stats.memory_ratio, stats.gate_mean])

    return checks.value_and_gradients(_model(**changes), run, TOKENS, checks.TWO_ROWS)[:2]


@pytest.fixture(scope="module")
def scanned():
    with jax.enable_x64(True):
        return _gradients()


@pytest.mark.parametrize("remat", ["none", "block", "offload"])
def test_models_equal_one_that_is_scanned_and_recomputed_in_part(remat, scanned, float64):
    """Hidden states, statistics in layer order, and all gradients; the first one is unrolled."""
    checks.assert_close(_gradients(remat=remat, scans_layers=remat != "none"), scanned)


def _gradient_of_loss(config):
    """(gradient of a model's loss, abstract arguments)"""
    graph, params = nnx.split(_abstract(config))

    def loss(params, tokens):
        return next_token_loss(nnx.merge(graph, params), tokens)

    return jax.grad(loss), (params, jax.ShapeDtypeStruct((2, 16), jnp.int32))


def _products(num_layers, fast_layers, **changes):
    """Matrix products in the traced gradient: every one of them is compiled."""
    fields = {"num_layers": num_layers, "fast_layers": fast_layers, "precision": Precision()}
    gradient, args = _gradient_of_loss(_config(**fields | changes))
    return sum(eqn.primitive.name == "dot_general" for eqn in checks.traced(gradient, *args))


@pytest.mark.parametrize(("remat", "place"), [("block", "float32"), ("offload", "float32<host>")])
def test_the_backward_keeps_one_stream_per_block_and_no_other_activation(remat, place):
    gradient, args = _gradient_of_loss(_config(precision=Precision(), remat=remat))
    scans = [eqn for eqn in checks.traced(gradient, *args) if eqn.primitive.name == "scan"]
    kept = [
        str(var.aval) for eqn in scans for var in eqn.outvars if var.aval.shape[1:] == (2, 16, 8)
    ]
    assert kept == [f"{place}[2,2,16,8]"] * 2  # the unit is two blocks


def test_recomputed_blocks_save_memory_also_outside_a_loop():
    def temp_bytes(remat):
        config = _config(fast_layers=(), precision=Precision(), scans_layers=False, remat=remat)
        gradient, (params, _) = _gradient_of_loss(config)
        return checks.temporary_bytes(gradient, params, jax.ShapeDtypeStruct((2, 512), jnp.int32))

    assert temp_bytes("block") < 0.7 * temp_bytes("none")


def test_twenty_four_layers_are_compiled_as_one_unit():
    deep = _products(24, (0, 6, 12, 18))
    assert deep == _products(12, (0, 6))
    assert deep < 1.1 * _products(6, (0,), scans_layers=False)
    assert _products(24, (7,)) == _products(16, (7,))  # a block each


def test_copies_of_a_unit_are_drawn_apart():
    model = Transformer(_config(precision=Precision()), rngs=nnx.Rngs(0))
    weight = model.group_0.block_0.mlp.gate[...]
    assert weight.shape == (2, 8, 12)
    assert 0.01 < float(jnp.std(weight[0] - weight[1])) < 0.05


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    precisions = (Precision(compute=compute) for compute in ("bfloat16", "float32"))
    narrow, wide = (_model(precision=precision, has_qk_norm=True) for precision in precisions)
    tokens = jnp.asarray(TOKENS)
    ours, theirs = (jax.jit(model)(tokens) for model in (narrow, wide))
    assert ours.dtype == jnp.bfloat16
    checks.assert_close(ours, theirs, 0.06)
    graph, params = nnx.split(narrow)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    gradient = jax.grad(lambda params: next_token_loss(nnx.merge(graph, params), tokens))
    assert checks.dot_operand_types(checks.traced(gradient, params)) == {"bfloat16"}


def test_a_document_reads_as_a_row_of_its_own_also_by_absolute_positions(float64):
    """A memory of LaCT is not shift-invariant: positions restart with documents."""
    model = model_of("lact", std=0.3)
    ids = jnp.asarray(np.repeat([[0, 7]], 8, axis=1))  # the second begins at a chunk
    tokens = jnp.asarray(np.concatenate([TOKENS[:1, :8], TOKENS[1:, :8]], axis=1))
    together = nnx.jit(lambda model, tokens, ids: model(tokens, ids))(model, tokens, ids)
    alone = nnx.jit(lambda model, tokens: model(tokens))(model, tokens[:, 8:])
    checks.assert_close(together[:, 8:], alone, 1e-6)  # angles are float32


def test_a_token_outside_the_vocabulary_is_nan_where_it_cannot_be_refused():
    model = model_of("swa", precision=Precision())
    tokens = jnp.asarray([[1, 2, V, 3], [1, -1, 2, 3], [1, 2, 3, 4]])
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert jnp.isnan(logits[0, 2:]).all()
    assert jnp.isnan(logits[1, 1:]).all()
    assert jnp.isfinite(logits[2]).all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("method", ["ipttcd", "lact", "deltanet_hybrid"])
def test_no_tokens_give_no_logits_and_no_gradient(method, shape):
    model = model_of(method, precision=Precision())
    tokens = jnp.zeros(shape, jnp.int32)
    assert model(tokens, tokens).shape == (*shape, V)
    gradient = nnx.grad(lambda model: model(tokens).sum())(model)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    plain = model_of("swa", precision=Precision())
    assert jax.eval_shape(plain.forward, tokens)[1] is None


LAYERS = {"num_layers": 4, "fast_layers": (0, 2)}


def _found(layers=LAYERS, **changes):
    """(a model, the distances of its layers)."""
    model = model_of("ipttcd", **layers | changes)
    ids = jnp.asarray(checks.TWO_ROWS)
    found = nnx.jit(lambda model: model.distillation(jnp.asarray(TOKENS), ids))(model)
    return model, jax.tree.map(lambda x: x.astype(float), found)


def test_every_layer_reports_its_own_distances_in_order_unrolled_too(float64):
    """Against the block of the layer alone, on what the block before it leaves."""
    _, scanned = _found()
    assert scanned.off.shape == (2, *TOKENS.shape)
    checks.assert_close(_found(scans_layers=False)[1], scanned)
    model, found = _found(num_layers=2, fast_layers=(0, 1), scans_layers=False)
    h = model.embedding[...][jnp.asarray(TOKENS)]
    graph, params = nnx.split(model.group_0)
    for layer in range(2):
        block = nnx.merge(graph, jax.tree.map(lambda x, i=layer: x[i], params)).block_0
        row = Row.of(h, None, jnp.asarray(checks.TWO_ROWS), h)._replace(measures=True)
        h, expected = block.forward(h, row)
        expected = jax.tree.map(lambda x: x.astype(float), expected)
        checks.assert_close(jax.tree.map(lambda x, i=layer: x[i], found), expected)


def test_a_forward_that_is_not_measured_computes_nothing_for_it(float64):
    """Measured, a layer has twelve more products: three with W_base, and delta_w and two of the
    read, for two kinds of features and for errors without a gap, which its share needs as well."""
    model = model_of("ipttcd", **LAYERS, scans_layers=False)

    def products(run):
        eqns = checks.traced(lambda x: run(x), jnp.asarray(TOKENS))
        return sum(eqn.primitive.name == "dot_general" for eqn in eqns)

    assert products(model.distillation) - products(model.forward) == 2 * 12


# Layers are scanned as two equal units.
ON_GPU = {"vocab_size": 64, "dim": 64, "mlp_dim": 96, "window": 64, "student_window": 32} | LAYERS


@pytest.mark.parametrize(("remat", "forwards"), [("none", 2), ("dots", 2), ("block", 4)])
def test_a_step_runs_every_kernel_once_a_layer_and_recomputes_forwards_alone(remat, forwards):
    """A unit has one fast layer and one plain one, which attends through the same kernels;
    rematerialization of elementwise parts runs no attention again."""
    changes = {"memory": MemoryConfig(chunk_size=32), "precision": Precision(), "remat": remat}
    graph, params = nnx.split(_abstract(config_of("ipttcd", **ON_GPU, **changes)))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(params, tokens, segment_ids):
        return nnx.merge(graph, params)(tokens, segment_ids).astype(jnp.float32).sum()

    launched = launched_kernels(jax.grad(loss), params, tokens, tokens, capability=90)
    backward = dict.fromkeys(("dual_window_backward_q", "dual_window_backward_kv"), 2)
    assert collections.Counter(launched) == {"dual_window_forward": forwards} | backward
