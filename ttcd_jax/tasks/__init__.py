"""The evaluations of a run: every file here that defines one registers it in `TASKS`."""

import importlib
import pkgutil

from ttcd_jax.measure.task import TASKS, find_task

__all__ = ["TASKS", "find_task"]

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
