"""A model of two small layers for every method, whose windows and chunks are four tokens; a run of
it; the attention of small layers; and a method outside the package, that of docs/extending.md."""

import functools
import re
import types
from pathlib import Path

import jax
from checks import randomize
from flax import nnx

from ttcd_jax import OptimizerConfig, Precision, RunConfig, Transformer, TransformerConfig
from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.data.synthetic import RecallConfig
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.methods.ipttcd_stream import StreamMemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.methods.registry import Method
from ttcd_jax.nn.attention import AttentionConfig
from ttcd_jax.run.bindings import load_config
from ttcd_jax.train.layers_on_disk import by_name, unstacked

CHUNK, WINDOW, D = 4, 4, 8
FLOAT64 = Precision(param="float64", compute="float64", state="float64")
SETTINGS = {
    "ipttcd": MemoryConfig(chunk_size=CHUNK, num_taps=3, form="blocked"),
    "ipttcd_ideal": IdealMemoryConfig(chunk_size=CHUNK),
    "ipttcd_stream": StreamMemoryConfig(chunk_size=CHUNK),
    # One that forgets, for all that methods share.
    "ipttt": TargetMemoryConfig(
        **{"chunk_size": CHUNK, "num_taps": 3, "form": "blocked", "target": "embedding"},
        **{"half_lives": (3.0, 50.0), "decay": "gated"},
    ),
    "lact": LaCTMemoryConfig(chunk_size=CHUNK, num_fast_heads=2, low_rank=3),
}
DELTA = DeltaRuleConfig(chunk_size=CHUNK, num_taps=3, value_expansion=1.5)
SETTINGS |= dict.fromkeys((x for x in METHODS if "deltanet" in x), DELTA)


RECALL = RecallConfig(num_slots=8, num_keys=4, num_values=4)


def outside_method() -> Method:
    """The method of docs/extending.md, "hebbian", not registered."""
    page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
    code = re.search(r"```python\n# my_package/hebbian.py\n(.*?)```", page, re.DOTALL)[1]
    exec(code, types.ModuleType("hebbian").__dict__)
    return METHODS.pop("hebbian")


def _small(settings):
    """Settings of a method that has no entry above: its defaults, in small chunks."""
    names = () if settings is None else settings.__dataclass_fields__
    return settings and settings(**{"chunk_size": CHUNK} if "chunk_size" in names else {})


def config_of(method: str, **changes) -> TransformerConfig:
    """The model; `fast_layers` (default: the first) apply where the method leaves the choice."""
    layers = changes.pop("fast_layers", (0,))
    sizes = {"vocab_size": 11, "dim": D, "num_layers": 2, "num_heads": 2, "mlp_dim": 12}
    fields = sizes | {
        "method": method,
        "window": None if method == "full" else WINDOW,
        "student_window": 2,
        "fast_layers": layers if METHODS[method].layers == "fast" else (),
        "memory": SETTINGS.get(method) or _small(METHODS[method].settings),
        "precision": FLOAT64,
    }
    return TransformerConfig(**fields | changes)


def run_config(model: str | TransformerConfig = "ipttcd", **changes) -> RunConfig:
    """Eight steps of a model, or of a method's, on recall data."""
    model = config_of(model) if isinstance(model, str) else model
    fields = {"model": model, "data": RECALL, "optimizer": OptimizerConfig()}
    return RunConfig(**fields | {"steps": 8, "batch_size": 2} | changes)


@functools.cache
def recipe(name: str, *params: str, **options) -> RunConfig:
    """The run of a file of experiments/configs."""
    return load_config(RunConfig, name, params, config_dir=CONFIG_DIR, **options)


def byte_model(**changes) -> TransformerConfig:
    """A model of text for commands: one IP-TTCD layer of bytes, float32."""
    fields = {"num_layers": 1, "dim": 8, "mlp_dim": 8, "window": 8, "student_window": 4}
    fields |= {"vocab_size": ByteTokenizer.vocab_size, "precision": Precision()}
    return config_of("ipttcd", **fields | changes)


def small_attention(**changes) -> AttentionConfig:
    """Two pairs of heads that share keys and values."""
    fields = {"dim": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "window": WINDOW}
    return AttentionConfig(**fields | {"precision": FLOAT64} | changes)


def model_of(method: str, *, std: float = 0.5, **changes) -> Transformer:
    """The model `config_of(method, **changes)` of random parameters."""
    return randomize(Transformer, config_of(method, **changes), std=std)


def rows_of(model) -> dict[str, jax.Array]:
    """The parameters of a model by their names on disk."""
    return unstacked(model.config, by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
