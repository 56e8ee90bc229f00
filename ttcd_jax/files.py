"""Whole files and whole folders: a reader finds the old one, the new one or none, never a half.

Each is made under a hidden name in the same folder, `.<name>.<process>`, and renamed once it is
complete. An error removes the hidden one; a killed process leaves it, and it can be deleted.
`OSError` becomes `UserError`. Permissions follow the umask, as those of any file.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttcd_jax.errors import UserError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write a file under, which replaces `path` at the end."""
    with _renamed(path) as unfinished:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        unfinished.chmod(mode)  # safetensors makes a file of its own, for its owner alone


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end; `path` must be absent or empty."""
    with _renamed(path) as unfinished:
        unfinished.mkdir()
        yield unfinished


def write_whole(path: Path, content: str | bytes, *, is_durable: bool = False) -> None:
    """Writes a file, text as UTF-8. `is_durable`: its content is on disk before it is renamed."""
    with whole_file(path) as unfinished, unfinished.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2) + "\n")


def check_unused(path: Path) -> None:
    """Raises `UserError` unless `path` is free: absent, or an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: choose another")


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A hidden name next to `path`, renamed to it at the end and removed after an error."""
    path = path.absolute()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            if unfinished.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)
            else:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; choose another place"
        ) from error
