"""Atomic writes of files and folders, files that grow by whole records, file digests, and JSON
from untrusted files.

A reader finds the old file, the new one or none, never a partial one. Each is written under a
hidden name in the same folder (a file's is `.<name>.<process>`, a folder's `.<name>.unfinished`)
and renamed once its content is on disk. After an error the hidden one is removed. The remains of a
killed process can be deleted; a folder's next writer takes them over. `OSError` becomes
`UserError`. Permissions follow the umask. What is in a bucket (`storage`) is uploaded last.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from ttcd_jax import storage
from ttcd_jax.errors import DataError, ResourceError, UserError

MAX_JSON_BYTES = 100_000_000  # as in the safetensors library

_MOST_VALUES = 10_000_000  # of JSON: each takes about 80 bytes of memory
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MOST_ARRAY_BYTES = 2**31
# Of a file that is not an npz, is damaged, or has headers that contradict its size.
_ARRAY_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError, SystemError, MemoryError),
    *(EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError),
)
_MAX_WAITING = 1_000_000  # bytes
_FULL = re.compile("|".join(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` at the end."""
    path = path.absolute()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with _errors_of(path), _renamed(unfinished, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        unfinished.chmod(mode)  # safetensors replaces the file by a private one


@contextlib.contextmanager
def whole_folder(path: Path, keeps: Callable[[Path], object] = lambda _: False) -> Iterator[Path]:
    """A folder to fill, by one process at a time, renamed to `path` at the end; `path` must be
    absent or empty. After an error or a kill the next one finds its content, if `keeps(it)`."""
    path = path.absolute()
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _errors_of(path), _locked(unfinished), _renamed(unfinished, path, keeps):
        check_unused(path)
        for left in () if keeps(unfinished) else unfinished.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield unfinished


def write_whole(path: Path, content: str | bytes) -> None:
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with whole_file(path) as unfinished:
        unfinished.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=2) + "\n")


class GrowingFile:
    """A file to which whole records are appended. A failure is a warning, once: the rest waits for
    the next record, so that none is torn, and while too much waits the new ones are dropped."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._has_failed = path, b"", False
        self._flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with contextlib.suppress(OSError):  # `append` warns of it
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, record: bytes) -> None:
        """Adds a record, on disk when this returns."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting += record
        try:
            descriptor = os.open(self._path, self._flags, 0o666)
            self._flags &= ~os.O_CREAT  # a file that is removed under a run is not made anew
            with os.fdopen(descriptor, "ab", buffering=0) as file:
                while self._waiting:
                    self._waiting = self._waiting[file.write(self._waiting) :]
                os.fsync(file)
        except OSError as error:
            if not self._has_failed:
                logging.warning("%s cannot be written: %s", self._path, error.strerror)
            self._has_failed = True


def full_disk(error: BaseException) -> str | None:
    """The reason, if `error` is due to a full disk, a quota or a limit of file sizes."""
    return next(iter(_FULL.findall(str(error))), None)


def check_unused(path: Path) -> None:
    """Raises `UserError` unless `path` is free: absent, or an empty folder."""
    if storage.address(path) is None:
        is_used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    elif not (is_used := any(found := storage.names(path)) and storage.UNFINISHED not in found):
        shutil.rmtree(path, ignore_errors=True)  # the copy of what was there
    if is_used:
        raise UserError(f"{path} exists and is not an empty folder: choose another")


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind, remedy = (ResourceError, "make room, or ") if full_disk(error) else (UserError, "")
        problem = error.strerror or error
        raise kind(f"cannot write {path}: {problem}; {remedy}choose another folder") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it, for as long as this process lives."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            storage.lock(descriptor)
            if not os.path.samestat(os.fstat(descriptor), folder.stat()):
                raise FileNotFoundError  # its owner renamed or removed it just now
        except (BlockingIOError, FileNotFoundError) as error:
            text = f"{folder} is being written by another process: wait for its end"
            raise UserError(text) from error
        yield


@contextlib.contextmanager
def _renamed(
    unfinished: Path, path: Path, keeps: Callable[[Path], object] = lambda _: False
) -> Iterator[None]:
    """Renames `unfinished` to `path` at the end; removes it after an error, unless it is kept."""
    try:
        yield
        _flush(unfinished, *unfinished.rglob("*"))
        unfinished.replace(path)
        _flush(path.parent)
        with contextlib.ExitStack() as stack:
            stack.callback(path.replace, unfinished)
            storage.publish(path)
            stack.pop_all()
    finally:
        if unfinished.is_file():
            unfinished.unlink()
        elif unfinished.is_dir() and not keeps(unfinished):
            shutil.rmtree(unfinished, ignore_errors=True)
        elif unfinished.is_dir():
            logging.warning("%s is kept: the same command continues it", unfinished)


def _flush(*paths: Path) -> None:
    """Waits until files and folders are on disk. Some filesystems cannot flush a folder."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            if not path.is_dir():
                raise
        finally:
            os.close(descriptor)


def sha256(path: Path) -> str:
    """The digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def difference(path: Path, num_bytes: int | None = None, digest: str | None = None) -> str | None:
    """The first mismatch of a file with a size and a sha256 (None: not checked), if any."""
    try:
        size = path.stat().st_size
        if num_bytes is not None and size != num_bytes:
            return f"{size} bytes instead of {num_bytes}"
        return None if digest is None or sha256(path) == digest else "its content changed"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object (or list) in a file of at most `MAX_JSON_BYTES`; otherwise a `DataError`."""
    return parse_json(_content(path), path, kind)


def read_text(path: Path) -> str:
    """The UTF-8 text of a file of at most `MAX_JSON_BYTES`; otherwise a `DataError`."""
    try:
        return decoded(_content(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; copy it again") from error


def decoded(data: bytes) -> str:
    """The text of UTF-8 `data` without the mark of its encoding. Documents alone are not read so:
    they are their bytes. Raises `UnicodeDecodeError`."""
    return data.decode("utf-8-sig")


def is_file_name(name: Any) -> bool:
    """Whether a value out of a file, a manifest or an index, names a file in its folder."""
    is_text = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) < 256
    return is_text and name[0] != "." and Path(name).name == name


def reach_of_links(folder: Path) -> Path:
    """Where the links in a folder may lead: to itself, and of the Hugging Face cache from a folder
    in `snapshots` to the `blobs` beside it."""
    inside = folder.resolve()
    caches = (x.parent for x in (inside, *inside.parents) if x.name == "snapshots")
    return next((cache for cache in caches if (cache / "blobs").is_dir()), inside)


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, in the folder of the index that says so."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index} has no weight_map of tensor names to files")
    for name, shard in weight_map.items():
        if not is_file_name(shard) or not shard.endswith(".safetensors"):
            raise DataError(f"{index}: tensor {name!r} in {shard!r}, which is no plain file name")
    return weight_map


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; `DataError` for damage, other content, and more than 2 GiB."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _MOST_ARRAY_BYTES:
            raise ValueError(f"{size} bytes of arrays, at most {_MOST_ARRAY_BYTES} are read")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: np.asarray(arrays[name][...]) for name in arrays.files}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except _ARRAY_DAMAGE as error:
        raise DataError(f"{path} is no intact npz file ({error})") from error


def _content(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise DataError(f"{path} is no regular file")
        if size > MAX_JSON_BYTES:
            raise DataError(f"{path} has {size} bytes, at most {MAX_JSON_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parse_json(data: bytes, path: Path, kind: type = dict) -> Any:
    """The JSON object (or list) in `data`, the UTF-8 content of `path`, with unique names, finite
    numbers and Unicode texts; otherwise a `DataError`."""
    try:
        if sum(map(data.count, (b"{", b"[", b","))) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES:,} values")
        hooks: Any = dict.fromkeys(("parse_constant", "parse_int", "parse_float"), _number)
        value = json.loads(decoded(data), object_pairs_hook=_unique, **hooks)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise DataError(f"the JSON of {path} is nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, kind):
        wanted = {dict: "an object", list: "a list"}[kind]
        raise DataError(f"the JSON of {path} is a {type(value).__name__}, not {wanted}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(result := dict(pairs)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice")
    return result


def _number(text: str) -> int | float:
    is_integer = text.lstrip("-").isdecimal()
    if not math.isfinite(value := float(text)):
        text = f"an integer of {len(text)} digits" if is_integer else text
        raise ValueError(f"{text} is not a JSON number")
    return int(text) if is_integer else value
