import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import draw, randomize

from experiments.studies.mad.models import mad_config
from experiments.studies.mad.tasks import BASELINES
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.tasks.distillation import effective_rank, key_ranks

TASK = BASELINES["in-context-recall"]


def test_effective_rank_of_known_matrices():
    (x,) = draw(0, (50, 6))
    orthogonal, _ = np.linalg.qr(x)
    assert effective_rank(jnp.asarray(orthogonal)) == pytest.approx(6, rel=1e-3)
    assert effective_rank(jnp.ones((9, 4))) == pytest.approx(1, rel=1e-3)
    assert effective_rank(jnp.zeros((9, 4))) == 1
    sizes = np.array([4.0, 2.0, 1.0, 1.0])
    shares = sizes / sizes.sum()
    expected = np.exp(-(shares * np.log(shares)).sum())
    assert effective_rank(jnp.diag(jnp.asarray(sizes))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["ipttcd", "ipttt"])
def test_keys_are_those_of_each_layer(method):
    config = mad_config(method, TASK, window=4, dim=16, mlp_dim=12)
    model = randomize(Transformer, config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, 11)), jnp.int32)
    ranks_of = jax.jit(lambda tokens: key_ranks(model, tokens))
    ranks = np.asarray(ranks_of(tokens))
    assert ranks.shape == (2,)
    assert ((ranks > 1) & (ranks <= 12)).all()
    # Equal tokens differ by their neighbours alone.
    same = np.asarray(ranks_of(jnp.zeros_like(tokens)))
    assert (same < ranks).all()


def test_a_model_without_an_in_place_memory_has_none():
    config = mad_config("lact", TASK, window=4, dim=16, mlp_dim=12)
    model = randomize(Transformer, config)
    assert jax.eval_shape(lambda x: key_ranks(model, x), jnp.zeros((1, 4), jnp.int32)) is None
