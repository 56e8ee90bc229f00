"""ttcd_jax: language models that learn what to remember (In-Place Test-Time Context Distillation).

    from ttcd_jax import IPTTCDBlock, IPTTCDMLP, DualWindowAttention, Transformer, load_run

Names are imported on first use, so that a command's `--help` needs no jax.
"""

import importlib

_HOME = {
    "DualWindowAttention": "ttcd_jax.nn.dual_window",
    "DualWindowConfig": "ttcd_jax.nn.dual_window",
    "AttentionConfig": "ttcd_jax.nn.attention",
    "IPTTCDBlock": "ttcd_jax.models.block",
    "IPTTCDBlockConfig": "ttcd_jax.models.block",
    "IPTTCDConfig": "ttcd_jax.methods.ipttcd",
    "IPTTCDMLP": "ttcd_jax.methods.ipttcd",
    "MLPConfig": "ttcd_jax.nn.mlp",
    "MemoryConfig": "ttcd_jax.methods.ipttcd",
    "Precision": "ttcd_jax.precision",
    "RopeConfig": "ttcd_jax.nn.rope",
    "Transformer": "ttcd_jax.models.transformer",
    "TransformerConfig": "ttcd_jax.models.catalog",
    "BatchesConfig": "ttcd_jax.data.sources",
    "OptimizerConfig": "ttcd_jax.train.optimizer",
    "RunConfig": "ttcd_jax.run.config",
    "load_run": "ttcd_jax.run.directory",
    "train_run": "ttcd_jax.run.training",
    "Request": "ttcd_jax.inference.generate",
    "SamplingConfig": "ttcd_jax.inference.sampling",
    "decode": "ttcd_jax.inference.decode",
    "generate": "ttcd_jax.inference.generate",
    "inference_model": "ttcd_jax.inference.model",
    "prefill": "ttcd_jax.inference.prefill",
    "start_state": "ttcd_jax.inference.state",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'ttcd_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
