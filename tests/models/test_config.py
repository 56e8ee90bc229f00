"""Which blocks a model has, and what reaches them; a block."""

import pytest
from small_models import SETTINGS, config_of

from ttcd_jax import MemoryConfig, Precision
from ttcd_jax.methods import METHODS
from ttcd_jax.models.config import block_configs, switched_off


@pytest.mark.parametrize("method", [name for name in METHODS if name in SETTINGS])
def test_the_settings_of_a_method_reach_its_layer(method):
    assert repr(SETTINGS[method]) in repr(block_configs(config_of(method))[0])
    assert SETTINGS[method] != METHODS[method].settings()


def test_a_memory_switched_off_changes_one_setting_and_nothing_else():
    with_rate = ("ipttcd", "ipttcd_ideal", "ipttt", "ipttcd_stream")
    changed = {x: {"eta": 0.0} for x in with_rate} | {"lact": {"chunk_size": 12}}
    for method in METHODS:
        config = config_of(method)
        off = None
        if method in changed:
            off = config.replace(memory=config.settings.replace(**changed[method]))
        assert switched_off(config, 12) == off


def test_every_field_reaches_its_layer():
    precision = Precision(compute="bfloat16")
    changes = {"memory": MemoryConfig(chunk_size=4), "num_kv_heads": 1, "head_dim": 6, "window": 8}
    changes |= {"has_qk_norm": True, "qk_norm_eps": 0.5, "norm_eps": 0.25, "init_std": 0.125}
    config = config_of("ipttcd", **changes, attention_implementation="xla", precision=precision)
    fast, plain = block_configs(config)[:2]
    assert (fast.mixer.student_window, fast.mlp.memory) == (2, config.memory)
    for layer in (fast.mixer.attention, fast.mlp.mlp, plain.mixer, plain.mlp):
        own = vars(layer).keys() & vars(config).keys()
        assert own >= {"dim", "init_std", "norm_eps", "precision"}
        assert {x: getattr(layer, x) for x in own} == {x: getattr(config, x) for x in own}
        assert getattr(layer, "hidden_dim", 12) == 12
    assert block_configs(config_of("ipttcd_ideal"))[0].mixer.student_window == 2
    for method in ("deltanet", "swa"):
        mixer = block_configs(config_of(method))[0].mixer
        assert (getattr(mixer, "num_kv_heads", 2), mixer.num_heads, mixer.head_dim) == (2, 2, 4)
