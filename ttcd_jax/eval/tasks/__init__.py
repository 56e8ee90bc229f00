"""The evaluations: every file of this folder defines tasks and registers them in `TASKS`."""

import importlib
import pkgutil

from ttcd_jax.eval.task import TASKS, find_task

__all__ = ["TASKS", "find_task"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
