"""Settings of the whole suite: shapes checked at public boundaries, fast compilation, float64."""

import functools
import gc
import logging
import os
import sys

import commands
from commands import XLA_FLAGS

# Before jax starts, and inherited by the commands that tests run.
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)

import jax
import pytest
from jaxtyping import _decorator, install_import_hook

sys.modules["tests.commands"] = commands  # one server of forks under both names
# Stays installed: modules are imported (and instrumented) by the tests that need them. Of the
# kernels the host's code only: Triton reads the source of its functions unchanged.
install_import_hook(
    [
        *("ttcd_jax.memory", "ttcd_jax.methods", "ttcd_jax.models", "ttcd_jax.nn"),
        *(f"ttcd_jax.train.{name}" for name in ("bad_steps", "groups", "loss", "metrics")),
        *(f"ttcd_jax.train.{name}" for name in ("muon", "optimizer", "state", "step")),
        *(f"ttcd_kernels.dual_window.{name}" for name in ("api", "cotangents", "tiles")),
        *(f"ttcd_kernels.dual_window.{name}" for name in ("mosaic_call", "triton_call", "xla")),
        *(f"ttcd_kernels.decode.{name}" for name in ("api", "triton_call", "xla")),
        *(f"ttcd_kernels.{name}" for name in ("launch", "normalize")),
        *(f"ttcd_kernels.{name}" for name in ("partitioning", "short_conv")),
    ],
    "checks.typechecked",
)
# A nested function is decorated whenever the one around it runs, an eighth of tracing: what checks
# a signature is made once.
_decorator._make_fn_with_signature = functools.lru_cache(4096)(_decorator._make_fn_with_signature)
# Traced programs live as long as their process: full collections of a heap that only grows took an
# eighth of the suite.
gc.set_threshold(10_000, 20, 1_000)
# jax says once per process that this machine has no TPU.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are next to pytest's cache, those of the commands that tests run too: a
    second run takes a fourth of the time (`pytest --cache-clear` forgets them)."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        for name, value in (
            ("jax_compilation_cache_dir", str(config.cache.mkdir("jax"))),
            ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ):
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)
        os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("user"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests of more than 20 seconds run first: both workers end together. Large
    models come before small ones, after which a process keeps what it freed, in pieces. Nothing is
    stolen from the front: the soak stays on one worker, and its undisturbed runs are trained once.
    """
    first = ("test_docs", "test_pods", "test_smollm2", "test_soak", "test_equality")
    first += ("test_in_place", "test_mutations", "test_every_evaluation", "test_processes")
    first += ("test_simulated", "test_sinks", "test_machine_code", "test_hugging_face_export")
    items.sort(key=lambda item: [item.path.stem != name for name in first])


@pytest.fixture
def float64():
    """The test computes in float64."""
    with jax.enable_x64(True):
        yield
