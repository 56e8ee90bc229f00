"""Methods, one module each; importing this package imports, and so registers, all of them."""

import importlib
import pkgutil

from ttcd_jax.methods.registry import METHODS, Method, Settings, method_named, register

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = ["METHODS", "Method", "Settings", "method_named", "register"]
