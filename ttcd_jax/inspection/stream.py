"""A plain model with a memory of its stream, which needs no training."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from ttcd_jax.errors import UserError
from ttcd_jax.methods.ipttcd_stream import StreamMemoryConfig
from ttcd_jax.methods.registry import method_named
from ttcd_jax.train import layers_on_disk as disk


def with_stream_memory(
    run: Any, *, window: int = 128, layer: int | None = None, rate: float = 0.3, sinks: int = 4
) -> Any:
    """The run, whose model reads under `window`, with `sinks` first tokens beside it, and has a
    memory of what its stream lacks there beside the model as it is: after `layer` (None: at four
    fifths of the layers), of this constant rate, as task stream measures. `run`: a `LoadedRun`,
    whose parameters are shared. Raises `UserError` for a model with a memory of its own, a layer
    that it has not, and a window that is not smaller."""
    config, params = run.config, nnx.to_pure_dict(nnx.state(run.model, nnx.Param))
    if method_named(config.method).layers != "none":
        raise UserError(f"method {config.method!r} has its own memory: inspect the run as it is")
    if config.window is not None and window >= config.window:
        raise UserError(f"window {window} is not below the model's, {config.window}")
    at = config.num_layers * 4 // 5 if layer is None else layer
    memory = StreamMemoryConfig(initial_rate=rate, chunk_size=64)
    fields = {"method": "ipttcd_stream", "memory": memory, "fast_layers": (at,)}
    fields |= {"student_window": window, "sink_tokens": sinks}
    new = config.replace(**fields)
    rows = disk.unstacked(config, disk.by_name(params))
    rows = {
        name: rows[name] if name in rows else jnp.zeros(x.shape, x.dtype)
        for name, x in disk.stored_params(new).items()
    }
    return run._replace(model=disk.model_of(new, rows), config=new)
