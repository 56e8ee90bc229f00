"""The kernels that a model's training step launches on a GPU, from its lowering, without a GPU."""

import collections

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from launched import launched_kernels
from small_models import config_of

from ttcd_jax.methods.ipttcd import MemoryConfig
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


@pytest.mark.parametrize(("remat", "forwards"), [("none", 2), ("dots", 2), ("block", 4)])
def test_a_step_runs_every_kernel_once_a_layer_and_recomputes_forwards_alone(remat, forwards):
    """A unit has one fast layer and one plain one, which attends through the same kernels;
    rematerialization of elementwise parts runs no attention again."""
    model = nnx.eval_shape(lambda: Transformer(CONFIG.replace(remat=remat), rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def loss(params, tokens, segment_ids):
        return nnx.merge(graph, params)(tokens, segment_ids).astype(jnp.float32).sum()

    launched = launched_kernels(jax.grad(loss), params, tokens, tokens, capability=90)
    assert collections.Counter(launched) == {
        "dual_window_forward": forwards,
        **dict.fromkeys(("dual_window_backward_q", "dual_window_backward_kv"), 2),
    }
