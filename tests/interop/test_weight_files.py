"""Weight files: a written file is read again, and a malformed one is refused."""

import json
import pickle
import struct
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checks import bits, refused
from damage import damaged, fuzz

from ttcd_jax.errors import DataError
from ttcd_jax.interop.weight_files import INDEX, SINGLE, open_weights, write_safetensors

BFLOAT16 = ml_dtypes.bfloat16


WIDE = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
TENSORS = {
    "model.a.transposed": WIDE.T,
    "model.a.weight": WIDE,
    "model.b": WIDE[0].astype(np.float16),
    "model.c": WIDE.astype(BFLOAT16),
    "model.conv": WIDE[:, None],
    "model.scalar": np.float32(3.5).reshape(()),
}


def _file(header: Any, data: bytes = bytes(8)) -> bytes:
    """A file by hand. `header` is bytes or JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(shape=(2,), begin=0, end=8, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _refused(path: Path, words: str = "") -> None:
    message = refused(f"{path.name}|{words}", lambda: dict(open_weights(path)), error=DataError)
    assert len(message) < 1500


@pytest.mark.parametrize("max_bytes", [10**9, 60, 1])
def test_what_is_written_is_read_again_bit_for_bit(tmp_path, max_bytes):
    files = write_safetensors(tmp_path, TENSORS, max_bytes)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert len(files) == {10**9: 1, 60: 5, 1: 7}[max_bytes]
    weights = open_weights(tmp_path)
    assert list(weights) == list(TENSORS)
    assert bits(weights) == bits(TENSORS)
    for name, x in weights.stored.items():
        assert (x.dtype, x.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
    assert set(weights.files) == {f for f in files if f.name != INDEX}


TWICE = b'{"a": %(x)b, "a": %(x)b}' % {b"x": json.dumps(_entry()).encode()}
MALFORMED = {
    "pickle": (pickle.dumps({"a": 1}), ""),
    "deep": (_file(b'{"a": ' + b"[" * 200_000), "recursion"),
    "quoted": (_file({"\n" * 5000: _entry((2,), 8, 0)}), "invalid offset"),
    # What the library accepts:
    "twice": (_file(TWICE), "twice"),
    "slow": (_file(b"{" * 20_000_001), "20,000,001 bytes"),
    "float64": (_file({"a": _entry((1,), dtype="F64")}), "'a'|F64|save"),
    "bools": (_file({"a": _entry((8,), dtype="BOOL")}), "'a'|BOOL"),
    "terminal_name": (_file({"\x1b[2J": _entry()}), "name"),
    "long_name": (_file({"a" * 5000: _entry()}), "name"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_refused(tmp_path, kind):
    content, words = MALFORMED[kind]
    (tmp_path / "x.safetensors").write_bytes(content)
    _refused(tmp_path / "x.safetensors", words)


FIRST, SECOND = (f"model-0000{number}-of-00004.safetensors" for number in (1, 2))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_what_is_not_finite_is_refused_by_name(tmp_path, value, dtype):
    write_safetensors(tmp_path, {"good": np.ones(2, dtype), "bad": np.array([1, value], dtype)})
    refused("'bad'|NaN or infinity", lambda: dict(open_weights(tmp_path)), error=DataError)
    assert open_weights(tmp_path)["good"].sum() == 2


@pytest.mark.parametrize(
    ("name", "shard", "words"),
    [
        ("model.b", "../x.safetensors", "plain"),
        ("model.b", ".safetensors", "plain"),
        ("model.b", 3, "plain"),
        ("model.b", "gone.safetensors", "gone.safetensors|missing"),
        ("model.b", FIRST, "'model.b'|model-00001"),
        ("model.new", FIRST, "'model.new'|in None"),
        ("model.b", None, "'model.b'|None"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path, name, shard, words):
    write_safetensors(tmp_path, TENSORS, 60)
    source = json.loads((tmp_path / INDEX).read_text())
    shards = source["weight_map"] | {name: shard}
    source["weight_map"] = {x: file for x, file in shards.items() if file is not None}
    (tmp_path / INDEX).write_text(json.dumps(source))
    _refused(tmp_path, words)


def test_shards_that_leave_the_folder_or_share_a_tensor_are_refused(tmp_path):
    folder, shard = tmp_path / "in", tmp_path / "in" / SECOND
    write_safetensors(folder, TENSORS, 60)
    shard.rename(tmp_path / SECOND)
    shard.symlink_to(tmp_path / SECOND)
    _refused(folder, "link that leaves its folder")
    shard.unlink()
    shard.write_bytes((folder / FIRST).read_bytes())
    _refused(folder, "is in | and in")


def test_the_hugging_face_cache_may_be_behind_a_link(tmp_path):
    snapshot = tmp_path / "disk" / "models--lab--model" / "snapshots" / "1"
    (blobs := snapshot.parent.with_name("blobs")).mkdir(parents=True)
    (file,) = write_safetensors(snapshot, TENSORS)
    file.rename(blobs / "12")
    file.symlink_to("../../blobs/12")
    (tmp_path / "cache").symlink_to("disk")
    for root in ("disk", "cache"):
        folder = tmp_path / root / snapshot.relative_to(tmp_path / "disk")
        assert bits(open_weights(folder)) == bits(TENSORS)


def test_folders_without_or_with_two_checkpoints_are_refused(tmp_path):
    _refused(tmp_path / "none")
    _refused(tmp_path, "safetensors|save_pretrained(safe_serialization=True)")
    (tmp_path / ".metadata").write_bytes(b"")
    _refused(tmp_path, "dcp_to_torch")
    write_safetensors(tmp_path, TENSORS, 60)
    (single,) = write_safetensors(tmp_path, TENSORS)
    _refused(tmp_path, f"{SINGLE} and {INDEX}|remove")
    assert bits(open_weights(single.rename(tmp_path / "other.safetensors"))) == bits(TENSORS)


def test_a_file_of_torch_holds_dense_tensors_or_is_refused(tmp_path, monkeypatch):
    """By a module with torch's names: the suite has no torch."""
    path, modules = tmp_path / "pytorch_model.bin", sys.modules
    path.write_bytes(b"x")
    monkeypatch.setitem(modules, "torch", None)
    refused("needs torch", open_weights, tmp_path)

    class Tensor(types.SimpleNamespace):
        detach = contiguous = lambda self: self
        numpy = lambda self: self.array  # noqa: E731
        view = lambda self, _: Tensor(array=self.array.view(np.uint16))  # noqa: E731

    def holding(arrays):
        made = {n: Tensor(array=x, dtype=x.dtype.name, layout="strided") for n, x in arrays.items()}
        return lambda *_, weights_only, **__: weights_only and made

    kinds = {name: name for name in ("float32", "float16", "bfloat16", "uint16", "strided")}
    torch = types.SimpleNamespace(Tensor=Tensor, load=holding(TENSORS), **kinds)
    monkeypatch.setitem(modules, "torch", torch)
    assert bits(open_weights(tmp_path)) == bits(TENSORS)
    for load, words in (
        (holding({"a": np.zeros(2)}), "'a' is float64"),
        (lambda *_, **__: {"model": {"a": 1}}, "'a' is int"),
        (lambda *_, **__: pickle.loads(b"x"), "more than weights"),
    ):
        monkeypatch.setattr(torch, "load", load)
        _refused(tmp_path, words)


def test_random_damage_is_refused_or_harmless(tmp_path):
    """Bytes of data may be anything; of the header nothing but names can change unseen."""
    (file,) = write_safetensors(tmp_path, TENSORS)
    shapes = sorted((t.dtype.name, t.shape) for t in TENSORS.values())

    def read(data):
        file.write_bytes(data)
        weights = open_weights(file).values()
        assert sorted((t.dtype.name, t.shape) for t in weights) == shapes

    fuzz(file.read_bytes(), read, 400, write=damaged, named=file)
