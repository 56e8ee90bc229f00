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


def _launched(config: TransformerConfig) -> dict[str, int]:
    graph, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(params, tokens, segment_ids):
        return nnx.merge(graph, params)(tokens, segment_ids).astype(jnp.float32).sum()

    step = jax.grad(loss)
    return dict(collections.Counter(launched_kernels(step, params, tokens, tokens, capability=90)))


def test_a_step_runs_every_kernel_once_a_layer_and_recomputes_none():
    """A unit has one fast layer and one plain one, which attends through the same kernels."""
    assert _launched(CONFIG.replace(remat="none")) == dict.fromkeys(ATTENTION, 2)


def test_rematerialisation_of_elementwise_parts_runs_no_attention_again():
    assert _launched(CONFIG.replace(remat="dots")) == dict.fromkeys(ATTENTION, 2)


def test_rematerialisation_runs_forwards_again():
    expected = dict.fromkeys(ATTENTION, 2) | {"dual_window_forward": 4}
    assert _launched(CONFIG.replace(remat="block")) == expected
