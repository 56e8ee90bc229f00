import jax
import jax.numpy as jnp
from checks import assert_close, assert_narrow, draw, randomize
from small_models import FLOAT64, small_attention

from ttcd_jax.methods.ipttcd import IPTTCDBlockConfig, IPTTCDConfig, MemoryConfig
from ttcd_jax.nn.attention import DualWindowConfig
from ttcd_jax.nn.block import Block, BlockConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.row import Row
from ttcd_jax.precision import Precision

D = 6


def _parts(precision):
    eps = {"precision": precision, "norm_eps": 1e-3}
    return small_attention(**eps), MLPConfig(dim=D, hidden_dim=8, **eps)


def _plain(precision):
    mixer, mlp = _parts(precision)
    return BlockConfig(mixer=mixer, mlp=mlp)


def _fast(precision=FLOAT64, **memory):
    attention, mlp = _parts(precision)
    memory = MemoryConfig(**{"chunk_size": 4, "num_taps": 3, "form": "blocked"} | memory)
    return IPTTCDBlockConfig(
        mixer=DualWindowConfig(attention=attention, student_window=2),
        mlp=IPTTCDConfig(mlp=mlp, memory=memory),
    )


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
    assert_narrow(lambda p: randomize(Block, _fast(p)), lambda m, h: m(h), (2, 13, D), bound=0.1)
