"""The format is written here by hand, from its description."""

import struct

import numpy as np
import pytest

from ttcd_jax.data.corpus import CorpusConfig, stream_documents
from ttcd_jax.data.megatron import read_sequences
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.records import open_records
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError

CODES = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}
SEQUENCES = [[1, 2, 3], [], [4], [5, 6]]
STARTS = [0, 2, 2, 4]
DOCUMENTS = [[1, 2, 3], [], [4, 5, 6]]


def _write(folder, dtype="<u2", sequences=SEQUENCES, **changes):
    sizes = np.array([len(ids) for ids in sequences], "<i4")
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[dtype], "sizes": sizes}
    parts |= {"offsets": (np.cumsum(sizes) - sizes).astype("<i8") * np.dtype(dtype).itemsize}
    parts |= {"starts": np.array(STARTS, "<i8")} | changes
    counts = parts.get("counts", (len(parts["sizes"]), len(parts["starts"])))
    header = struct.pack("<9sQBQQ", parts["magic"], parts["version"], parts["code"], *counts)
    arrays = [np.asarray(parts["sizes"], "<i4"), np.asarray(parts["offsets"], "<i8")]
    arrays.append(np.asarray(parts["starts"], "<i8"))
    (folder / "a.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    np.concatenate([np.array(ids, dtype) for ids in sequences]).tofile(folder / "a.bin")
    return folder / "a.idx"


@pytest.mark.parametrize("dtype", CODES)
def test_documents_of_one_sequence_or_several(tmp_path, dtype):
    path = _write(tmp_path, dtype)
    assert [ids.tolist() for ids in read_sequences(path)] == DOCUMENTS
    corpus = CorpusConfig(kind="text", path=str(path), validation_percent=0)
    documents = [document for _, document in stream_documents(corpus)]
    assert [document.name for document in documents] == ["a.idx:0", "a.idx:2"]


def test_documents_become_records_with_bos_and_eos(tmp_path):
    corpus = CorpusConfig(kind="text", path=str(_write(tmp_path)), validation_percent=0)
    (tmp_path / "records").mkdir()
    prepare_records(corpus, TokenizerConfig(), tmp_path / "records")
    records = open_records(tmp_path / "records", "train")
    assert records.read(1, 0, 5).tolist() == [256, 4, 5, 6, 257]


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    corpus = {"path": str(_write(tmp_path, sequences=[[1], [2], [3], [999]]))}
    corpus = CorpusConfig(kind="text", **corpus, validation_percent=0)
    (tmp_path / "records").mkdir()
    with pytest.raises(DataError, match=r"a\.idx:2: .*999"):
        prepare_records(corpus, TokenizerConfig(), tmp_path / "records")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"MMIDIDX\0\1"}, r"a\.idx begins b'MMIDIDX.x00.x01', 1, 8; read"),
        ({"version": 2}, r"a\.idx begins b'MMIDIDX.x00.x00', 2, 8; read"),
        ({"code": 7}, r"x00', 1, 7; .*, 1, \[1, 2, 3, 4, 5, 8\]"),
        ({"counts": (2**60, 2**60)}, "115 bytes|114 bytes; 1152921504606846976 sequences"),
        ({"counts": (5, 4)}, "has 114 bytes; 5 sequences and 4 documents take 126"),
        ({"starts": [0, 2, 2, 3]}, r"a\.bin has 6 ids in 4 sequences, its documents 4 in 3"),
        ({"starts": [1, 2, 2, 4]}, r"does not fit .*a\.bin at document 0"),
        ({"starts": [0, 3, 2, 4]}, "does not fit .* at document 1"),
        ({"starts": [0, 2**62, -(2**62), 4]}, "does not fit .* at document 0"),
        ({"starts": [-4, 2, 2, 4]}, "does not fit .* at document 0"),
        ({"starts": [0, -1, 2, 4]}, "does not fit .* at document 0"),
        ({"sizes": [3, -1, 2, 2]}, "does not fit .* at document 0"),
        ({"sizes": [3, 0, 1, 3]}, "does not fit .* at document 2"),
        ({"sizes": [3, 0, 1, 1]}, r"a\.bin has 6 ids in 4 sequences, its documents 5 in 4"),
        ({"offsets": [0, 6, 8, 10]}, "does not fit .* at document 2"),
        ({"code": 4}, "does not fit .* at document 2"),
    ],
)
def test_what_an_index_may_not_say(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        list(read_sequences(_write(tmp_path, **changes)))


def test_files_of_another_size_are_refused(tmp_path):
    path = _write(tmp_path)
    for name in ("a.idx", "a.bin"):
        intact = (tmp_path / name).read_bytes()
        for size in range(len(intact)):
            (tmp_path / name).write_bytes(intact[:size])
            with pytest.raises(DataError, match=r"a\.(idx|bin)"):
                list(read_sequences(path))
        (tmp_path / name).write_bytes(intact)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin"):
        list(stream_documents(CorpusConfig(kind="text", path=str(path))))
