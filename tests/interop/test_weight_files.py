"""Weight files: a written file is read again, and a malformed one is refused."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checks import refused
from safetensors.numpy import save_file

from ttcd_jax.errors import DataError
from ttcd_jax.interop.weight_files import INDEX, SINGLE, open_weights, write_safetensors

BFLOAT16 = ml_dtypes.bfloat16


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((3, 4)).astype(np.float32)
    return {
        "model.a.weight": wide,
        "model.a.transposed": wide.T,
        "model.b": wide[0].astype(np.float16),
        "model.c": wide.astype(BFLOAT16),
        "model.conv": wide[:, None],
        "model.scalar": np.float32(3.5).reshape(()),
    }


def _assert_equal(weights, tensors):
    assert list(weights) == sorted(tensors)
    for name, expected in tensors.items():
        assert weights[name].dtype == expected.dtype == weights.stored[name].dtype
        assert weights[name].shape == expected.shape == weights.stored[name].shape
        assert weights[name].tobytes() == np.ascontiguousarray(expected).tobytes()


def _write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file by hand. `header` is bytes or JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(shape=(2,), begin=0, end=8, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _refused(path: Path, words: str = "") -> None:
    message = refused(f"{path.name}|{words}", lambda: dict(open_weights(path)), error=DataError)
    assert len(message) < 1500


@pytest.mark.parametrize("max_bytes", [10**9, 60, 1])
def test_what_is_written_is_read_again_bit_for_bit(tmp_path, max_bytes):
    files = write_safetensors(tmp_path, _tensors(), max_bytes)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert len(files) == {10**9: 1, 60: 5, 1: 7}[max_bytes]
    _assert_equal(open_weights(tmp_path), _tensors())
    assert set(open_weights(tmp_path).files) == {f for f in files if f.name != INDEX}


HEADERS = {
    "overlap": ({"a": _entry(), "b": _entry((1,), 4, 8)}, "`b`"),
    "hole": ({"a": _entry((1,), 4, 8)}, "`a`"),
    "left_over": ({"a": _entry((1,), 0, 4)}, "not fully covered"),
    "out_of_range": ({"a": _entry((4,), 0, 16)}, "not fully covered"),
    "bytes_too_few": ({"a": _entry((3,))}, "invalid shape"),
    "shape_overflows": ({"a": _entry((2**40, 2**40))}, "overflow"),
    "deep": (b'{"a": ' + b"[" * 200_000, "recursion"),
    "quoted": ({"\n" * 5000: _entry((2,), 8, 0)}, "invalid offset"),
    # What the library accepts:
    "twice": (b'{"a": %(x)b, "a": %(x)b}' % {b"x": json.dumps(_entry()).encode()}, "twice"),
    "float64": ({"a": _entry((1,), dtype="F64")}, "'a'|F64|save"),
    "integers": ({"a": _entry((1,), dtype="I64")}, "'a'|I64"),
    "bools": ({"a": _entry((8,), dtype="BOOL")}, "'a'|BOOL"),
    "terminal_name": ({"\x1b[2J": _entry()}, "name"),
    "long_name": ({"a" * 5000: _entry()}, "name"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_malformed_header_is_refused(tmp_path, kind):
    header, words = HEADERS[kind]
    _refused(_write(tmp_path / "x.safetensors", header, bytes(8)), words)


def test_what_is_no_safetensors_file_or_takes_long_to_parse_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for data in (b"", b"\x00" * 5, pickle.dumps({"a": 1}), b"PK\x03\x04" * 20):
        path.write_bytes(data)
        _refused(path)
    _refused(_write(path, b"{" * 20_000_001, b"-"), "20,000,001 bytes")


def test_headers_of_all_lengths_are_read(tmp_path):
    """Neither 0x80, as in a pickle, nor PK, as in an archive, means anything in a length."""
    path, names = tmp_path / "x.safetensors", set()
    for size in range(1, 257):
        save_file({"x" * size: np.ones(3, np.float32)}, path)
        names.add(path.read_bytes()[0])
        assert dict(open_weights(path))["x" * size].sum() == 3
    assert len(names) == 32
    assert 0x80 in names
    header = json.dumps({"a": _entry()}).encode()
    for length in (*range(0x680, 0x780), 0x4B50, 0x5880):
        assert open_weights(_write(path, header.ljust(length), bytes(8)))["a"].sum() == 0


FIRST, SECOND = (f"model-0000{number}-of-00004.safetensors" for number in (1, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_what_is_not_finite_is_refused_by_name(tmp_path, value, dtype):
    write_safetensors(tmp_path, {"good": np.ones(2, dtype), "bad": np.array([1, value], dtype)})
    refused("'bad'|NaN or infinity", lambda: dict(open_weights(tmp_path)), error=DataError)
    assert open_weights(tmp_path)["good"].sum() == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.b": "../x.safetensors"}, "plain"),
        ({"model.b": "/etc/passwd"}, "plain"),
        ({"model.b": ".safetensors"}, "plain"),
        ({"model.b": 3}, "plain"),
        ({"model.b": "gone.safetensors"}, "gone.safetensors|missing"),
        ({"model.b": FIRST}, "'model.b'|model-00001"),
        ({"model.new": FIRST}, "'model.new'|in None"),
        ({"model.b": None}, "'model.b'|None"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path, changes, words):
    write_safetensors(tmp_path, _tensors(), 60)
    source = json.loads((tmp_path / INDEX).read_text())
    source["weight_map"] |= changes
    source["weight_map"] = {k: v for k, v in source["weight_map"].items() if v is not None}
    (tmp_path / INDEX).write_text(json.dumps(source))
    _refused(tmp_path, words)


def test_shards_that_leave_the_folder_or_share_a_tensor_are_refused(tmp_path):
    folder, shard = tmp_path / "in", tmp_path / "in" / SECOND
    write_safetensors(folder, _tensors(), 60)
    shard.rename(tmp_path / SECOND)
    shard.symlink_to(tmp_path / SECOND)
    _refused(folder, "link that leaves its folder")
    shard.unlink()
    shard.write_bytes((folder / FIRST).read_bytes())
    _refused(folder, "is in | and in")


def test_folders_without_or_with_two_checkpoints_are_refused(tmp_path):
    _refused(tmp_path, f"{SINGLE}|{INDEX}")
    _refused(tmp_path / "none")
    (tmp_path / ".metadata").write_bytes(b"")
    _refused(tmp_path, "dcp_to_torch")
    write_safetensors(tmp_path, _tensors(), 60)
    (single,) = write_safetensors(tmp_path, _tensors())
    _refused(tmp_path, "remove")
    _assert_equal(open_weights(single.rename(tmp_path / "other.safetensors")), _tensors())


def test_a_torch_file_needs_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused("torch is not installed|.safetensors", open_weights, tmp_path)


def test_random_damage_is_refused_or_harmless(tmp_path):
    """Bytes of data may be anything; of the header nothing but names can change unseen."""
    write_safetensors(tmp_path, _tensors())
    whole, path = (tmp_path / SINGLE).read_bytes(), tmp_path / "damaged.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:header])
    by_offset = sorted(_tensors(), key=lambda name: entries[name]["data_offsets"])
    shapes = sorted((t.dtype.name, t.shape) for t in _tensors().values())
    rng = np.random.default_rng(1)
    num_refused = 0
    for trial in range(400):
        damaged = bytearray(whole)
        if trial % 4 == 0:
            damaged = damaged[: rng.integers(len(whole))]
        else:
            limit = header if trial % 4 < 3 else len(whole)
            for place in rng.integers(limit, size=rng.integers(1, 4)):
                damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            weights = dict(open_weights(path))
        except DataError:
            num_refused += 1
            continue
        assert sorted((t.dtype.name, t.shape) for t in weights.values()) == shapes
        if damaged[:header] == whole[:header]:
            data = b"".join(weights[name].tobytes() for name in by_offset)
            assert data == bytes(damaged[header:])
    assert num_refused > 250
