"""Files that need an optional library: its import, and zstandard decompression."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttcd_jax.errors import DataError, UserError

_CHUNK_BYTES = 2**20
_LARGEST_WINDOW = 2**31  # `zstd --long=31`, which the library refuses by default


def import_for(path: Path, library: str) -> Any:
    """The optional module `library`, which `path` needs. Raises `UserError` if it is absent."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        package = library.split(".")[0]
        raise UserError(
            f"{path} cannot be read without {package}: pip install {package}"
        ) from error


def decompressed(path: Path) -> Iterator[bytes]:
    """The content of a zstandard file, of one frame or several, in pieces.

    Raises `DataError` for a file that is damaged or ends early, `UserError` without zstandard.
    """
    zstandard = import_for(path, "zstandard")
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    frame = decompressor.decompressobj()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                while chunk:
                    if frame.eof:
                        frame = decompressor.decompressobj()
                    yield frame.decompress(chunk)
                    chunk = frame.unused_data
    except zstandard.ZstdError as error:
        raise DataError(f"{path} is no intact zstandard file ({error}); copy it again") from error
    if not frame.eof:
        raise DataError(f"{path} ends in the middle of its data; copy it again")
