import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    TWO_ROWS,
    assert_close,
    dot_operand_types,
    draw,
    influence,
    may_see,
    randomize,
    traced,
    value_and_gradients,
)
from flax import nnx

from ttcd_jax.methods.ipttcd import IPTTCDBlockConfig, IPTTCDConfig, MemoryConfig
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.nn.block import Block, BlockConfig
from ttcd_jax.nn.dual_window import DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.row import Row
from ttcd_jax.precision import Precision

D = 6
FLOAT64 = Precision(param="float64", compute="float64", state="float64")


def _attention(precision, window=4):
    return AttentionConfig(
        dim=D,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        window=window,
        precision=precision,
        norm_eps=1e-3,
    )


def _plain(precision=FLOAT64):
    mlp = MLPConfig(dim=D, hidden_dim=8, precision=precision, norm_eps=1e-3)
    return BlockConfig(mixer=_attention(precision), mlp=mlp)


def _fast(precision=FLOAT64, **memory):
    mlp = MLPConfig(dim=D, hidden_dim=8, precision=precision, norm_eps=1e-3)
    memory = MemoryConfig(**({"chunk_size": 4, "num_taps": 3, "form": "blocked"} | memory))
    return IPTTCDBlockConfig(
        mixer=DualWindowConfig(attention=_attention(precision), student_window=2),
        mlp=IPTTCDConfig(mlp=mlp, memory=memory),
    )


@pytest.mark.parametrize("config", [_plain, _fast])
def test_a_token_depends_on_the_past_of_its_document_and_nothing_else(config, float64):
    block = randomize(Block, config())
    (h,) = draw(1, (*TWO_ROWS.shape, D))
    reach = influence(lambda h: block(h, segment_ids=jnp.asarray(TWO_ROWS)), h)
    assert not reach[~may_see(TWO_ROWS)].any()
    # One attention reaches its window; a memory reaches the whole document.
    reaches = {_plain: may_see(TWO_ROWS, 4), _fast: may_see(TWO_ROWS)}[config]
    if config is _fast:
        chunk = np.arange(14) // 4
        reaches &= (chunk[:, None] > chunk[None, :])[None, :, None]
    assert (reach[reaches] > 0).all()


def test_a_frozen_fast_block_that_reads_raw_features_is_the_plain_block(float64):
    fast = randomize(Block, _fast(output="teacher_raw", eta=0.0))
    plain = nnx.eval_shape(lambda: Block(_plain(), rngs=nnx.Rngs(0)))
    shared = nnx.to_pure_dict(nnx.state(fast, nnx.Param))
    for name in ("proj", "rate", "teacher_conv", "student_conv"):
        del shared["mlp"][name]
    state = nnx.state(plain, nnx.Param)
    nnx.replace_by_pure_dict(state, shared)
    nnx.update(plain, state)
    (h,) = draw(1, (2, 11, D))
    assert_close(jax.jit(fast)(h), jax.jit(plain)(h))


def test_the_student_is_normed_after_its_own_residual(float64):
    """Without a memory to read, the student's output is the plain MLP of norm(h + student)."""
    block = randomize(Block, _fast(output="student", has_student_conv=False))
    (h,) = draw(1, (1, 4, D))

    def norm(x, weight):
        return weight[...] * x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)

    teacher, student = jax.jit(block.mixer)(norm(h, block.mixer_norm))
    t = norm(h + student, block.mlp_norm)
    expected = h + teacher + block.mlp.features(t) @ block.mlp.down[...]
    assert_close(jax.jit(block)(h), expected, 1e-11)


def test_blocks_share_a_signature_and_statistics_say_whether_there_is_a_memory():
    h = jnp.ones((1, 5, D))
    row = Row.of(h, None, jnp.zeros((1, 5), jnp.int32))
    for config in (_plain, _fast):
        block = randomize(Block, config(Precision()))
        y, stats = jax.eval_shape(block.forward, h, row)
        assert y.shape == h.shape
        assert (stats is None) == (config is _plain)


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    narrow, wide = (
        randomize(Block, _fast(Precision(compute=compute))) for compute in ("bfloat16", "float32")
    )
    (h,) = draw(1, (2, 13, D), dtype=jnp.bfloat16)
    graph, params = nnx.split(narrow)

    def loss(params, h):
        return nnx.merge(graph, params)(h).astype(jnp.float32).sum()

    assert dot_operand_types(traced(jax.grad(loss, argnums=(0, 1)), params, h)) == {"bfloat16"}
    ours = value_and_gradients(narrow, lambda m, h: m(h), h)
    assert ours[0].dtype == jnp.bfloat16
    assert_close(ours, value_and_gradients(wide, lambda m, h: m(h), h.astype(jnp.float32)), 0.1)
