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
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from absl import logging

from ttcd_jax.errors import UserError

SCHEMES = {"gs": "gcs", "s3": "s3"}  # and the drivers of TensorStore
UNFINISHED = ".unfinished"
RETRIES: dict[str, Any] = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}
LEASE_SECONDS = 60.0

_ADDRESS = re.compile("(?s)(gs|s3)://?(.*)")  # `Path` makes one slash of two
_CONNECTIONS = 4  # each holds a file of up to 2 GiB in memory
_LIMITS = {"CONNECT_TIMEOUT_SECONDS": 15, "LOW_SPEED_TIME_SECONDS": 30, "LOW_SPEED_LIMIT_BYTES": 1}
_RACE_SECONDS = 0.5
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_GROWING = ("metrics.jsonl", "tensorboard", "profile", "wandb")  # in a run directory


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
    if len(parts) < 2 or any(part[0] == "." for part in parts):
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


def fetch(
    path: Path,
    wanted: Callable[[str], object] = lambda name: True,
    target: Callable[[Path], Path] = lambda file: file,
) -> Path:
    """Brings the copy of a file or a folder up to date, with those of its files whose name in it is
    `wanted`, each at its `target`, and returns `path`. Changes here of what is unchanged there
    stay."""
    if address(path) is None:
        return path
    found = names(path)
    if UNFINISHED in found:
        raise OSError(errno.EIO, "its writer was killed, or writes yet: write it again", str(path))
    busy = root() / ".locks" / str(path.absolute()).replace("/", "%")[-200:]
    busy.parent.mkdir(parents=True, exist_ok=True)
    with busy.open("a") as handle:  # of the processes of this machine one downloads
        lock(handle, fcntl.LOCK_EX)
        records = (x.relative_to(_record(path)) for x in _record(path).rglob("*") if x.is_file())
        known = {*found, *map(Path.as_posix, records)}
        files = [path / name for name in known if wanted(name)] if known else [path]
        _all(lambda file: _download(file, target(file)), files)
    return path


def lock(file: int | IO[Any], kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> None:
    """Locks an open file or folder until it is closed; `BlockingIOError` for one that is locked. A
    file system without locks, such as Lustre mounted without them, is a warning, once."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        text = "no file is locked here (%s): start no two processes on the same folder"
        logging.log_first_n(logging.WARNING, text, 1, error.strerror)


def names(path: Path) -> list[str]:
    """The objects below a folder in a bucket, by their names in it."""
    found = map(bytes.decode, _ask(path, lambda store, key: (store / f"{key}/").list()))
    return [name for name in found if name == UNFINISHED or address(path / name)]


def push(*paths: Path, target: Callable[[Path], Path] = lambda file: file) -> None:
    """Uploads files, and those in folders, each to the address of its `target`. Nothing happens to
    hidden files and in no bucket."""
    files = [file for path in paths if address(path) for file in (path, *path.rglob("*"))]
    files = [file for file in files if file.is_file() and address(file)]
    _all(lambda file: _upload(file, target(file)), files)


def publish(path: Path) -> None:
    """Uploads a new file, or a new folder that `fetch` refuses until it is complete."""
    if address(path) is None or path.is_file():
        push(path)
        return
    _put(path / UNFINISHED, b"")
    push(path)
    for name in names(path):  # of an earlier writer
        if name != UNFINISHED and not (path / name).is_file():
            remove(path / name)
    _put(path / UNFINISHED, None)


def remove(path: Path) -> None:
    """Deletes the object, or all objects below the folder, in the bucket."""
    for file in [path / name for name in sorted(names(path))] or [path]:  # `DIGEST.json` is first
        _put(file, None)
        if _record(file).is_file():  # not the folder of those of a step that is gone
            _record(file).unlink()


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Holds the run directory of a bucket by its object `lock`, under the lock of the copy; nothing
    for a path in no bucket. Raises `UserError` for one that another holds. A killed holder holds it
    until `LEASE_SECONDS` have passed without a sign of life."""
    if address(folder) is None:
        yield
        return
    held = _leases[folder] = _Lease(folder)
    try:
        yield
    finally:
        try:
            push_held(folder)
        except OSError as error:
            logging.warning("%s: not uploaded: %s", error.filename, error.strerror)
        _leases.pop(folder, None)
        held.end()


def push_held(folder: Path) -> None:
    """Uploads the files that grow in the run directory that this process holds, if any. Raises
    `OSError` if another one has taken it."""
    if folder in _leases:
        _leases[folder].renew()
        push(*(folder / name for name in _GROWING))


class _Lease:
    def __init__(self, folder: Path) -> None:
        self._text = f"process {os.getpid()} on {socket.gethostname()}\n{uuid.uuid4().hex}\n"
        self._path = folder / "lock"
        self._busy, self._is_over = threading.Lock(), threading.Event()
        self._generation = self._free()
        self.renew()
        if folder.relative_to(root()).parts[0] == "s3":  # it compares, then it writes
            time.sleep(_RACE_SECONDS)
            self.renew()
        threading.Thread(target=self._keep, daemon=True).start()

    def renew(self) -> None:
        """Writes the lock again. Raises `OSError` if it is another's."""
        with self._busy:
            text = f"{self._text}{uuid.uuid4().hex}\n"  # the generation of S3 is a digest
            stamp = _put(self._path, text, if_equal=self._generation)
            if not stamp.generation:
                found = _get(self._path)  # ours, if the answer to a write was lost
                if not found.value.startswith(self._text.encode()):
                    text = f"{_owner(found)} has taken the run: end one of the two"
                    raise OSError(errno.EBUSY, text, str(self._path.parent))
                stamp = found.stamp
            self._generation = stamp.generation

    def end(self) -> None:
        self._is_over.set()
        with self._busy, contextlib.suppress(OSError):
            _put(self._path, None, if_equal=self._generation)

    def _free(self) -> bytes:
        """The generation of the lock once it is free."""
        found, end = _get(self._path), time.monotonic() + LEASE_SECONDS
        generation, where, owner = found.stamp.generation, self._path.parent, _owner(found)
        if found.state == "value":
            text = "%s: waiting %.0f seconds for a sign of life of %s"
            logging.warning(text, where, LEASE_SECONDS, owner)
        while found.state != "missing" and time.monotonic() < end:
            time.sleep(LEASE_SECONDS / 60)
            found = _get(self._path, generation)
            if found.state == "value":
                text = f"{where} is in use by {owner}: wait for it, or choose another --run_dir"
                raise UserError(text)
        return found.stamp.generation

    def _keep(self) -> None:
        while not self._is_over.wait(LEASE_SECONDS / 4):
            with contextlib.suppress(OSError):  # the next save reports it
                self.renew()


def _owner(found: Any) -> str:
    return found.value.decode(errors="replace").partition("\n")[0] or "somebody"


_leases: dict[Path, _Lease] = {}


@functools.cache
def _bucket(scheme: str, name: str) -> Any:
    for variable, value in _LIMITS.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_{variable}", str(value))
    from tensorstore import KvStore

    driver = SCHEMES[scheme]
    spec: dict[str, Any] = {"driver": driver, "bucket": name}
    spec["context"] = {f"{driver}_request_retries": RETRIES}
    if scheme == "s3":
        if "AWS_ACCESS_KEY_ID" in os.environ:  # the search for others logs what it does not find
            spec["aws_credentials"] = {"type": "environment"}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            spec |= {"endpoint": endpoint, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
    return KvStore.open(spec).result()


def _ask(path: Path, call: Callable[[Any, str], Any]) -> Any:
    """What TensorStore answers to `call(store, key)`; its failures, `ValueError`s, as `OSError`."""
    scheme, bucket, *parts = path.absolute().relative_to(root()).parts
    try:
        return call(_bucket(scheme, bucket), "/".join(parts)).result()
    except ValueError as error:
        remedy = "check the address, the network and the credentials, and run the command again"
        reason = re.sub(r" \[http_response_body='.*?'\]", "", str(error), flags=re.DOTALL)[:300]
        raise OSError(errno.EIO, f"{reason}; {remedy}", str(path)) from error


def _get(file: Path, generation: bytes = b"") -> Any:
    """The object, unless it is of this generation."""
    return _ask(file, lambda store, key: store.read(key, if_not_equal=generation))


def _put(file: Path, content: bytes | str | None, **condition: bytes) -> Any:
    """The new generation, empty where the condition does not hold; None deletes the object."""
    return _ask(file, lambda store, key: store.write(key, content, **condition))


def _download(file: Path, target: Path) -> None:
    is_known = target.is_file() and _record(file).is_file()
    found = _get(file, _record(file).read_bytes() if is_known else b"")
    if found.state == "value":
        _write(target, found.value)
        _write(_record(file), found.stamp.generation)
    for gone in (target, _record(file)) if found.state == "missing" else ():
        if gone.is_file():
            gone.unlink()


def _upload(file: Path, target: Path) -> None:
    _write(_record(target), _put(target, file.read_bytes()).generation)


def _all(transfer: Callable[[Path], None], files: Iterable[Path]) -> None:
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(transfer, files))


def _record(path: Path) -> Path:
    """Where the generation is that a file had when it was last fetched or pushed."""
    return root() / ".generations" / path.absolute().relative_to(root())


def _write(file: Path, content: bytes) -> None:
    # Not beside it: what a killed process leaves would be a file too many of a checkpoint.
    unfinished = root() / ".transfers" / uuid.uuid4().hex
    for folder in (unfinished.parent, file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    unfinished.write_bytes(content)
    unfinished.replace(file)
