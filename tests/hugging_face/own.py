"""Small models of ours as checkpoints of Hugging Face, with parameters that numpy draws.

python -m hugging_face.own DIR      in tests/: writes a folder of each, for `make.py`
"""

import sys
from pathlib import Path

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from hugging_face.make import drawn
from small_models import config_of

from ttcd_jax import MemoryConfig, Precision
from ttcd_jax.files import write_whole
from ttcd_jax.interop.hugging_face import MODELING, export_hugging_face, is_own
from ttcd_jax.interop.weight_files import write_safetensors
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, YarnConfig
from ttcd_jax.train.state import abstract_params

SIZES = {"vocab_size": 61, "dim": 24, "mlp_dim": 40, "num_layers": 3, "num_heads": 6}
SIZES |= {"num_kv_heads": 2, "head_dim": 8, "precision": Precision()}
MEMORY = {"chunk_size": 6, "num_taps": 3}
YARN = YarnConfig(factor=4.0, original_length=16)
WINDOWS = {"window": 9, "student_window": 4}


def _ipttcd(changes=(), **memory):
    fields = SIZES | WINDOWS | dict(changes)
    return config_of("ipttcd", **fields, memory=MemoryConfig(**MEMORY, **memory))


def _ipttt(**memory):
    return config_of("ipttt", **SIZES, window=9, memory=TargetMemoryConfig(**MEMORY, **memory))


def _plain(**changes):
    return config_of("swa" if "window" in changes else "full", **SIZES | changes)


LLAMA3 = RopeConfig(llama3=Llama3Config(factor=8.0, original_length=32))
MODELS = {
    "published": _ipttcd(),
    "continued": _ipttcd(
        {"has_qk_norm": True, "has_tied_head": False, "rope": LLAMA3}
        | {"window": None, "student_window": 5},
        **{"output": "teacher_raw", "normalizes_keys": False},
    ),
    "corrected": _ipttcd(
        {"has_qkv_bias": True},
        **{"corrects_errors": True, "half_lives": (8.0, 64.0), "decay": "gated"},
        **{"output": "student", "normalizes_errors": True},
    ),
    "bare": _ipttcd(
        **dict.fromkeys(("has_proj", "has_token_rate", "has_teacher_conv"), False),
        **{"half_lives": (9.0,), "decay": "learned"},
    ),
    "learned": _ipttcd(error="learned", corrects_errors=True, has_proj=False),
    "targets": _ipttt(),
    "sinks": _ipttcd(
        {"sink_tokens": 3, "sink_reach": 17, "has_sink_logits": True, "has_qkv_bias": True}
    ),
    "embeddings": _ipttt(
        **{"is_conv_causal": True, "has_activation_conv": True},
        **{"corrects_errors": True, "target": "embedding"},
    ),
    "full": _plain(rope=RopeConfig(linear_factor=2.0)),
    "swa": _plain(window=9),
    "swa_bias": _plain(window=9, has_qkv_bias=True, rope=RopeConfig(base=1e6)),
    "swa_norm": _plain(window=9, has_qk_norm=True, has_tied_head=False),
    "swa_sinks": _plain(window=9, sink_tokens=2, sink_reach=13),
    "yarn": _plain(has_qk_norm=True, rope=RopeConfig(yarn=YARN)),
}


def params_of(config):
    flat = flatten_dict(abstract_params(config), sep="/")
    renamed = {f"{name}.norm.weight" if "norm" in name else name: name for name in flat}
    values = drawn({name: flat[renamed[name]].shape for name in renamed})
    params = {renamed[name]: jnp.asarray(x) for name, x in values.items()}
    return unflatten_dict(params, sep="/")


def write(name, folder, max_bytes=10**9, **changes):
    """The exported checkpoint."""
    config = MODELS[name].replace(**changes)
    tensors, text = export_hugging_face(params_of(config), config, max_position_embeddings=64)
    files = {"config.json": text} | (
        {MODELING.name: MODELING.read_text()} if is_own(config) else {}
    )
    folder.mkdir(parents=True)
    write_safetensors(folder, tensors, max_bytes)
    for file, content in files.items():
        write_whole(folder / file, content)
    return folder


if __name__ == "__main__":
    for name in MODELS:
        write(name, Path(sys.argv[1]) / name)
