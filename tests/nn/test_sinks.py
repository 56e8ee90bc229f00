"""Attention with sinks, beside its definition by masks; as a program, on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, distance, draw, logits_of, randomize, refused
from devices import elsewhere
from flax import nnx
from small_models import config_of, small_attention

from ttcd_jax.inference import decode, inference_model, prefill, start_state
from ttcd_jax.interop.reference_config import export_reference
from ttcd_jax.methods import METHODS
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.attention import Attention, DualWindowAttention, DualWindowConfig
from ttcd_jax.nn.row import Row
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.state import params_shardings, with_params

T, COUNT, REACH = 23, 3, 12
IDS = np.stack([np.repeat([4, 7, 9], [2, 13, 8]), np.repeat([1, 2, 3], [9, 1, 13])])


def _defined(attention, h, row, window, count):
    """The output under a window by one softmax over all positions."""
    (q, k, v), _ = attention.project(h, row.positions, row.offsets)
    group, reach = q.shape[2] // k.shape[2], attention.config.sink_reach or T
    beyond = jnp.maximum(row.offsets - (reach - 1), 0)
    (near, *_), _ = attention.project(h, row.positions - beyond, row.offsets)
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    i, j = np.indices((T, T))
    ids = np.zeros_like(IDS) if row.segment_ids is None else np.asarray(row.segment_ids)
    in_document = np.asarray(row.offsets)
    is_beside = (i - j >= (window or T)) & (in_document[:, None, :] < count)
    is_seen = (j <= i) & (((i - j) < (window or T)) | is_beside)
    is_seen &= ids[:, :, None] == ids[:, None]
    score, beside = (jnp.einsum("BTNH,BSNH->BNTS", x, k) * x.shape[-1] ** -0.5 for x in (q, near))
    score = jnp.where(is_beside[:, None], beside, score)
    score = jnp.where(is_seen[:, None], score, -jnp.inf)
    if attention.config.has_sink_logits:
        logits = jnp.broadcast_to(attention.sink[...][:, None, None], (*score.shape[:3], 1))
        score = jnp.concatenate([score, logits], -1)
    weight = jax.nn.softmax(score, -1)[..., :T]
    return attention.project_out(jnp.einsum("BNTS,BSNH->BTNH", weight, v))


@pytest.mark.parametrize(("has_logits", "reach"), [(False, None), (True, None), (True, REACH)])
@pytest.mark.parametrize("count", [0, COUNT])
@pytest.mark.parametrize("ids", [None, IDS], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [1, 4, None])
def test_a_query_sees_its_window_and_the_sinks(window, ids, count, has_logits, reach, float64):
    fields = {"window": window, "sink_tokens": count, "sink_reach": reach}
    fields["attention_implementation"] = "lse" if reach else "auto"
    config = small_attention(**fields, has_sink_logits=has_logits)
    student = None if window == 1 else 2
    build, asked = Attention, config
    if student is not None:
        build, asked = DualWindowAttention, DualWindowConfig(attention=config, student_window=2)
    attention = randomize(build, asked)
    (h,) = draw(1, (2, T, 6))
    positions = jnp.broadcast_to(jnp.arange(7, 7 + T), (2, T))  # their differences alone count
    row = Row.of(h, positions, None if ids is None else jnp.asarray(ids))

    def ours(attention, h):
        return jnp.stack(attention(h, row.positions, row.segment_ids)[: 2 if student else None])

    def theirs(attention, h):
        windows = [window, student] if student else [window]
        found = [_defined(attention, h, row, x, count) for x in windows]
        return jnp.stack(found) if student else found[0]

    def value_and_gradients(run):
        def total(attention, h):
            out = run(attention, h)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        (_, out), gradients = nnx.value_and_grad(total, argnums=(0, 1), has_aux=True)(attention, h)
        return out, jax.tree.leaves(gradients)

    assert_close(value_and_gradients(ours), value_and_gradients(theirs))


@functools.cache
def _with_sinks(method):
    """(the model, tokens, its logits of the whole rows, those without sinks)."""
    fields = {"sink_tokens": COUNT, "sink_reach": REACH, "has_sink_logits": method != "lact"}
    config = config_of(method, num_layers=2, **fields)
    models = [randomize(Transformer, x) for x in (config, config.replace(sink_tokens=0))]
    tokens = np.random.default_rng(0).integers(0, 11, (2, T))
    return inference_model(models[0]), tokens, *(np.asarray(logits_of(x, tokens)) for x in models)


@pytest.mark.parametrize("method", ["swa", "ipttcd", "lact", "full"])
@pytest.mark.parametrize("sizes", [(1, 7, 9), (12, 2, 3), (4,)])
def test_pieces_and_tokens_see_the_sinks_of_the_whole_row(method, sizes, float64):
    (model, tokens, whole, bare), done = _with_sinks(method), 0
    assert (distance(bare, whole) > 1e-3) == (model.config.window is not None)
    state = start_state(model, 2, max_length=T)
    for size in sizes:
        logits, state = prefill(model, state, tokens[:, done : done + size], piece_size=4)
        done += size
        assert_close(np.asarray(logits), whole[:, done - 1])
    for at in range(done, T):
        logits, state = decode(model, state, tokens[:, at])
        assert_close(np.asarray(logits), whole[:, at])


def test_the_reference_has_no_sinks_and_lact_alone_no_learned_ones():
    config = config_of("swa", sink_tokens=1)
    refused("cannot express |sink_tokens 1", export_reference, {}, config)
    refused("has_sink_logits", config_of, "lact", has_sink_logits=True)
    assert all(config_of(x, has_sink_logits=True) for x in METHODS if x != "lact")


def test_sinks_inside_a_window_are_where_they_are():
    fields = {"window": 6, "sink_tokens": 2}
    assert config_of("swa", **fields, sink_reach=8)
    refused("set it to 8 or more", config_of, "swa", **fields, sink_reach=7)


def test_sinks_are_those_of_the_document_on_any_device():
    assert elsewhere(worst_on_meshes, is_wide=True) < 1e-10


def worst_on_meshes():
    """The largest relative difference of loss and gradients on a mesh from those without one:
    documents that begin in a shard, at its last two positions, and three shards before."""
    rng, length, worst = np.random.default_rng(0), 32, 0.0
    begins = [[0, 3, 7, 15], [0, 6, 31], [0], [0, 1, 2, 14]]
    ids = np.array([np.isin(np.arange(length), x).cumsum() for x in begins])
    tokens = rng.integers(0, 11, ids.shape)
    for method, segments in (("ipttcd", ids), ("swa", ids), ("swa", None)):
        sizes = {"num_heads": 2, "dim": 16, "mlp_dim": 16, "vocab_size": 12}
        windows = {"window": 5, "student_window": 2, "sink_tokens": COUNT, "has_sink_logits": True}
        windows |= {"sink_reach": REACH}
        config = config_of(method, **sizes, **windows)
        params = nnx.to_pure_dict(nnx.state(randomize(Transformer, config), nnx.Param))
        segments = None if segments is None else jnp.asarray(segments)
        row = Row.of(jnp.asarray(tokens), segment_ids=segments)
        batch = jnp.asarray(tokens), row.segment_ids, row.positions

        def run(params, tokens, *rest, config=config):
            hidden, _ = (model := with_params(config, params)).forward(tokens, *rest)
            mask = jnp.ones(tokens.shape, bool)
            return summed_loss(hidden, model.head_weight(), tokens, mask, 16)

        step = jax.jit(jax.value_and_grad(run))
        alone = step(params, *batch)
        for sizes in ((1, 1, 8, 1), (1, 2, 4, 1), (1, 1, 4, 2)):
            mesh = build_mesh(MeshConfig(**dict(zip(AXES, sizes, strict=True))))
            with jax.set_mesh(mesh):
                placed = jax.device_put(params, params_shardings(config, mesh))
                found = jax.jit(jax.value_and_grad(run))(placed, *batch)
            worst = max(worst, *map(distance, jax.tree.leaves(found), jax.tree.leaves(alone)))
    return worst
