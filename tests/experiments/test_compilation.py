import jax
import pytest

from experiments.cli import keep_programs


@pytest.fixture
def cache_dir(monkeypatch):
    """The setting, restored afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    yield lambda: jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_named_folder_goes_before_the_environment_and_that_before_the_users_cache(
    cache_dir, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_programs(None)
    assert cache_dir() == str(tmp_path / "ttcd_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keep_programs(None)
    assert cache_dir() == str(tmp_path / "home" / ".cache" / "ttcd_jax")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "named")
    jax.config.update("jax_compilation_cache_dir", "named")  # as jax does when it starts
    keep_programs(None)
    assert cache_dir() == "named"
    keep_programs(str(tmp_path))
    assert cache_dir() == str(tmp_path)
    keep_programs("")
    assert cache_dir() is None
