"""The kernels that a model's training step launches on a GPU, from its lowering, without a GPU."""

import collections

import jax
import jax.numpy as jnp
from flax import nnx
from launched import launched_kernels
from small_models import config_of

from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision

CONFIG = config_of(
    "ipttcd",
    vocab_size=64,
    dim=64,
    num_layers=4,
    mlp_dim=96,
    window=64,
    student_window=32,
    fast_layers=(0, 2),  # scanned as two equal units
    memory=MemoryConfig(chunk_size=32),
    precision=Precision(),
)
ATTENTION = {"dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"}
CONVOLUTION = {"short_conv_residual_forward", "short_conv_residual_backward"}


def _launched(config: TransformerConfig) -> dict[str, int]:
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(params, tokens, segment_ids):
        return nnx.merge(graph, params)(tokens, segment_ids).astype(jnp.float32).sum()

    step = jax.grad(loss)
    return dict(collections.Counter(launched_kernels(step, params, tokens, tokens, capability=90)))


def test_a_step_runs_every_kernel_once_a_layer_and_recomputes_none():
    """A unit has one fast layer and one plain one, which attends through the same kernels."""
    expected = dict.fromkeys(ATTENTION, 2) | dict.fromkeys(CONVOLUTION, 1)
    assert _launched(CONFIG.replace(remat="none")) == expected


def test_rematerialisation_of_elementwise_parts_runs_convolutions_again_and_no_attention():
    forwards = {"short_conv_residual_forward": 2}
    expected = dict.fromkeys(ATTENTION, 2) | dict.fromkeys(CONVOLUTION, 1) | forwards
    assert _launched(CONFIG.replace(remat="dots")) == expected


def test_rematerialisation_runs_forwards_again():
    forwards = {"dual_window_forward": 4, "short_conv_residual_forward": 2}
    expected = dict.fromkeys(ATTENTION, 2) | dict.fromkeys(CONVOLUTION, 1) | forwards
    assert _launched(CONFIG.replace(remat="block")) == expected
