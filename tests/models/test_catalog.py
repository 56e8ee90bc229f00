import re
import typing

import pytest

from ttcd_jax.errors import UserError
from ttcd_jax.methods.delta_net import DeltaNetConfig, DeltaRuleConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNetConfig
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.methods.lact import LaCTConfig, LaCTMemoryConfig
from ttcd_jax.models.block import (
    HybridBlockConfig,
    IPTTCDBlockConfig,
    IPTTTBlockConfig,
    PlainBlockConfig,
)
from ttcd_jax.models.config import METHODS, TransformerConfig, block_configs, without_memory
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.precision import Precision


def _config(**changes) -> TransformerConfig:
    fields = {"vocab_size": 11, "dim": 8, "num_layers": 4, "num_heads": 2, "mlp_dim": 12}
    fields |= {"window": 8, "student_window": 4, "memory": MemoryConfig(chunk_size=4)}
    return TransformerConfig(**(fields | changes))


def test_every_method_of_the_configuration_is_in_the_catalog():
    names = typing.get_args(typing.get_type_hints(TransformerConfig)["method"])
    assert set(names) == set(METHODS)


def test_fast_layers_get_a_memory_and_the_others_none():
    kinds = [type(block) for block in block_configs(_config(fast_layers=(1, 3)))]
    assert kinds == [PlainBlockConfig, IPTTCDBlockConfig] * 2


@pytest.mark.parametrize(
    ("method", "fast", "other"),
    [
        ("ipttcd_ideal", IPTTCDBlockConfig, PlainBlockConfig),
        ("ipttt", IPTTTBlockConfig, PlainBlockConfig),
        ("deltanet_hybrid", HybridBlockConfig, PlainBlockConfig),
    ],
)
def test_methods_of_a_few_layers_leave_the_others_plain(method, fast, other):
    blocks = block_configs(_config(method=method, fast_layers=(2,)))
    assert [type(block) for block in blocks] == [other, other, fast, other]
    assert type(blocks[0].mixer) is AttentionConfig


@pytest.mark.parametrize(
    ("method", "mixer"),
    [("deltanet", DeltaNetConfig), ("gated_deltanet", GatedDeltaNetConfig), ("lact", LaCTConfig)],
)
def test_methods_of_all_layers_replace_the_attention(method, mixer):
    blocks = block_configs(_config(method=method, fast_layers=(2,)))
    assert [(type(block), type(block.mixer)) for block in blocks] == [(PlainBlockConfig, mixer)] * 4


def test_the_switches_of_a_method_reach_its_layer():
    config = _config(
        fast_layers=(0,),
        ideal_memory=IdealMemoryConfig(chunk_size=2),
        target_memory=TargetMemoryConfig(chunk_size=3),
        delta=DeltaRuleConfig(num_taps=2),
        lact=LaCTMemoryConfig(chunk_size=5),
    )
    block = {
        name: block_configs(config.replace(method=name))[0] for name in METHODS if name != "full"
    }
    assert block["ipttcd_ideal"].mlp.memory == config.ideal_memory
    assert block["ipttcd_ideal"].mixer.student_window == config.student_window
    assert block["ipttt"].mlp.memory == config.target_memory
    assert block["deltanet"].mixer.rule == block["gated_deltanet"].mixer.rule == config.delta
    assert block["deltanet_hybrid"].delta.rule == config.delta
    assert block["lact"].mixer.memory == config.lact
    assert (block["deltanet"].mixer.num_heads, block["deltanet"].mixer.head_dim) == (2, 4)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_without_memory_changes_a_rate_and_nothing_else(method):
    config = _config(method=method, window=None if method == "full" else 8, fast_layers=(0,))
    changes = without_memory(config)
    if METHODS[method].memory_field is None:
        assert changes is None
        return
    off = config.replace(**changes)
    field = METHODS[method].memory_field
    assert getattr(off, field).eta == 0
    rate = getattr(config, field).eta
    assert off.replace(**{field: getattr(off, field).replace(eta=rate)}) == config


@pytest.mark.parametrize(("method", "window"), [("full", None), ("swa", 8)])
def test_baselines_have_no_memory_whatever_the_fast_layers(method, window):
    config = _config(method=method, window=window, fast_layers=(1,))
    for block in block_configs(config):
        assert type(block) is PlainBlockConfig
        assert block.mixer.window == window


def test_every_field_reaches_its_layer():
    precision = Precision(compute="bfloat16")
    config = _config(
        num_kv_heads=1,
        head_dim=6,
        has_qk_norm=True,
        qk_norm_eps=0.5,
        norm_eps=0.25,
        init_std=0.125,
        attention_implementation="reference",
        precision=precision,
        fast_layers=(0,),
    )
    fast, plain = block_configs(config)[:2]
    assert fast.mixer.student_window == 4
    assert fast.mlp.memory == config.memory
    for attention, mlp in ((fast.mixer.attention, fast.mlp.mlp), (plain.mixer, plain.mlp)):
        assert (attention.num_kv_heads, attention.head_dim, attention.window) == (1, 6, 8)
        assert (attention.has_qk_norm, attention.qk_norm_eps) == (True, 0.5)
        assert attention.implementation == "reference"
        assert (mlp.dim, mlp.hidden_dim) == (attention.dim, 12) == (8, 12)
        assert mlp.init_std == attention.init_std == 0.125
        assert mlp.precision == attention.precision == precision
    assert fast.norm_eps == plain.norm_eps == 0.25


def test_absent_head_counts_follow_from_the_others():
    attention = block_configs(_config())[0].mixer
    assert (attention.num_kv_heads, attention.head_dim) == (2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim 0 must be at least 1"),
        ({"num_layers": 0}, "num_layers 0 must be at least 1"),
        ({"num_heads": 3}, "num_heads 3 does not divide dim 8; set head_dim"),
        ({"num_kv_heads": 3, "num_heads": 4}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"fast_layers": (1, 4)}, "fast_layers [4] outside 0 .. 3"),
        ({"fast_layers": (-1,)}, "fast_layers [-1] outside 0 .. 3"),
        ({"fast_layers": (1, 1)}, "fast_layers (1, 1) names a layer twice"),
        ({"fast_layers": (1,), "student_window": 9}, "student_window 9 is wider than"),
        ({"method": "full"}, "method 'full' has no window, got 8"),
        ({"method": "swa", "window": None}, "method 'swa' needs a window"),
        ({"window": 0}, "window 0 must be at least 1"),
        ({"method": "mamba"}, "'lact', got 'mamba'"),
        (
            {"method": "lact", "num_heads": 4, "num_kv_heads": 2},
            "num_kv_heads 2 must be num_heads 4",
        ),
        ({"method": "lact", "dim": 6, "num_heads": 1}, "num_fast_heads 4 does not divide dim 6"),
        ({"method": "deltanet", "delta": DeltaRuleConfig(value_expansion=0.3)}, "whole number"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        _config(**changes)
    assert "\n" not in str(caught.value)
