"""Configurations of the reference: parameter counts of the published models, both directions of the
tables, and what they refuse."""

import math
from pathlib import Path

import pytest

from tests.parity.golden import Golden
from tests.parity.models import model_type
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.interop.reference import names_on_disk
from ttcd_jax.interop.reference_config import (
    families,
    reference_config,
    transformer_config,
    unread_keys,
)

MODELS = sorted((Path(__file__).parents[1] / "golden").glob("*_model*.npz"))

SMALL = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 16, "intermediate_size": None}
LARGE = {"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 24, "intermediate_size": None}
COMMON = {"vocab_size": 129280, "tie_word_embeddings": True, "rope_theta": 1e6, "window_size": 2048}
FAST = {"ttt_layers": [0, 6, 12, 18], "ttt_chunk": 1024}
LACT = {"num_attn_heads": 16, "num_lact_heads": 4, "w0_w2_low_rank": 32}
LACT |= {"use_momentum": True, "learnable_ttt_scale": True}
PUBLISHED = [
    ("transformer", SMALL, 440_714_240),
    ("transformer", LARGE, 878_126_592),
    ("ipttt", SMALL | FAST, 444_929_024),
    ("ipttt", LARGE | FAST, 887_594_496),
    ("ipttcdv9", SMALL | FAST, 445_025_280),
    ("ipttcdv9", LARGE | FAST, 887_733_760),
    ("delta_net", SMALL, 441_403_904),
    ("delta_net", LARGE, 879_455_232),
    ("gated_deltanet", SMALL | {"head_dim": 64, "expand_v": 1}, 466_963_712),
    ("gated_deltanet", LARGE | {"head_dim": 64, "expand_v": 1}, 936_964_224),
    ("deltanet_baseline", SMALL | {"ttt_layers": [0, 6, 12, 18]}, 457_561_088),
    ("lact", SMALL | LACT, 450_747_872),
]


@pytest.mark.parametrize(("name", "sizes", "count"), PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(name, sizes, count):
    config = transformer_config({"model_type": name} | COMMON | sizes)
    assert sum(math.prod(x.leaf.shape) for x in names_on_disk(config).values()) == count


def _source(path: Path) -> dict:
    golden = Golden(path)
    return golden.config | {"model_type": model_type(golden)}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_configuration_survives_the_way_out_and_back(path):
    source = _source(path)
    config = transformer_config(source)
    again = reference_config(config)
    assert transformer_config(again) == config
    assert unread_keys(again) == unread_keys(source) == []


SMALLEST = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2}


@pytest.mark.parametrize("name", families())
def test_absent_keys_take_the_class_defaults(name):
    extra = {"ttt_layers": [0], "num_attn_heads": 2, "num_lact_heads": 2}
    config = transformer_config(SMALLEST | extra | {"model_type": name, "window_size": 8192})
    assert (config.qk_norm_eps, config.norm_eps, config.has_tied_head) == (1e-5, 1e-6, False)
    assert config.mlp_dim == 256
    match config.method:
        case "ipttcd":
            memory = config.memory
            assert (memory.chunk_size, memory.eta, memory.num_taps) == (8192, 0.3, 5)
            assert (memory.teacher_conv_init, memory.student_conv_init) == ("zeros", "zeros")
            assert (memory.output, memory.renorm_chunks) == ("teacher", None)
            assert memory.normalizes_keys
            assert config.student_window == 8192
        case "ipttt":
            assert not config.memory.is_conv_causal
            assert config.memory.target == "hidden"
            assert config.memory.proj_init == "gaussian_diagonal"
        case "gated_deltanet":
            assert (config.head_dim, config.memory.value_expansion) == (256, 2)
        case "deltanet":
            assert (config.head_dim, config.memory.value_expansion) == (4, 1)
        case "lact":
            assert (config.memory.low_rank, config.memory.has_momentum) == (None, False)


def test_aliases_and_switches():
    source = SMALLEST | {"model_type": "ipttt", "ttt_layers": [0], "ttt_target": "input_embeds"}
    assert transformer_config(source).memory.target == "embedding"
    off = transformer_config(source | {"ttt_mode": False})
    assert off.method == "full"
    raw = SMALLEST | {"model_type": "ipttcdv8", "ttt_layers": [0], "ttt_weight_renorm": True}
    memory = transformer_config(raw | {"ttt_output_use_teacher_conv": False}).memory
    assert (memory.output, memory.renorm_chunks) == ("teacher_raw", 4)
    assert unread_keys(source | {"ttt_magic": 1, "_comment": ""}) == ["ttt_magic"]


IPTTCD = SMALLEST | {"model_type": "ipttcdv9", "ttt_layers": [0]}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (IPTTCD | {"model_type": "gpt2"}, ["gpt2", "ipttcdv9"]),
        (IPTTCD | {"ttt_output_source": "techer"}, ["'techer'", "'student'"]),
        (IPTTCD | {"model_type": ["ipttcdv9"]}, ["model_type"]),
        ({"model_type": "transformer"}, ["vocab_size"]),
        (IPTTCD | {"use_output_gate": True}, ["use_output_gate", "True"]),
        (IPTTCD | {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (IPTTCD | {"ttt_proj_init": "sparse"}, ["ttt_proj_init", "sparse", "diagonal"]),
        (IPTTCD | {"ttt_proj_init": ["zero"]}, ["ttt_proj_init"]),
        (IPTTCD | {"ttt_chunk": None}, ["ttt_chunk"]),
        (IPTTCD | {"ttt_visible_chunks": "1"}, ["ttt_visible_chunks"]),
        (IPTTCD | {"ttt_mode": "no"}, ["ttt_mode"]),
        (IPTTCD | {"hidden_size": "8"}, ["hidden_size"]),
        (IPTTCD | {"norm_eps": 10**400}, ["norm_eps"]),
        (IPTTCD | {"model_type": "delta_net", "num_heads": 0}, ["num_heads"]),
        (IPTTCD | {"model_type": "delta_net", "expand_k": 0}, ["expand_k"]),
        (IPTTCD | {"model_type": "delta_net", "use_gate": True}, ["use_gate"]),
        (SMALLEST | {"model_type": "transformer", "rope_scaling": {"a": 1}}, ["rope_scaling"]),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(source, words):
    with pytest.raises(DataError) as caught:
        transformer_config(source)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_the_reference_has_not_is_refused():
    config = transformer_config(IPTTCD)
    for change, message in [
        ({"method": "ipttcd_ideal", "memory": None}, "ipttcd_ideal"),
        ({"student_window": 8000}, "student window"),
        ({"has_qk_norm": True, "qk_norm_eps": 1e-6}, "eps"),
    ]:
        with pytest.raises(UserError, match=message):
            reference_config(config.replace(**change))
