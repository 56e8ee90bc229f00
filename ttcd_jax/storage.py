"""Buckets, `s3://...` and `gs://...`, through copies on a disk of this machine.

What is in a bucket has a path below `root()`, which all of the library reads and writes as any
other: `fetch` downloads what changed in the bucket, `push` uploads what changed here. An object
appears whole or not at all; a folder is complete when it has no object `.unfinished`. TensorStore
transfers, so that credentials come from the environment. A server that fails is asked again for
about a minute, one that is silent for five; then `OSError` has the address and the reason.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import logging

from ttcd_jax.errors import UserError

SCHEMES = {"gs": "gcs", "s3": "s3"}  # and the drivers of TensorStore
UNFINISHED = ".unfinished"
RETRIES: dict[str, Any] = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}
LEASE_SECONDS = 60.0
_RACE_SECONDS = 0.5

_ADDRESS = re.compile("(gs|s3)://?(.*)")  # `Path` makes one slash of two
_CONNECTIONS = 4  # each holds a file of up to 2 GiB in memory
_LIMITS = {  # of a server that is silent
    "CONNECT_TIMEOUT_SECONDS": "15",
    "LOW_SPEED_TIME_SECONDS": "30",
    "LOW_SPEED_LIMIT_BYTES": "1",
}
_REMEDY = "check the address, the network and the credentials, and run the command again"
_RECORDS = ".generations"  # below the root: of every file the generation, size and time it had


def user_cache() -> Path:
    """`ttcd_jax` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ttcd_jax"


def root() -> Path:
    """The folder of the copies: TTCD_JAX_BUCKETS, else `buckets` in the user's cache."""
    return Path(os.environ.get("TTCD_JAX_BUCKETS") or user_cache() / "buckets").absolute()


def to_path(text: str | os.PathLike[str]) -> Path:
    """The path of a file or folder: of the copy if `text` is an address in a bucket."""
    if (match := _ADDRESS.fullmatch(os.fspath(text))) is None:
        return Path(text)
    parts = [part for part in match[2].split("/") if part]
    if not parts or any(part[0] == "." for part in parts):
        raise UserError(
            f"{os.fspath(text)!r} is no address of ours in a bucket: write {match[1]}://BUCKET/NAME"
            ", no part of which begins with a dot"
        )
    return Path(root(), match[1], *parts)


def address(path: Path) -> str | None:
    """The address of a copy; None for a path in no bucket, and for hidden files in a copy."""
    if not (path := path.absolute()).is_relative_to(root()):
        return None
    scheme, *parts = path.relative_to(root()).parts or ("",)
    is_object = scheme in SCHEMES and parts and all(part[0] != "." for part in parts)
    return f"{scheme}://{'/'.join(parts)}" if is_object else None


def shown(path: Path) -> str:
    """The path for a reader: the address, if it has one."""
    return address(path) or str(path.absolute())


def copy_of(text: str | os.PathLike[str]) -> Path:
    """`to_path`, where a copy is up to date."""
    return fetch(to_path(text))


def fetch(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Path:
    """Brings the copy of a file or a folder up to date, with those of its files whose name in it is
    `wanted`, and returns `path`. Changes here of what is unchanged there stay."""
    if address(path) is None:
        return path
    found = names(path)
    if UNFINISHED in found:
        raise OSError(
            errno.EIO, "its writer was killed, or is writing yet: write it again", shown(path)
        )
    with _alone(path):
        records = (x.relative_to(_record(path)) for x in _record(path).rglob("*") if x.is_file())
        known = {*found, *map(Path.as_posix, records)}
        _all(_download, [path / name for name in known if wanted(name)] if known else [path])
    return path


def names(path: Path) -> list[str]:
    """The objects below a folder in a bucket, by their names in it."""
    from tensorstore import KvStore

    with _reporting(path):
        store, key = _located(path)
        below = KvStore.KeyRange(f"{key}/", f"{key}0") if key else KvStore.KeyRange()
        listed = store.list(below).result()
    found = [name.decode()[len(f"{key}/") if key else 0 :] for name in listed]
    return [name for name in found if name == UNFINISHED or address(path / name)]


def push(path: Path, without: Iterable[str] = ()) -> None:
    """Uploads the file, or the files of the folder, that were changed here, hidden ones and those
    below the names `without` excepted. Nothing happens to a path in no bucket."""
    if address(path) is not None:
        files = [path] if path.is_file() else [x for x in path.rglob("*") if x.is_file()]
        left_out = [path / name for name in without]
        files = [x for x in files if address(x) and not any(map(x.is_relative_to, left_out))]
        _all(_upload, files)


def publish(path: Path) -> None:
    """Uploads a new file, or a new folder that `fetch` refuses until it is complete."""
    if address(path) is None or path.is_file():
        push(path)
        return
    store, key = _located(path / UNFINISHED)
    with _reporting(path):
        store.write(key, b"").result()
    push(path)
    for name in names(path):  # of an earlier writer
        if name != UNFINISHED and not (path / name).is_file():
            remove(path / name)
    with _reporting(path):
        store.write(key, None).result()


def remove(path: Path) -> None:
    """Deletes the object, or all objects below the folder, in the bucket."""
    for file in [path / name for name in names(path)] or [path]:
        store, key = _located(file)
        with _reporting(path):
            store.write(key, None).result()
        _record(file).unlink(missing_ok=True)


def is_pushed(file: Path) -> bool:
    """Whether the bucket had this file when it was last fetched or pushed; of a path in no bucket
    whether it is there."""
    return (file if address(file) is None else _record(file)).is_file()


def is_free(path: Path) -> bool:
    """Whether nothing complete is at an address."""
    found = names(path)
    with _reporting(path):
        store, key = _located(path)
        is_object = store.read(key).result().state == "value"
    return not is_object and (not found or UNFINISHED in found)


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Holds a folder of a bucket by its object `lock`, under the lock of the copy; nothing for a
    path in no bucket. `BlockingIOError` names another holder. One that is killed holds it until
    `LEASE_SECONDS` have passed without a sign of life, or until it is started again here."""
    if address(folder) is None:
        yield
        return
    held = _leases[folder] = _Lease(folder)
    try:
        yield
    finally:
        del _leases[folder]
        held.end()


def check_lease(folder: Path) -> None:
    """Raises `OSError` if another process has taken the folder that this one holds."""
    if folder in _leases:
        _leases[folder].renew()


class _Lease:
    def __init__(self, folder: Path) -> None:
        self._path, self._turn, self._is_over = folder / "lock", 0, threading.Event()
        self._store, self._key = _located(self._path)
        self._owner = {"owner": f"process {os.getpid()} on {socket.gethostname()}"}
        self._owner |= {"disk": _disk(), "id": uuid.uuid4().hex}
        self._busy = threading.Lock()
        with _reporting(self._path):
            self._generation = self._free()
        self.renew()
        if shown(folder).startswith("s3"):  # it compares generations before it writes
            time.sleep(_RACE_SECONDS)
            self.renew()
        threading.Thread(target=self._keep, daemon=True).start()

    def renew(self) -> None:
        """Writes the lock again. Raises `OSError` if it is another's."""
        with self._busy, _reporting(self._path):
            self._turn += 1  # the generation of S3 is a digest
            text = json.dumps(self._owner | {"turn": self._turn})
            stamp = self._store.write(self._key, text, if_equal=self._generation).result()
            if not stamp.generation:
                self._check(self._store.read(self._key).result().value)
            self._generation = stamp.generation

    def end(self) -> None:
        self._is_over.set()
        with self._busy, contextlib.suppress(OSError), _reporting(self._path):
            self._store.write(self._key, None, if_equal=self._generation).result()

    def _free(self) -> bytes:
        """The generation of the lock once it is free."""
        found = self._store.read(self._key).result()
        if found.state == "value" and _owner(found.value).get("disk") != _disk():
            owner = _owner(found.value).get("owner")
            logging.warning("%s: is %s alive? a minute tells", shown(self._path), owner)
            end = time.monotonic() + LEASE_SECONDS
            while time.monotonic() < end:
                time.sleep(1)
                now = self._store.read(self._key, if_not_equal=found.stamp.generation).result()
                if now.state == "value":
                    raise BlockingIOError(errno.EAGAIN, owner)
                if now.state == "missing":
                    return now.stamp.generation
        return found.stamp.generation

    def _check(self, content: bytes) -> None:
        if _owner(content).get("id") != self._owner["id"]:
            other = _owner(content).get("owner", "another process")
            text = f"{other} has taken the run: end one of the two"
            raise OSError(errno.EBUSY, text, shown(self._path.parent))

    def _keep(self) -> None:
        while not self._is_over.wait(LEASE_SECONDS / 4):
            with contextlib.suppress(OSError):  # the next save reports it
                self.renew()


_leases: dict[Path, _Lease] = {}


def _owner(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(content), dict):
            return found
    return {}


def _disk() -> list[Any]:
    """What tells the disk of the copies from others: its locks say that a holder here is dead."""
    root().mkdir(parents=True, exist_ok=True)
    return [socket.gethostname(), uuid.getnode(), root().stat().st_ino]


@functools.cache
def _bucket(scheme: str, name: str) -> Any:
    for variable, value in _LIMITS.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_{variable}", value)
    from tensorstore import KvStore

    driver, spec = SCHEMES[scheme], {"bucket": name}
    if scheme == "s3":
        if "AWS_ACCESS_KEY_ID" in os.environ:  # the search for others logs what it does not find
            spec["aws_credentials"] = {"type": "environment"}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            spec |= {"endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
    context = {f"{driver}_request_retries": RETRIES}
    return KvStore.open({"driver": driver, "context": context} | spec).result()


def _located(path: Path) -> tuple[Any, str]:
    """(store, key) of a copy."""
    scheme, bucket, *parts = path.absolute().relative_to(root()).parts
    return _bucket(scheme, bucket), "/".join(parts)


def _download(file: Path) -> None:
    """The object, unless the bucket has what the copy was made of."""
    (store, key), generation = _located(file), _recorded(file)[0] if file.is_file() else ""
    with _reporting(file):
        found = store.read(key, if_not_equal=bytes.fromhex(generation)).result()
    if found.state == "value":
        _write(file, found.value)
        _note(file, found.stamp, _stamp(file))
    for gone in (file, _record(file)) if found.state == "missing" else ():
        if gone.is_file():
            gone.unlink()


def _upload(file: Path) -> None:
    """The file, unless it is as it was when it was last transferred."""
    if (stamp := _stamp(file)) != _recorded(file)[1:]:
        store, key = _located(file)
        with _reporting(file):
            written = store.write(key, file.read_bytes()).result()
        _note(file, written, stamp)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """The processes of this machine fetch a path one after the other."""
    file = root() / ".locks" / str(path.absolute()).replace("/", "%")[-200:]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _all(transfer: Callable[[Path], None], files: Iterable[Path]) -> None:
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(transfer, files))


def _record(path: Path) -> Path:
    return root() / _RECORDS / path.absolute().relative_to(root())


def _recorded(file: Path) -> list[Any]:
    """Generation, size and time of a file when it was last as in the bucket."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_record(file).read_bytes())
    return ["", 0, 0]


def _note(file: Path, generation: Any, stamp: list[int]) -> None:
    _write(_record(file), json.dumps([generation.generation.hex(), *stamp]).encode())


def _stamp(file: Path) -> list[int]:
    return [(found := file.stat()).st_size, found.st_mtime_ns]


def _write(file: Path, content: bytes) -> None:
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(content)
    unfinished.replace(file)


@contextlib.contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Failures of TensorStore, which are all `ValueError`s, as `OSError`."""
    try:
        yield
    except ValueError as error:
        reason = str(error).splitlines()[0][:300]
        raise OSError(errno.EIO, f"{reason}; {_REMEDY}", shown(path)) from error
