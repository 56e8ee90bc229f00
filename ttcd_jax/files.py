"""Files written whole: a reader finds the old one, the new one or none, never a half. Digests, and
JSON of unknown origin.

Each file or folder is made under a hidden name in the same folder, `.<name>.<process>`, and renamed
once it is complete. An error removes the hidden one; a killed process leaves it, and it can be
deleted. `OSError` becomes `UserError`. Permissions follow the umask.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ttcd_jax.errors import DataError, UserError

MAX_JSON_BYTES = 100_000_000  # as in the safetensors library


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path to write a file at, which replaces `path` at the end."""
    with _renamed(path) as unfinished:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        unfinished.chmod(mode)  # safetensors makes a new file, for its owner alone


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
            f"cannot write {path}: {error.strerror or error}; choose another folder"
        ) from error


def sha256(path: Path) -> str:
    """The digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def difference(path: Path, num_bytes: int | None = None, digest: str | None = None) -> str | None:
    """The first difference of a file from its size and its sha256, each unless None; None if there
    is none."""
    try:
        size = path.stat().st_size
        if num_bytes is not None and size != num_bytes:
            return f"{size} bytes instead of {num_bytes}"
        return None if digest is None or sha256(path) == digest else "its content changed"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of at most `MAX_JSON_BYTES`; otherwise a `DataError`."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise DataError(f"{path} is no regular file")
        if size > MAX_JSON_BYTES:
            raise DataError(f"{path} has {size} bytes, JSON may have {MAX_JSON_BYTES}")
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that `data`, read from `path`, encodes in UTF-8, each name once and every
    number finite; otherwise a `DataError`."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError as error:
        raise DataError(f"the JSON of {path} is nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise DataError(f"the JSON of {path} is a {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} is there twice")
        result[name] = value
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
