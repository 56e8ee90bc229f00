import jax
import jax.numpy as jnp
import pytest
from absl import logging

from ttcd_jax.train.compilation import compiled_once, keep_programs


@pytest.fixture
def warnings(monkeypatch):
    """The warnings given, formatted."""
    seen = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: seen.append(text % args))
    return seen


def _step(state, batch):
    return state + batch["x"].sum(), {}


def test_only_a_compilation_after_the_first_is_named_with_its_step(warnings):
    state, short, long = jnp.zeros(()), {"x": jnp.zeros(3)}, {"x": jnp.zeros(4)}
    jitted, shapes = jax.jit(_step), jax.eval_shape(lambda: (state, short))
    with compiled_once(jitted, jitted.lower(*shapes), start=10) as (step, await_program):
        await_program()  # the first call takes this program
        jax.jit(lambda x: x + 1)(state)  # other programs do not count
        for batch in (short, short, long, long):
            state, _ = step(state, batch)
    (warning,) = warnings
    assert "step 13 was compiled anew" in warning
    jax.jit(_step)(state, {"x": jnp.zeros(5)})
    assert len(warnings) == 1, "no listener after the last step"


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
