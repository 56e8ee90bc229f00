"""ttcd_jax: language models that learn what to remember (In-Place Test-Time Context Distillation).

    from ttcd_jax import IPTTCDBlock, IPTTCDMLP, DualWindowAttention, Transformer, load_run

Names are imported on first use, so that a command's `--help` does not import jax.
`ttcd_jax.inference` reads and generates text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttcd_jax.data.sources import BatchesConfig as BatchesConfig
    from ttcd_jax.inspection.inspection import inspect as inspect
    from ttcd_jax.methods.ipttcd import IPTTCDMLP as IPTTCDMLP
    from ttcd_jax.methods.ipttcd import IPTTCDBlock as IPTTCDBlock
    from ttcd_jax.methods.ipttcd import IPTTCDBlockConfig as IPTTCDBlockConfig
    from ttcd_jax.methods.ipttcd import IPTTCDConfig as IPTTCDConfig
    from ttcd_jax.methods.ipttcd import MemoryConfig as MemoryConfig
    from ttcd_jax.models.config import TransformerConfig as TransformerConfig
    from ttcd_jax.models.transformer import Transformer as Transformer
    from ttcd_jax.nn.attention import AttentionConfig as AttentionConfig
    from ttcd_jax.nn.attention import DualWindowAttention as DualWindowAttention
    from ttcd_jax.nn.attention import DualWindowConfig as DualWindowConfig
    from ttcd_jax.nn.block import Block as Block
    from ttcd_jax.nn.block import BlockConfig as BlockConfig
    from ttcd_jax.nn.mlp import MLPConfig as MLPConfig
    from ttcd_jax.nn.rope import RopeConfig as RopeConfig
    from ttcd_jax.nn.row import Piece as Piece
    from ttcd_jax.precision import Precision as Precision
    from ttcd_jax.run.config import RunConfig as RunConfig
    from ttcd_jax.run.directory import load_run as load_run
    from ttcd_jax.run.training import train_run as train_run
    from ttcd_jax.train.optimizer import OptimizerConfig as OptimizerConfig

    __version__: str

_MODULES = {
    "data.sources": "BatchesConfig",
    "inspection.inspection": "inspect",
    "methods.ipttcd": "IPTTCDMLP IPTTCDBlock IPTTCDBlockConfig IPTTCDConfig MemoryConfig",
    "models.config": "TransformerConfig",
    "models.transformer": "Transformer",
    "nn.attention": "AttentionConfig DualWindowAttention DualWindowConfig",
    "nn.block": "Block BlockConfig",
    "nn.mlp": "MLPConfig",
    "nn.rope": "RopeConfig",
    "nn.row": "Piece",
    "precision": "Precision",
    "run.config": "RunConfig",
    "run.directory": "load_run",
    "run.training": "train_run",
    "train.optimizer": "OptimizerConfig",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("ttcd-jax")
        if name not in _HOME:
            raise AttributeError(f"module 'ttcd_jax' has no attribute {name!r}")
        return getattr(import_module(f"ttcd_jax.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOME, "__version__"]
