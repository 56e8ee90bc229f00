"""Files as streams, decompressed while they are read (gzip, zstandard), and the import of optional
libraries."""

import contextlib
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttcd_jax.errors import DataError, UserError

MAX_BYTES = 2**28  # of one document, line or MDS shard, unpacked: memory is in proportion to it

_PIECE = 2**10  # of zstandard data, which unpack to 2^15 times as much at most
_LARGEST_WINDOW = 2**31  # `zstd --long=31`, which the library refuses by default


def import_for(path: Path | str, library: str) -> Any:
    """The optional module `library`, which `path` needs. Raises `UserError` if it is absent."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        package = library.split(".")[0]
        raise UserError(
            f"{path} cannot be read without {package}: pip install {package}"
        ) from error


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[io.BufferedIOBase]:
    """The content of a file as a stream, which unpacks .gz, .zst and .zstd. Raises `DataError` for
    packed data that are damaged or cut, `UserError` without zstandard."""
    zstandard = import_for(path, "zstandard") if path.suffix in (".zst", ".zstd") else None
    damage = (EOFError, zlib.error, gzip.BadGzipFile, getattr(zstandard, "ZstdError", EOFError))
    try:
        with io.BufferedReader(_Counted(path), 2**17) as file:
            if path.suffix == ".gz" and not file.peek(1):
                raise EOFError("it is empty")
            if zstandard is not None:
                yield io.BufferedReader(_Zstandard(zstandard, file), 2**17)
            else:
                yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    except damage as error:
        kind = path.suffix.lstrip(".")
        raise DataError(f"{path} is no intact {kind} file ({error}); copy it again") from error


def bytes_read(more: int = 0) -> int:
    """Packed bytes that this process has read from files, with `more` of a memory-mapped one."""
    _Counted.num_bytes += more
    return _Counted.num_bytes


class _Counted(io.FileIO):
    num_bytes = 0

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        bytes_read(size)
        return size


class _Zstandard(io.RawIOBase):
    """The content of zstandard frames, one after another; `EOFError` if the last one is cut."""

    def __init__(self, library: Any, file: io.BufferedIOBase) -> None:
        self._start = library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj
        self._file, self._frame, self._content = file, self._start(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            piece = self._frame.unused_data or self._file.read(_PIECE)
            if not piece:
                if self._frame.eof:
                    return 0
                raise EOFError("it ends in the middle of its data")
            if self._frame.eof:
                self._frame = self._start()
            self._content = memoryview(self._frame.decompress(piece))
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size
