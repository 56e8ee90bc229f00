"""Properties that every method of the registry has, and one from outside the package."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, assert_same, draw, influence, may_see, randomize
from flax import nnx
from small_models import CHUNK, WINDOW, D, config_of, outside_method
from ttcd_kernels.short_conv import short_conv

from tests.inference import test_reading
from ttcd_jax import Precision, Transformer, TransformerConfig
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.memory.chunks import from_chunks, to_chunks
from ttcd_jax.methods import METHODS
from ttcd_jax.models.config import block_configs, has_in_place_memory, switched_off
from ttcd_jax.nn.block import Block
from ttcd_jax.nn.row import Row
from ttcd_jax.train.flops import forward_flops
from ttcd_jax.train.loss import next_token_loss

pytestmark = pytest.mark.usefixtures("float64")

T = 14
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, T)))
WITH_RATE = sorted(name for name in METHODS if has_in_place_memory(config_of(name)))
OUTSIDE = outside_method()


@pytest.fixture(params=[*sorted(METHODS), OUTSIDE.name])
def method(request, monkeypatch) -> str:
    if request.param == OUTSIDE.name:
        monkeypatch.setitem(METHODS, OUTSIDE.name, OUTSIDE)
    return request.param


def _block(config: TransformerConfig) -> nnx.Module:
    """Layer 0, every parameter drawn."""
    return randomize(Block, block_configs(config)[0])


@functools.cache
def _runner(config: TransformerConfig):
    """(h, segment_ids, positions) -> output of the block, compiled once per shape; h serves as
    embeddings."""
    graph, state = nnx.split(_block(config))
    return jax.jit(
        lambda h, ids=None, positions=None: nnx.merge(graph, state)(h, positions, ids, h)
    )


def _hidden(*shape: int) -> jax.Array:
    return draw(3, (*shape, D))[0]


def test_a_token_depends_on_its_past_its_row_and_its_document_only(method):
    h, ids = _hidden(*TWO_ROWS.shape), jnp.asarray(TWO_ROWS)
    block = _block(config_of(method))
    reach = influence(lambda h: block(h, None, ids, h), h)
    assert (reach[~may_see(TWO_ROWS)] == 0).all()
    # The first row is one document: every method but a window remembers tokens beyond the window.
    first = reach[0, :, 0]
    assert (np.diag(first) > 0).all()
    assert (first[-1, 0] > 0) == (method != "swa")
    if method == "swa":
        assert (first[np.tri(T, k=-WINDOW, dtype=bool)] == 0).all()


def test_a_prefix_does_not_change_with_what_follows_nor_with_padding(method):
    run, h = _runner(config_of(method)), _hidden(1, T)
    y = run(h)
    for end in (1, CHUNK, CHUNK + 1, T - 1):
        assert_same(run(h.at[:, end:].set(7.0))[:, :end], y[:, :end])
    for length in (CHUNK - 1, T - 2 * CHUNK):
        assert_close(run(h[:, :length]), y[:, :length])


def test_documents_of_a_row_do_not_see_each_other(method):
    run, h = _runner(config_of(method)), _hidden(1, T)
    ids = jnp.asarray(np.repeat([[4, 1, 9, 2]], [3, 6, 1, 4], axis=1))
    positions = Row.of(h).positions
    y = run(h, ids, positions)
    for document in (4, 1, 9, 2):
        changed = jnp.where((ids == document)[..., None], -h, h)
        assert_same(run(changed, ids, positions)[ids != document], y[ids != document])


@pytest.mark.parametrize("method", WITH_RATE)
def test_without_a_rate_and_in_a_single_chunk_the_layer_is_the_frozen_one(method):
    """By hand, and to the last bit."""
    mlp, frozen = (_block(c).mlp for c in (config_of(method), switched_off(config_of(method), T)))
    x, t = _hidden(2, T), draw(4, (2, T, D))[0]

    def by_hand(x):
        if method != "ipttcd":
            return frozen.plain(x)
        z = to_chunks(frozen.features(x), CHUNK)
        z = short_conv(z, frozen.teacher_conv[...], is_causal=True)
        return from_chunks(z, T) @ frozen.down[...]

    assert_close(jax.jit(frozen)(x, t), jax.jit(by_hand)(x))
    chunk = x[:, :CHUNK], t[:, :CHUNK]
    assert_same(jax.jit(mlp)(*chunk), jax.jit(frozen)(*chunk))


def test_bfloat16_stays_near_float32(method):
    h = _hidden(2, T).astype("float32")
    wide, narrow = (
        config_of(method, precision=Precision(compute=c)) for c in ("float32", "bfloat16")
    )
    y, rounded = _runner(wide)(h), _runner(narrow)(h.astype("bfloat16"))
    assert rounded.dtype == jnp.bfloat16
    error = jnp.linalg.norm(rounded.astype("float32") - y) / jnp.linalg.norm(y)
    assert error < 0.03


def test_scanned_layers_are_the_unrolled_ones_and_every_parameter_is_trained(method):
    config = config_of(method, fast_layers=(0, 1))
    models = (
        randomize(Transformer, config.replace(scans_layers=x), std=0.3) for x in (True, False)
    )
    (graph, params), (unrolled_graph, unrolled) = map(nnx.split, models)

    def loss(params):
        model = nnx.merge(graph, params)
        return next_token_loss(model, TOKENS), model(TOKENS)

    gradient, scanned = jax.jit(jax.grad(loss, has_aux=True))(params)
    for path, x in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(gradient))[0]:
        rows = np.abs(np.asarray(x)).reshape(len(x), -1).max(-1)
        assert np.isfinite(rows).all(), jax.tree_util.keystr(path)
        assert (rows > 0).any(), jax.tree_util.keystr(path)
    run = jax.jit(lambda params: nnx.merge(unrolled_graph, params)(TOKENS))
    assert_close(scanned, run(unrolled), 1e-9)


def test_pieces_arithmetic_and_state_of_a_method_from_outside_are_right(monkeypatch):
    monkeypatch.setitem(METHODS, OUTSIDE.name, OUTSIDE)
    test_reading.test_any_way_to_read_rows_gives_what_one_pass_gives(OUTSIDE.name, {})
    config, plain = config_of(OUTSIDE.name), config_of("swa")
    memory = 2 * 2 * 32 * config.dim * config.mlp_dim  # read and write, in one layer
    assert forward_flops(config, 32) == forward_flops(plain, 32) + memory
    sizes = state_bytes(config, 1)
    assert sizes["memory"] == 8 * config.dim * config.mlp_dim
    assert sizes["open chunk"] == 8 * CHUNK * (config.dim + config.mlp_dim)
    off = config.replace(memory=config.memory.replace(eta=0.0))
    assert switched_off(config, 32) == off
