"""Files that are damaged at random, one after another: they read as something, or a `UserError`
names them."""

import copy
import functools
import gzip
import importlib
import json
import random
import re
import resource
import struct

import numpy as np
import pytest

from ttcd_jax.data.corpus import CorpusConfig, stream_documents
from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.records import MANIFEST, open_records, sealed, verify_records
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import UserError

TEXTS = ["one", "", "größe 日本", "x" * 300, None, "last \x00 \u2028"]
VALUES = [None, True, -1, 0, 2**70, 1e308, "", "x", "..", "../x", "a\x00b", "n" * 300, "\ud800"]
VALUES += [[], {}, [[]], {"a": {}}, ["x"], [None]]
BYTES = [
    b"\x00",
    b"\xff",
    b"\xff\xff\xff\xff",
    b'"',
    b"[" * 2000,
    b"{",
    b"\n",
    b"1e999",
    b"\\ud800",
]


def _damaged(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(data) + 1)
        stop = min(len(data), start + chance.choice([0, 1, 1, 4, 40]))
        parts = [b"", bytes([chance.randrange(256)]), data[start:stop] * 2, chance.choice(BYTES)]
        data = data[:start] + chance.choice(parts) + data[stop:]
    return data


def _edited(value, chance: random.Random):
    """JSON in which one to three values are others, or are gone."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        inner = value
        while True:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(inner[key], dict | list) and chance.random() < 0.8:
                inner = inner[key]
                continue
            if chance.random() < 0.2:
                del inner[key]
            else:
                inner[key] = copy.deepcopy(chance.choice([*VALUES, inner[key]]))
            break
    return value


def _survives(read, name):
    """Whether there was something to read. A `UserError` must name the file."""
    try:
        read()
    except UserError as error:
        message = str(error)
    else:
        return True
    assert name in message
    return False


def _json_lines():
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode()


def _write_table(path, table, rows):
    if path.suffix == ".parquet":
        parquet = importlib.import_module("pyarrow.parquet")
        parquet.write_table(table, path, row_group_size=rows)
    else:
        new = getattr(importlib.import_module("pyarrow.ipc"), f"new_{path.stem}")
        with new(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=rows)


def _numbers_damaged(data: bytes, chance: random.Random) -> bytes:
    """`data` with up to three of its integers of 4 or 8 bytes replaced."""
    for _ in range(chance.randint(1, 3)):
        size = chance.choice([4, 8])
        start = chance.randrange(len(data) // size) * size
        numbers = [0, 1, -1, 2**31 - 1, 2**40, 2**63 - 1, -(2**63), chance.randrange(400)]
        number = chance.choice(numbers) % 2 ** (8 * size)
        data = data[:start] + number.to_bytes(size, "little") + data[start + size :]
    return data


@pytest.mark.parametrize("name", ["stream.arrow", "file.arrow", "a.parquet"])
@pytest.mark.parametrize("field", ["text", "ids"])
def test_tables(tmp_path, name, field):
    pyarrow, path = pytest.importorskip("pyarrow"), tmp_path / name
    ids = [[1, 2], [], None, list(range(50))] * 30
    _write_table(path, pyarrow.table({"text": TEXTS * 20, "ids": ids}), 50)
    intact, chance = path.read_bytes(), random.Random(name + field)
    corpus = CorpusConfig(kind="text", path=str(path), field=field, validation_percent=0)
    num_read, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(400):
        path.write_bytes((_damaged if i % 2 else _numbers_damaged)(intact, chance))
        num_read += _survives(lambda: list(stream_documents(corpus)), path.name)
    assert num_read < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_megatron(tmp_path):
    path, chance = tmp_path / "a.idx", random.Random(3)
    sizes, starts = np.array([3, 0, 7, 2], "<i4"), np.array([0, 2, 2, 4], "<i8")
    offsets = (2 * np.cumsum(sizes) - 2 * sizes).astype("<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 4)
    intact = header + sizes.tobytes() + offsets.tobytes() + starts.tobytes()
    path.with_suffix(".bin").write_bytes(bytes(24))
    corpus = CorpusConfig(kind="text", path=str(path), validation_percent=0)
    num_read, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(600):
        path.write_bytes((_damaged if i % 2 else _numbers_damaged)(intact, chance))
        num_read += _survives(lambda: list(stream_documents(corpus)), "a.")
    assert num_read < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "txt.gz", "jsonl.zst"])
def test_documents(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl.zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(_json_lines()))
    else:
        path.write_bytes(gzip.compress(_json_lines()) if kind.endswith("gz") else _json_lines())
    intact, chance = path.read_bytes(), random.Random(kind)
    corpus = CorpusConfig(kind="text", path=str(path), validation_percent=0)
    num_read = 0
    for _ in range(400):
        path.write_bytes(_damaged(intact, chance))
        num_read += _survives(lambda: list(stream_documents(corpus)), path.name)
    assert num_read < 400


def test_samples(tmp_path):
    rng, chance = np.random.default_rng(0), random.Random(1)
    samples = [rng.integers(0, 256, n).astype("<u4").tobytes() for n in (3, 5, 300)]
    samples = [b"".join((len(x).to_bytes(4, "little"), x)) for x in samples]
    offsets = np.cumsum([4 * 5, *map(len, samples)]).astype("<u4").tobytes()
    shard = b"".join(((3).to_bytes(4, "little"), offsets, *samples))
    entry = {"format": "mds", "version": 2, "samples": 3, "column_names": ["text"]}
    entry |= {"column_encodings": ["bytes"], "column_sizes": [None], "compression": None}
    entry |= {"raw_data": {"basename": "a.mds", "bytes": len(shard)}, "zip_data": None}
    index = {"version": 2, "shards": [entry]}
    corpus = CorpusConfig(kind="text", path=str(tmp_path), glob="index.json")

    def read():
        return list(stream_documents(corpus))

    (tmp_path / "a.mds").write_bytes(shard)
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert len(read()) == 3
    for _ in range(600):
        (tmp_path / "index.json").write_text(json.dumps(_edited(index, chance)))
        _survives(read, str(tmp_path))
    for _ in range(400):
        data = _damaged(shard, chance)
        entry["raw_data"]["bytes"] = len(data)
        (tmp_path / "a.mds").write_bytes(data)
        (tmp_path / "index.json").write_bytes(
            json.dumps(index).encode()
            if chance.random() < 0.7
            else _damaged(json.dumps(index).encode(), chance)
        )
        _survives(read, str(tmp_path))


def _read_each(folder, split):
    records = open_records(folder, split)
    return [records.read(document, 0, 1) for document in range(len(records))]


def test_records(tmp_path):
    folder, chance = tmp_path / "records", random.Random(2)
    folder.mkdir()
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text("word " * i)
    corpus = CorpusConfig(kind="text", path=str(tmp_path / "text"), validation_percent=20)
    manifest = prepare_records(corpus, TokenizerConfig(), folder, shard_tokens=400)
    config = RecordsConfig(paths=(str(folder),), seq_len=32)

    def read():
        source, _ = config.rows(0)
        return [source[i]["tokens"].sum() for i in range(4)], config.vocab_size

    def verify():
        for facts in verify_records(folder)["splits"].values():
            assert re.fullmatch(r"[\d,]+", f"{facts['num_documents']:,}")

    del manifest["sha256"]
    intact = {path: path.read_bytes() for path in folder.glob("*.bin")}
    for _ in range(300):
        edited = _edited(manifest, chance)
        (folder / MANIFEST).write_text(json.dumps(sealed(edited)))
        _survives(read, str(folder))
        _survives(verify, str(folder))
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))
    for path in list(intact) * 8:
        path.write_bytes(_damaged(intact[path], chance))
        if path.read_bytes() != intact[path]:
            assert not _survives(verify, str(path))
            read_each = functools.partial(_read_each, folder, path.name.split(".")[0])
            assert not _survives(read_each, str(path))
        path.write_bytes(intact[path])
    read()
    verify()
