import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import after_chunk, assert_close, assert_same, draw, influence, may_see, randomize
from flax import nnx
from small_models import FLOAT64

from ttcd_jax.methods.ip_ttt import IPTTTMLP, IPTTTConfig, TargetMemoryConfig
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.nn.block import Block, BlockConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.precision import Precision

pytestmark = pytest.mark.usefixtures("float64")

D, F, CHUNK, T = 6, 10, 4, 14


def _config(precision=FLOAT64, **changes) -> IPTTTConfig:
    fields = {"chunk_size": CHUNK, "num_taps": 3, "form": "blocked", "has_activation_conv": True}
    fields |= changes
    mlp = MLPConfig(dim=D, hidden_dim=F, precision=precision)
    return IPTTTConfig(mlp=mlp, memory=TargetMemoryConfig(**fields))


def _module(**changes) -> IPTTTMLP:
    return randomize(IPTTTMLP, _config(**changes))


def _inputs():
    return draw(1, (2, T, D), (2, T, D))


def _convolved(x, taps, *, is_causal):
    """One chunk [L, channels], tap by tap."""
    before = len(taps) - 1 if is_causal else len(taps) // 2
    y = np.zeros_like(x)
    for c in range(len(x)):
        for r, tap in enumerate(taps):
            if 0 <= c + r - before < len(x):
                y[c] += tap * x[c + r - before]
    return y


def _after(stored, h, v, *, corrects):
    """What is stored after a chunk: all tokens write at once, or one after the other."""
    if not corrects:
        return stored + h.T @ v
    for token, target in zip(h, v, strict=True):
        key = token / np.linalg.norm(token)
        stored = stored + np.outer(key, target - key @ stored)
    return stored


@pytest.mark.parametrize(("is_causal", "corrects"), [(True, False), (False, False), (True, True)])
def test_the_memory_stores_projected_targets_under_features(is_causal, corrects):
    """Chunk by chunk, by the equations. numpy."""
    form = "auto" if corrects else "blocked"
    module = _module(is_conv_causal=is_causal, corrects_errors=corrects, form=form)
    x, targets = _inputs()
    names = ("down", "proj", "target_conv", "activation_conv")
    down, proj, target_taps, taps = (np.asarray(getattr(module, name)[...]) for name in names)
    features = np.asarray(module.features(x))
    y = jax.jit(module)(x, targets)
    for row in range(2):
        stored, expected = np.zeros_like(down), []
        for start in range(0, T, CHUNK):
            chunk = slice(start, start + CHUNK)
            h = _convolved(features[row, chunk], taps, is_causal=is_causal)
            v = _convolved(np.asarray(targets)[row, chunk], target_taps, is_causal=is_causal)
            expected.append(h @ (down + 0.3 * stored))
            stored = _after(stored, h, v @ proj, corrects=corrects)
        assert_close(y[row], jnp.asarray(np.concatenate(expected)))


def test_a_symmetric_target_convolution_stays_causal():
    """It looks ahead inside its chunk, but only later chunks read what the chunk writes."""
    module = _module(has_activation_conv=False, is_conv_causal=False)
    x, targets = _inputs()
    reach = influence(lambda targets: module(x, targets), targets)
    may_read = may_see(np.zeros((2, T))) & after_chunk(T, CHUNK)
    np.testing.assert_array_equal(reach > 0, may_read)


def test_the_published_start_writes_nothing():
    module = IPTTTMLP(_config(has_activation_conv=False), rngs=nnx.Rngs(0))
    x, targets = _inputs()
    y, stats = jax.jit(module.remember)(x, targets)
    assert_close(y, module.features(x) @ module.down[...])
    assert stats.memory_ratio == 0
    proj = np.asarray(module.proj[...])
    assert (proj[~np.eye(D, dtype=bool)] == 0).all()
    assert len(set(np.sign(np.diag(proj)))) == 2


def test_parts_that_are_off_have_no_parameters():
    off = dict.fromkeys(("has_proj", "has_target_conv", "has_activation_conv"), False)
    module = nnx.eval_shape(lambda: IPTTTMLP(_config(**off), rngs=nnx.Rngs(0)))
    assert set(nnx.to_pure_dict(nnx.state(module))) == {"gate", "up", "down"}


def test_documents_share_no_memory_unless_told():
    x, targets = _inputs()
    ids = jnp.asarray(np.repeat([[0, 1], [3, 2]], [CHUNK + 1, T - CHUNK - 1], axis=1))
    kept, leaking = (jax.jit(_module(resets_at_document=resets)) for resets in (True, False))
    assert_same(leaking(x, targets, ids), leaking(x, targets))
    assert abs(kept(x, targets, ids) - kept(x, targets)).max() > 1e-3


def _block(target):
    mixer = AttentionConfig(dim=D, num_heads=1, num_kv_heads=1, head_dim=D, window=None)
    config = BlockConfig(mixer=mixer, mlp=_config(Precision(), target=target))
    return randomize(Block, config)


def test_a_block_stores_its_own_input_or_the_embeddings():
    h, embeddings = _inputs()
    hidden, embedding = _block("hidden"), _block("embedding")
    stored = jax.jit(hidden)(h)
    assert_same(stored, jax.jit(hidden)(h, None, None, embeddings))
    y, pull = jax.vjp(jax.jit(lambda e: embedding(h, None, None, e)), embeddings)
    assert abs(y - stored).max() > 1e-3
    (gradient,) = pull(jnp.ones_like(y))
    assert abs(gradient[:, : 2 * CHUNK]).max() > 0
    with pytest.raises(ValueError, match="pass embeddings"):
        embedding(h)
