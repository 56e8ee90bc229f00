"""What a step costs, and what computes it."""

import math

import definitions
import jax
import jax.numpy as jnp
import pytest
from checks import traced
from flax import nnx
from small_models import config_of
from ttcd_kernels.dispatch import Candidate
from ttcd_kernels.dual_window import api

from ttcd_jax import MemoryConfig, Precision
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd_stream import StreamMemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.models.config import forward_flops, training_flops_per_token
from ttcd_jax.nn.attention import visible_pairs
from ttcd_jax.train.hardware import HARDWARE, data_sheet, parse_topology
from ttcd_jax.train.state import abstract_model

LENGTH = 32
MODEL = config_of(
    "full",
    **{"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "student_window": 4},
    **{"attention_implementation": "xla", "scans_layers": False, "precision": Precision()},
)
SETTINGS = {
    "ipttcd": MemoryConfig(chunk_size=8, form="associative"),
    "ipttt": TargetMemoryConfig(chunk_size=8, form="associative"),
    # One chunk: one round of its loop.
    "ipttcd_ideal": IdealMemoryConfig(chunk_size=LENGTH),
    "corrected": MemoryConfig(chunk_size=LENGTH, corrects_errors=True),
    "ipttcd_stream": StreamMemoryConfig(chunk_size=LENGTH),
    "lact": LaCTMemoryConfig(chunk_size=LENGTH // 2, num_fast_heads=2, low_rank=None),
}


def _counted(config):
    """2 m k n of every matrix product in a program without loops."""
    graph, params = nnx.split(abstract_model(config))
    tokens, total = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32), 0
    for eqn in traced(lambda p, t: nnx.merge(graph, p)(t), params, tokens):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = (eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(sizes)
    return total


# Products with a column or two per head, which the formula leaves out: per token of one layer.
COLUMNS = {
    "ipttcd": MODEL.dim,
    "ipttcd_stream": MODEL.dim,
    "deltanet": MODEL.dim * MODEL.num_heads,
    "gated_deltanet": 2 * MODEL.dim * MODEL.num_heads,
    "deltanet_hybrid": MODEL.dim * MODEL.num_heads,
    "gated_deltanet_hybrid": 2 * MODEL.dim * MODEL.num_heads,
    "lact": 5 * MODEL.dim * 2,
}
NO_ATTENTION = ("deltanet", "gated_deltanet")


@pytest.mark.parametrize("name", ["corrected", *sorted(METHODS.keys() - {"swa"})])
def test_the_formula_counts_every_matrix_product_of_an_unrolled_model(name, monkeypatch):
    # The definition computes all T x T scores, on fast layers once per window.
    monkeypatch.setitem(api.CANDIDATES, "xla", Candidate(definitions.dual_window))
    method = "ipttcd" if name == "corrected" else name
    # LaCT's memory shares its keys: no grouped heads.
    is_everywhere = METHODS[method].layers == "all"
    config = MODEL.replace(
        method=method,
        num_kv_heads=None if method == "lact" else 2,
        fast_layers=(1,) if METHODS[method].layers == "fast" else (),
        memory=SETTINGS.get(name),
    )
    dense = 0 if method in NO_ATTENTION else config.num_layers
    surplus = dense * 4 * (LENGTH**2 - visible_pairs(LENGTH, None)) * config.dim
    if method in ("ipttcd", "ipttcd_ideal"):
        surplus += 4 * LENGTH**2 * config.dim
    if method == "ipttcd":  # errors of one chunk without the gap, for the share of the windows
        surplus += 2 * config.settings.chunk_size * config.dim * (config.mlp_dim + config.dim)
    if method == "ipttcd_stream":  # a window of 4: the student's, in layers 0 and 1, and of layer 2
        beyond = visible_pairs(LENGTH, None) - visible_pairs(LENGTH, 4)
        surplus += 4 * (2 * (LENGTH**2 - visible_pairs(LENGTH, 4)) + beyond) * config.dim
    surplus += 2 * LENGTH * COLUMNS.get(method, 0) * (config.num_layers if is_everywhere else 1)
    forward = forward_flops(config, LENGTH)
    assert _counted(config) == forward + surplus
    assert training_flops_per_token(config, LENGTH) == 3 * forward / LENGTH


def test_visible_pairs_counts_the_mask():
    for length, window in ((7, 3), (7, None), (5, 9), (1, 1)):
        reach = length if window is None else window
        pairs = sum(0 <= i - j < reach for i in range(length) for j in range(length))
        assert visible_pairs(length, window) == pairs


def test_the_name_a_device_gives_itself_finds_its_data_sheet():
    assert parse_topology("h100x64") == (HARDWARE["H100"], 64)
    assert data_sheet("NVIDIA H100 80GB HBM3") == HARDWARE["H100"]
    assert data_sheet("NVIDIA GB200") == HARDWARE["B200"]
    assert data_sheet("NVIDIA A100-SXM4-80GB") == HARDWARE["A100"]
    for other in ("cpu", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "GH200"):
        assert data_sheet(other) is None, other
