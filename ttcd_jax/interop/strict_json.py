"""JSON out of files that others wrote: whole, small enough, every name once, or a `DataError`."""

import json
from pathlib import Path
from typing import Any, NoReturn

from ttcd_jax.errors import DataError

MAX_BYTES = 100_000_000  # as in the safetensors library


def read_json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file of at most `MAX_BYTES`."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"{path} has {size} bytes, JSON may have {MAX_BYTES}")
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that `data`, out of the file `path`, spells in UTF-8."""
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise DataError(f"the JSON of {path} is nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{path} holds no usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"the JSON of {path} is a {type(value).__name__}, not an object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} is there twice")
        result[name] = value
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
