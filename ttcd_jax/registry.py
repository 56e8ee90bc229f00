"""Registries: the objects behind the names in a configuration.

Methods, evaluation tasks, metrics, optimizers, trackers and readers of documents have one each. A
module outside the package registers more when it is imported, for a command by
`--import=my_package.my_module`.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ttcd_jax.config import Config, closest
from ttcd_jax.errors import UserError

OF_YOUR_OWN = "(one of your own: --import=its.module)"
IMPORTED_MODULES: list[str] = []  # by `import_modules`, stored in the runs of this process


class Registry[T](dict[str, T]):
    """The entries of one kind by name. `config` gives an entry's configuration class, if it has
    one, which stored configurations know by the name of the class alone. A field of the type
    `base` can hold any of them."""

    def __init__(
        self,
        kind: str,
        config: Callable[[Any], type[Config] | None] = lambda entry: None,
        base: type[Config] | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.config = kind, config
        if base is not None:
            base.registry = self

    def add[E](self, entry: E, name: str = "") -> E:
        """Registers an entry under `name`, or its own. Raises `UserError` for no name, and for a
        name, or a name of a configuration class, that is taken."""
        if not (name := name or getattr(entry, "name", "")) or not isinstance(name, str):
            call = f"register({entry!r}, {name!r})"
            raise UserError(f"{call}: give the {self.kind} and its name (docs/extending.md)")
        new = self.config(entry)
        if self.setdefault(name, entry) is not entry:  # pyright: ignore
            raise UserError(f"two {self.kind}s are called {name!r}: rename one of them")
        if new and any(x is not new and x.__name__ == new.__name__ for x in self.classes()):
            del self[name]
            raise UserError(f"two configuration classes are called {new.__name__}: rename yours")
        return entry

    def named(self, name: str) -> T:
        """Raises `UserError` with the nearest name there is."""
        if name not in self:
            near = closest(name, [*self]) or f"; there are {', '.join(self)}"
            raise UserError(f"no {self.kind} is called {name!r}{near} {OF_YOUR_OWN}")
        return self[name]

    def classes(self) -> list[type[Config]]:
        """The configuration classes of all entries."""
        return [*dict.fromkeys(x for x in map(self.config, self.values()) if x is not None)]


def import_modules(names: Iterable[str]) -> None:
    """Imports modules that register something. Raises `UserError` for one that is not there."""
    for name in names:
        if not _is_module(name):
            file = f", not a file: {Path(name).stem}" if name.endswith(".py") else ""
            raise UserError(f"--import={name}: give a module's name, as my_package.my_method{file}")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # another that the module imports
            problem = f"no module {error.name} in {Path.cwd()} or on PYTHONPATH"
            raise UserError(f"--import={name}: {problem}") from None
        IMPORTED_MODULES.append(name)


def check_imported(owner: str, names: Any) -> None:
    """Raises `UserError` unless this process has imported the modules that a stored run needs. None
    is imported because a file names it: that would run its code."""
    if not (isinstance(names, list) and all(map(_is_module, names))):
        raise UserError(f"{owner} has imports {names!r}, no names of modules: it is damaged")
    if missing := [name for name in names if name not in sys.modules]:
        flags = " ".join(f"--import={name}" for name in missing)
        remedy = f"add {flags} (in Python: import it before)"
        raise UserError(f"{owner} needs {', '.join(missing)}: {remedy}")


def _is_module(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is not None
