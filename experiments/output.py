"""What a command makes for the user: there as a whole, or not at all, and never over something."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ttcd_jax.errors import UserError


def check_unused(path: Path) -> None:
    """Raises `UserError` unless `path` is free: absent, or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another")


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when all went well and is gone when not. A command
    that is killed leaves it behind, as `.<name>.<process>`."""
    path = path.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.parent / f".{path.name}.{os.getpid()}"
        unfinished.mkdir()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
