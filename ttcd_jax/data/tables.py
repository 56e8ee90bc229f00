"""One column of a table: Parquet and Arrow files, and folders as `datasets` saves them.

Arrow files are memory-mapped, streams (the Hugging Face cache) and IPC files alike. A saved folder
is its `state.json`, which lists the files of its rows. Columns hold texts or lists of token ids.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttcd_jax.data.compressed import bytes_read, import_for, unpacked
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import is_file_name, read_json

STATE = "state.json"

_PARQUET_ROWS = 256  # in memory at once
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_INDICES = "_indices_data_files"
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")


def read_values(path: Path, column: str) -> Iterator[Any]:
    """The values of `column`, row by row: lists of integers as arrays [T], texts as `str`, null as
    None. Raises `DataError` for a damaged file, and for a column that is absent."""
    if path.name == STATE:
        for file in _data_files(path):
            yield from read_values(file, column)
        return
    pyarrow, is_parquet = import_for(path, "pyarrow"), path.suffix == ".parquet"
    try:
        for values in (_parquet if is_parquet else _arrow)(path, column):
            values.validate(full=True)
            kind, types = values.type, pyarrow.types
            is_list = types.is_list(kind) or types.is_large_list(kind)
            if (is_list or types.is_fixed_size_list(kind)) and types.is_integer(kind.value_type):
                empty = pyarrow.array([], kind.value_type)
                yield from ((row.values if row.is_valid else empty).to_numpy() for row in values)
            else:
                yield from (value.as_py() for value in values)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        kind = "Parquet" if is_parquet else "Arrow"
        raise DataError(f"{path} is no intact {kind} file ({error}); copy it again") from error


def check_one_split(folder: Path) -> None:
    """Raises `UserError` if `datasets` wrote several splits below `folder`, unless they are folders
    `train` and `validation`, or wrote intermediate results beside the rows."""
    for path in folder.rglob("dataset_dict.json"):
        splits = read_json(path).get("splits")
        if not isinstance(splits, list) or not {*map(str, splits)} <= {"train", "validation"}:
            raise UserError(f"{path} lists the splits {splits}: give the folder of one of them")
    for path in folder.rglob("dataset_info.json"):
        names = sorted({_NUMBER.sub("", file.stem) for file in path.parent.glob("*.arrow")})
        if len(names) > 1 and not path.with_name(STATE).exists():
            globs = ", ".join(f"**/{name}*.arrow" for name in names)
            raise UserError(f"{path.parent} holds several tables: choose one by --glob ({globs})")


def _parquet(path: Path, column: str) -> Iterator[Any]:
    parquet = import_for(path, "pyarrow.parquet")
    with unpacked(path) as content, parquet.ParquetFile(content) as file:
        _position(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(_PARQUET_ROWS, columns=[column]):
            yield batch.column(0)


def _arrow(path: Path, column: str) -> Iterator[Any]:
    pyarrow = import_for(path, "pyarrow")
    with pyarrow.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(max(0, file.size() - len(_END_OF_STREAM)))
            if file.read() != _END_OF_STREAM:
                raise DataError(f"{path} is no intact Arrow file (it has no end); copy it again")
            file.seek(0)
            batches = reader = pyarrow.ipc.open_stream(file)
        position = _position(path, column, reader.schema.names)
        for batch in batches:
            bytes_read(batch.nbytes)
            yield batch.column(position)


def _position(path: Path, column: str, names: list[str]) -> int:
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}; pass --field (there: {', '.join(names)})"
        )
    return names.index(column)


def _data_files(path: Path) -> list[Path]:
    state = read_json(path)
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        if all(map(is_file_name, names)) and not state.get(_INDICES):
            return [path.parent / name for name in names]
        problem = "lists files elsewhere, or chosen rows of them"
    except (LookupError, TypeError) as error:
        problem = f"lists no files ({error!r})"
    raise DataError(f"{path} {problem}; save it again")
