"""Files of documents, written by hand from the descriptions of their formats."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import ipc, parquet

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.records import MANIFEST, prepare_records, sealed
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.files import sha256


def text_folder(folder: Path, texts: Sequence[str] | dict[str, str], **options) -> CorpusConfig:
    """A corpus of a .txt file for each text, by its name or its number."""
    folder.mkdir(parents=True, exist_ok=True)
    named = texts if isinstance(texts, dict) else {f"{i:02}": text for i, text in enumerate(texts)}
    for name, text in named.items():
        (folder / f"{name}.txt").write_text(text)
    return CorpusConfig(kind="text", path=str(folder), **options)


def text_file(path: Path, **options) -> CorpusConfig:
    """All documents of a file, to train on."""
    return CorpusConfig(kind="text", path=str(path), validation_percent=0, **options)


def json_lines(texts: Sequence[str | None], **others) -> bytes:
    return "".join(json.dumps(others | {"text": text}) + "\n" for text in texts).encode()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def records(corpus: CorpusConfig, folder: Path, **options) -> dict:
    """The manifest of new records of bytes."""
    folder.mkdir(parents=True)
    return prepare_records(corpus, TokenizerConfig(), folder, **options)


def reseal(folder: Path, **changes) -> None:
    """The manifest gets `changes`, the digests of the files and its own, as if it were hostile."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if isinstance(manifest, dict):
        manifest |= changes
        listed = manifest.get("files")
        for name, entry in listed.items() if isinstance(listed, dict) else ():
            if isinstance(entry, dict) and (folder / name[:99]).is_file():
                entry["sha256"] = sha256(folder / name)
        manifest = sealed({name: x for name, x in manifest.items() if name != "sha256"})
    (folder / MANIFEST).write_text(json.dumps(manifest))


def table(path: Path, columns, rows: int | None = None, form: str = "stream") -> Path:
    """A Parquet file, or an Arrow file in the `form` of a stream or a file, `rows` at a time."""
    columns = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(columns, path, row_group_size=rows)
    else:
        with getattr(ipc, f"new_{form}")(str(path), columns.schema) as file:
            file.write_table(columns, max_chunksize=rows)
    return path


def mds_array(ids, dtype: str = "<u4") -> bytes:
    """A value of an MDS column of arrays."""
    width = 0 if len(ids) < 2**8 else 1 if len(ids) < 2**16 else 2
    head = struct.pack("<B" + "BHI"[width], 1 << 2 | width, len(ids))
    return head + np.array(ids, dtype).tobytes()


def _mds_shard(columns: dict) -> bytes:
    _, widths, columns = zip(*columns.values(), strict=True)
    samples = []
    for values in zip(*columns, strict=True):
        sizes = [len(x) for x, width in zip(values, widths, strict=True) if not width]
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
    config = b'{"some": "json"}'
    start = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = np.cumsum([start, *map(len, samples)]).astype("<u4").tobytes()
    return struct.pack("<I", len(samples)) + offsets + config + b"".join(samples)


def mds(
    folder: Path, columns: dict, pack: Callable | None = None, num_shards: int = 2, **changes
) -> Path:
    """An index and its equal shards of `columns`: (encoding, size of a value if all have the same,
    values). `changes` replace parts of an entry of the index."""
    folder.mkdir(parents=True, exist_ok=True)
    data, entries = _mds_shard(columns), []
    encodings, sizes, values = zip(*columns.values(), strict=True)
    for number in range(num_shards):
        name = f"shard.0000{number}.mds"
        entry = {"format": "mds", "version": 2, "samples": len(values[0]), "compression": None}
        entry |= {"column_names": [*columns], "column_encodings": encodings}
        entry |= {"raw_data": {"basename": name, "bytes": len(data), "hashes": {}}}
        entry |= {"column_sizes": sizes, "zip_data": None}
        if pack is None:
            (folder / name).write_bytes(data)
        else:
            (folder / f"{name}.zstd").write_bytes(pack(data))
            entry |= {"compression": "zstd:7", "zip_data": {"basename": f"{name}.zstd"}}
        entries.append(entry | changes)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder / "index.json"


MEGATRON_TYPES = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def megatron(
    folder: Path,
    dtype: str = "<u2",
    sequences: Sequence = ((1, 2, 3), (), (4,), (5, 6)),
    starts: Sequence = (0, 2, 2, 4),
    **changes,
) -> Path:
    """An index of sequences and of the documents that begin at `starts`, and its ids; `changes`
    replace parts of the index."""
    sizes = np.array([len(ids) for ids in sequences], "<i4")
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": MEGATRON_TYPES[dtype], "sizes": sizes}
    parts |= {"offsets": (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize}
    parts |= {"starts": starts} | changes
    counts = parts.get("counts", (len(parts["sizes"]), len(parts["starts"])))
    header = struct.pack("<9sQBQQ", parts["magic"], parts["version"], parts["code"], *counts)
    types = {"sizes": "<i4", "offsets": "<i8", "starts": "<i8"}
    arrays = [np.asarray(parts[name], dtype).tobytes() for name, dtype in types.items()]
    (folder / "a.idx").write_bytes(header + b"".join(arrays))
    np.concatenate([np.array(ids, dtype) for ids in sequences]).tofile(folder / "a.bin")
    return folder / "a.idx"
