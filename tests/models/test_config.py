"""Which blocks a model has, and what reaches them; a block."""

import dataclasses

import pytest
from small_models import SETTINGS

from ttcd_jax import Precision, TransformerConfig
from ttcd_jax.config import Config
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.delta_net import DeltaNetConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNetConfig
from ttcd_jax.methods.ipttcd import IPTTCDBlockConfig, MemoryConfig
from ttcd_jax.methods.lact import LaCTConfig
from ttcd_jax.models.config import block_configs, switched_off


def _config(**changes) -> TransformerConfig:
    fields = {"vocab_size": 11, "dim": 8, "num_layers": 4, "num_heads": 2, "mlp_dim": 12}
    fields |= {"window": 8, "student_window": 4, "method": "swa"}
    return TransformerConfig(**(fields | changes))


def _of(method: str, **changes) -> TransformerConfig:
    layers = {"fast_layers": (0,)} if METHODS[method].layers == "fast" else {}
    return _config(method=method, **layers | changes)


def test_fast_layers_get_a_memory_and_the_others_are_plain_or_all_replace_the_attention():
    blocks = block_configs(_of("ipttcd", fast_layers=(1, 3)))
    assert [type(block) is IPTTCDBlockConfig for block in blocks] == [False, True] * 2
    assert [block.is_in_place for block in blocks] == [False, True] * 2
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
    changes = {"memory": MemoryConfig(chunk_size=4), "num_kv_heads": 1, "head_dim": 6}
    changes |= {"has_qk_norm": True, "qk_norm_eps": 0.5, "norm_eps": 0.25, "init_std": 0.125}
    config = _of("ipttcd", **changes, attention_implementation="xla", precision=precision)
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

    assert block_configs(_of("ipttcd_ideal"))[0].mixer.student_window == 4
    for method in ("deltanet", "swa"):
        mixer = block_configs(_of(method))[0].mixer
        assert (getattr(mixer, "num_kv_heads", 2), mixer.num_heads, mixer.head_dim) == (2, 2, 4)
