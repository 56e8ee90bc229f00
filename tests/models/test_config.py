"""Which blocks a model has, and what reaches them; a block."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from checks import assert_narrow, randomize
from small_models import FLOAT64, SETTINGS, small_attention

from ttcd_jax.config import Config
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.delta_net import DeltaNetConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNetConfig
from ttcd_jax.methods.ipttcd import IPTTCDBlockConfig, IPTTCDConfig, MemoryConfig
from ttcd_jax.methods.lact import LaCTConfig
from ttcd_jax.models.config import TransformerConfig, block_configs, switched_off
from ttcd_jax.nn.attention import DualWindowConfig
from ttcd_jax.nn.block import Block, BlockConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.row import Row
from ttcd_jax.precision import Precision


def _config(**changes) -> TransformerConfig:
    fields = {"vocab_size": 11, "dim": 8, "num_layers": 4, "num_heads": 2, "mlp_dim": 12}
    fields |= {"window": 8, "student_window": 4, "method": "swa"}
    return TransformerConfig(**(fields | changes))


def _of(method: str, **changes) -> TransformerConfig:
    layers = {"fast_layers": (0,)} if METHODS[method].layers == "fast" else {}
    return _config(method=method, **layers | changes)


def test_fast_layers_get_a_memory_and_the_others_none():
    blocks = block_configs(_of("ipttcd", fast_layers=(1, 3)))
    assert [type(block) is IPTTCDBlockConfig for block in blocks] == [False, True] * 2
    assert [block.is_in_place for block in blocks] == [False, True] * 2


def test_methods_of_a_few_layers_leave_the_others_plain_and_the_rest_replace_the_attention():
    plain = block_configs(_config())[0]
    for method in ("ipttcd_ideal", "ipttt", "deltanet_hybrid"):
        blocks = block_configs(_of(method, fast_layers=(2,)))
        assert [block == plain for block in blocks] == [True, True, False, True]
    mixers = {"deltanet": DeltaNetConfig, "gated_deltanet": GatedDeltaNetConfig, "lact": LaCTConfig}
    for method, mixer in mixers.items():
        assert [type(block.mixer) for block in block_configs(_of(method))] == [mixer] * 4


def _holds(config, settings) -> bool:
    parts = (getattr(config, field.name) for field in dataclasses.fields(config))
    return any(x == settings or (isinstance(x, Config) and _holds(x, settings)) for x in parts)


@pytest.mark.parametrize("method", [name for name in METHODS if name in SETTINGS])
def test_the_settings_of_a_method_reach_its_layer(method):
    block = block_configs(_of(method, memory=SETTINGS[method]))[0]
    assert _holds(block, SETTINGS[method])
    assert SETTINGS[method] != METHODS[method].settings()


def test_a_memory_switched_off_changes_one_setting_and_nothing_else():
    changed = {method: {"eta": 0.0} for method in ("ipttcd", "ipttcd_ideal", "ipttt")}
    changed["lact"] = {"chunk_size": 12}
    for method in METHODS:
        config = _of(method, window=None if method == "full" else 8)
        off = None
        if method in changed:
            off = config.replace(memory=config.settings.replace(**changed[method]))
        assert switched_off(config, 12) == off


def test_every_field_reaches_its_layer():
    precision = Precision(compute="bfloat16")
    config = _of(
        "ipttcd",
        memory=MemoryConfig(chunk_size=4),
        num_kv_heads=1,
        head_dim=6,
        has_qk_norm=True,
        qk_norm_eps=0.5,
        norm_eps=0.25,
        init_std=0.125,
        attention_implementation="xla",
        precision=precision,
    )
    fast, plain = block_configs(config)[:2]
    assert fast.mixer.student_window == 4
    assert fast.mlp.memory == config.memory
    for attention, mlp in ((fast.mixer.attention, fast.mlp.mlp), (plain.mixer, plain.mlp)):
        assert (attention.num_kv_heads, attention.head_dim, attention.window) == (1, 6, 8)
        assert (attention.has_qk_norm, attention.qk_norm_eps) == (True, 0.5)
        assert attention.attention_implementation == "xla"
        assert (mlp.dim, mlp.hidden_dim) == (attention.dim, 12) == (8, 12)
        assert mlp.init_std == attention.init_std == 0.125
        assert mlp.precision == attention.precision == precision
        assert mlp.norm_eps == attention.norm_eps == 0.25


def test_windows_and_absent_head_counts_reach_the_layers():
    assert block_configs(_of("ipttcd_ideal"))[0].mixer.student_window == 4
    for method in ("deltanet", "swa"):
        mixer = block_configs(_of(method))[0].mixer
        assert (getattr(mixer, "num_kv_heads", 2), mixer.num_heads, mixer.head_dim) == (2, 2, 4)


def test_settings_have_defaults_and_a_method_has_none():
    assert _of("ipttcd").settings == MemoryConfig()
    assert _config().settings is None
    with pytest.raises(TypeError, match="method"):
        TransformerConfig(vocab_size=11, dim=8, num_layers=1, num_heads=2, mlp_dim=12)


WIDTH = 6


def _parts(precision):
    eps = {"precision": precision, "norm_eps": 1e-3}
    return small_attention(**eps), MLPConfig(dim=WIDTH, hidden_dim=8, **eps)


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


def test_blocks_share_a_signature_and_statistics_say_whether_there_is_a_memory():
    h = jnp.ones((1, 5, WIDTH))
    row = Row.of(h, None, jnp.zeros((1, 5), jnp.int32))
    for config in (_plain, _fast):
        block = randomize(Block, config(Precision()))
        y, stats = jax.eval_shape(block.forward, h, row)
        assert y.shape == h.shape
        assert (stats is None) == (config is _plain)


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    assert_narrow(
        lambda p: randomize(Block, _fast(p)), lambda m, h: m(h), (2, 13, WIDTH), bound=0.1
    )
