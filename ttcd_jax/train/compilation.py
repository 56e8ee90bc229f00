"""The persistent compilation cache."""

import os

import jax

from ttcd_jax.files import user_cache


def keep_programs(directory: str | None) -> None:
    """Sets the persistent compilation cache to `directory`; "": no cache; None:
    JAX_COMPILATION_CACHE_DIR if it is set, else `ttcd_jax` in the user's cache folder."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # default: 1
    if directory is None and "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # jax has read it
    folder = str(user_cache()) if directory is None else directory
    jax.config.update("jax_compilation_cache_dir", folder or None)
