"""The persistent compilation cache, and a warning when a training step is compiled again."""

import contextlib
import os
from collections.abc import Iterator

import jax
from absl import logging

from ttcd_jax.files import user_cache
from ttcd_jax.train.state import TrainState
from ttcd_jax.train.step import Batch, Metrics, TrainStep

_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_programs(directory: str | None) -> None:
    """Sets the persistent compilation cache to `directory`; "": no cache; None:
    JAX_COMPILATION_CACHE_DIR if it is set, else `ttcd_jax` in the user's cache folder."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # default: 1
    if directory is None and "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # jax has read it
    folder = str(user_cache()) if directory is None else directory
    jax.config.update("jax_compilation_cache_dir", folder or None)


@contextlib.contextmanager
def compiled_once(step: TrainStep, start: int) -> Iterator[TrainStep]:
    """`step`, a jitted function whose first call takes step `start`; a warning names the step at
    which it is compiled again."""
    name = f"jit({step.__name__})"
    done, compilations = start, 0

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        nonlocal compilations
        if event == _COMPILED and kwargs["fun_name"] == name:
            compilations += 1
            if compilations > 1:
                text = "step %d was compiled anew, in %.1f s: its state or its batch has another "
                logging.warning(
                    text + "shape, dtype or sharding than before", done + 1, duration_secs
                )

    def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        nonlocal done
        result = step(state, batch)
        done += 1
        return result

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield counted
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
