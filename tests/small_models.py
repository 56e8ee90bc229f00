"""A model of two small layers for every method, whose windows and chunks are four tokens."""

from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.precision import Precision

CHUNK, WINDOW, D = 4, 4, 8
CONFIG = TransformerConfig(
    vocab_size=11,
    dim=D,
    num_layers=2,
    num_heads=2,
    mlp_dim=12,
    window=WINDOW,
    student_window=2,
    fast_layers=(0,),
    memory=MemoryConfig(chunk_size=CHUNK, num_taps=3, form="blocked"),
    ideal_memory=IdealMemoryConfig(chunk_size=CHUNK),
    target_memory=TargetMemoryConfig(
        chunk_size=CHUNK, num_taps=3, form="blocked", target="embedding"
    ),
    delta=DeltaRuleConfig(chunk_size=CHUNK, num_taps=3, value_expansion=1.5),
    lact=LaCTMemoryConfig(chunk_size=CHUNK, num_fast_heads=2, low_rank=3),
    precision=Precision(param="float64", compute="float64", state="float64"),
)


def config_of(method: str, **changes) -> TransformerConfig:
    window = None if method == "full" else WINDOW
    return CONFIG.replace(method=method, window=window, **changes)
