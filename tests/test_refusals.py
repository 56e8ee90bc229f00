"""What configurations refuse, each in one line with the numbers and the remedy."""

import pytest
from checks import refused
from flax import nnx
from small_models import FLOAT64, config_of, small_attention

from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.methods.delta_net import DeltaNetConfig, DeltaRuleConfig
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.methods.lact import LaCTConfig, LaCTMemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.attention import DualWindowConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.rope import RopeConfig, YarnConfig
from ttcd_jax.precision import Precision
from ttcd_jax.train.groups import rate_factors
from ttcd_jax.train.hardware import parse_topology
from ttcd_jax.train.optimizer import MuonSettings, OptimizerConfig
from ttcd_jax.train.profile import step_window


def dual_window(window, **changes):
    return DualWindowConfig(attention=small_attention(window=window), **changes)


def in_place(**memory):
    config = IPTTCDConfig(mlp=MLPConfig(dim=6, hidden_dim=8), memory=MemoryConfig(**memory))
    return IPTTCDMLP(config, rngs=nnx.Rngs(0))


def delta_net(**rule):
    fields = {"dim": 6, "num_heads": 2, "head_dim": 4, "precision": FLOAT64}
    return DeltaNetConfig(rule=DeltaRuleConfig(**rule), **fields)


def lact(attention=(), **memory):
    return LaCTConfig(
        attention=small_attention(**{"dim": 8, "num_heads": 2} | dict(attention)),
        memory=LaCTMemoryConfig(**{"num_fast_heads": 2, "chunk_size": 4, "low_rank": 2} | memory),
    )


def model(**changes):
    fields = {"vocab_size": 11, "dim": 8, "num_layers": 4, "num_heads": 2, "mlp_dim": 12}
    fields |= {"window": 8, "student_window": 4, "method": "swa"}
    return TransformerConfig(**fields | changes)


def muon(kind="muon", **settings):
    return OptimizerConfig(kind=kind, settings=MuonSettings(**settings))


def rates(rates):
    return rate_factors(config_of("ipttcd", precision=Precision()), rates)


NAN, INFINITY = float("nan"), float("inf")
FOLDING = {"folds_state": True, "resets_at_document": False}
TARGETS = {"method": "ipttt", "fast_layers": (0,)}
# The call, its arguments, and what the line must name.
CASES = [
    (small_attention, {"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3|num_heads 4"),
    (small_attention, {"head_dim": 5}, "head_dim 5|odd"),
    (small_attention, {"head_dim": 0}, "head_dim 0|at least 1"),
    (small_attention, {"num_kv_heads": 0}, "num_kv_heads 0|at least 1"),
    (small_attention, {"window": 0}, "window 0|at least 1"),
    (dual_window, {"window": 4, "student_window": 5}, "student_window 5|window 4"),
    (dual_window, {"window": 4, "student_window": 0}, "student_window 0|at least 1"),
    (YarnConfig, {"factor": 0.5, "original_length": 64}, "factor 0.5|at least 1"),
    (YarnConfig, {"factor": 2.0, "original_length": 0}, "original_length 0|at least 1"),
    (YarnConfig, {"factor": 2.0, "original_length": 8, "slow_turns": 0.0}, "must be"),
    (YarnConfig, {"factor": 2.0, "original_length": 8, "slow_turns": 64.0}, "must be"),
    (RopeConfig, {"base": 1.0}, "base 1.0|greater than 1"),
    (in_place, {"student_conv_init": "previous", "num_taps": 1}, "num_taps=1|use 2"),
    (in_place, {"half_lives": (8.0,) * 4}, "4 half_lives|6 columns"),
    (in_place, {"chunk_size": 0}, "chunk_size 0|at least 1"),
    (in_place, {"num_taps": 0}, "num_taps 0|at least 1"),
    (in_place, {"block_chunks": 0}, "block_chunks 0|at least 1"),
    (in_place, {"renorm_chunks": 0}, "renorm_chunks 0|at least 1"),
    (in_place, {"output": "teacher_raw", "has_teacher_conv": False}, "'teacher_raw'|use 'teacher'"),
    (in_place, {"folds_state": True}, "folds_state|set resets_at_document=False"),
    (in_place, {"form": "attention", "orthogonalizes_updates": True}, "'attention'|orthogonalizes"),
    (in_place, {"corrects_errors": True, "form": "blocked"}, "no other form|'auto'"),
    (in_place, {"corrects_errors": True, "normalizes_keys": False}, "set normalizes_keys=True"),
    (in_place, {"corrects_errors": True, "renorm_chunks": 4}, "corrects_errors|renorm_chunks"),
    (in_place, {"corrects_errors": True, "orthogonalizes_updates": True}, "orthogonalizes_updates"),
    (in_place, {"half_lives": (0.0,)}, "half_lives"),
    (in_place, {"half_lives": (64.0,), "renorm_chunks": 4}, "renorm_chunks|set one of them"),
    (in_place, {"decay": "gated"}, "'gated'|set half_lives="),
    (in_place, FOLDING | {"half_lives": (8.0,)}, "folds_state|set half_lives=()"),
    (in_place, {"eta": NAN}, "MemoryConfig.eta nan|0 or more, finite"),
    (in_place, {"eta": -1.0}, "MemoryConfig.eta -1.0|must be"),
    (in_place, {"zero_slope": -1.0}, "MemoryConfig.zero_slope -1.0|must be"),
    (in_place, {"zero_slope": INFINITY}, "MemoryConfig.zero_slope inf|0 or more, finite"),
    (delta_net, {"chunk_size": 0}, "DeltaRuleConfig.chunk_size 0|at least 1"),
    (delta_net, {"num_taps": 0}, "DeltaRuleConfig.num_taps 0|at least 1"),
    (delta_net, {"value_expansion": 1.3}, "head_dim 4|value_expansion 1.3|5.2"),
    (delta_net, {"value_expansion": 0}, "value_expansion 0|positive and finite"),
    (DeltaRuleConfig, {"value_expansion": -1.0}, "value_expansion -1.0|must be"),
    (lact, {"attention": {"num_kv_heads": 1}}, "num_kv_heads 1|num_heads 2"),
    (lact, {"attention": {"head_dim": 2}}, "num_heads 2|head_dim 2|dim 8"),
    (lact, {"attention": {"has_qk_norm": True}}, "set memory.has_qk_norm"),
    (lact, {"attention": {"has_qkv_bias": True}}, "set memory.has_qkv_bias"),
    (lact, {"num_fast_heads": 3}, "num_fast_heads 3|dim 8"),
    (lact, {"num_fast_heads": 0}, "num_fast_heads 0|at least 1"),
    (lact, {"chunk_size": 0}, "chunk_size 0|at least 1"),
    (lact, {"low_rank": 0}, "low_rank 0|at least 1"),
    (lact, {"hidden_expansion": 0.0}, "hidden_expansion 0.0|positive"),
    (lact, {"hidden_expansion": NAN}, "hidden_expansion nan|positive"),
    (lact, {"hidden_expansion": 0.2}, "hidden_expansion 0.2|fast head of"),
    (model, {"dim": 0}, "dim 0|at least 1"),
    (model, {"init_std": -0.02}, "init_std -0.02|must be"),
    (model, {"norm_eps": -1e-6}, "norm_eps -1e-06|must be"),
    (model, {"qk_norm_eps": -1e-6}, "qk_norm_eps -1e-06|must be"),
    (model, {"num_layers": 0}, "num_layers 0|in 1 .. 10,000"),
    (model, {"num_heads": 3}, "num_heads 3|dim 8|set head_dim"),
    (model, {"num_kv_heads": 3, "num_heads": 4}, "num_kv_heads 3|num_heads 4"),
    (model, {"fast_layers": (1, 4)}, "fast_layers [4]|0 .. 3"),
    (model, {"fast_layers": (-1,)}, "fast_layers [-1]|0 .. 3"),
    (model, {"fast_layers": (1, 1)}, "fast_layers (1, 1)|twice"),
    (model, {"method": "ipttcd", "fast_layers": (1,), "student_window": 9}, "student_window 9|8"),
    (model, {"method": "full"}, "'full'|no window|8"),
    (model, {"window": None}, "'swa'|needs a window"),
    (model, {"window": 0}, "window 0|at least 1"),
    (model, {"method": "mamba"}, "'mamba'|there are"),
    (model, {"method": "iptcd"}, "did you mean 'ipttcd'?"),
    (model, {"method": "ipttcd"}, "no layer with a memory|set fast_layers, e.g. (0,)"),
    (model, {"method": "deltanet_hybrid"}, "no layer with a memory"),
    (model, {"fast_layers": (1,)}, "'swa' has no memory|(1,)"),
    (model, {"method": "lact", "fast_layers": (1,)}, "memory in all layers"),
    (model, {"memory": MemoryConfig()}, "'swa'|MemoryConfig|set memory = None"),
    (model, TARGETS | {"memory": MemoryConfig()}, "set memory = @TargetMemoryConfig()"),
    (model, {"method": "lact", "num_heads": 4, "num_kv_heads": 2}, "num_kv_heads 2|num_heads 4"),
    (model, {"method": "lact", "dim": 6, "num_heads": 1}, "num_fast_heads 4|dim 6"),
    (model, {"method": "deltanet", "memory": DeltaRuleConfig(value_expansion=0.3)}, "whole number"),
    *(
        (SamplingConfig, {field: value}, f"SamplingConfig.{field} {value} must be ")
        for field, values in {
            "temperature": (-0.1, INFINITY, NAN),
            "top_k": (0, -3),
            "top_p": (0.0, 1.1, NAN),
            "min_p": (-0.1, 1.5),
            "repetition_penalty": (0.0, -1.0),
            "seed": (-1, 2**32),
        }.items()
        for value in values
    ),
    (muon, {"kind": "sgd"}, "'sgd'|adamw, muon"),
    (muon, {"kind": "adamw"}, "'adamw'|MuonSettings"),
    (muon, {"momentum": 1.0}, "momentum 1.0|[0, 1)"),
    (muon, {"is_nesterov": 1}, "is_nesterov|bool"),
    (muon, {"orthogonalization": "float16"}, "orthogonalization|'float64'"),
    (OptimizerConfig, {"rates": (("head", -1.0),)}, "rates|0 or more"),
    (rates, {"rates": (("layers/*/mlp/prj", 0.5),)}, "'layers/*/mlp/prj'|mlp/proj"),
    (rates, {"rates": (("*", 0.0),)}, "freezes every parameter"),
    (parse_topology, {"text": "h10x8"}, "did you mean 'h100'|a100, h100, h200, b200"),
    *(
        (parse_topology, {"text": text}, "as in 'h100x64'")
        for text in ("h100", "h100x0", "64xh100", "h100x" + "9" * 5000)
    ),
    (parse_topology, {"text": "h100x1000000"}, "1000000 devices|4096"),
    (parse_topology, {"text": "h100x12"}, "12 devices|nodes of 8"),
    *(
        (step_window, {"text": text, "steps": 24}, f"'{text}'|START:STOP|<= 24")
        for text in ("", "3", "2:2", "4:2", "-1:2", "a:b", "2:25", "2:4:6", ":4")
    ),
]


@pytest.mark.parametrize(("call", "arguments", "words"), CASES)
def test_what_does_not_fit_is_refused_in_one_line(call, arguments, words):
    refused(words, call, **arguments)
