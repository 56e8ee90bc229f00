"""The folder of compiled programs: a named one, the environment's, or the user's cache."""

import jax

from experiments.cli import keep_programs


def test_a_named_folder_goes_before_the_environment_and_that_before_the_users_cache(
    monkeypatch, tmp_path
):
    before = jax.config.jax_compilation_cache_dir

    def chosen(directory, **variables):
        for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        keep_programs(directory)
        return jax.config.jax_compilation_cache_dir

    try:
        assert chosen(None, XDG_CACHE_HOME="a") == "a/ttcd_jax"
        assert chosen(None, HOME="/home/b") == "/home/b/.cache/ttcd_jax"
        jax.config.update("jax_compilation_cache_dir", "named")  # as jax does when it starts
        named = {"JAX_COMPILATION_CACHE_DIR": "named"}
        assert chosen(None, **named) == "named"
        assert chosen(str(tmp_path), **named) == str(tmp_path)
        assert chosen("", **named) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
