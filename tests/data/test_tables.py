"""Folders that `datasets` wrote (datasets_folder/README.md), and Arrow files made here."""

import json
import shutil
import tracemalloc
from pathlib import Path

import corpora
import numpy as np
import pyarrow
import pytest

from ttcd_jax.data.corpus import CorpusConfig, load_documents
from ttcd_jax.data.documents import LeftOut, read_documents, readable_glob
from ttcd_jax.errors import DataError, UserError

WRITTEN = Path(__file__).with_name("datasets_folder")
TEXTS = ["one", "größe 日本", "", None, "last"]
IDS = [[1, 2, 3], [4], [], [5, 6], [7]]


def _read(path, field="text"):
    return list(read_documents(path, path.name, field, LeftOut()))


def _texts(path, field="text"):
    return [document.text.decode() for document in _read(path, field)]


def test_a_folder_as_datasets_saves_it():
    assert readable_glob(WRITTEN / "saved") == "**/state.json"
    state = WRITTEN / "saved" / "state.json"
    assert _texts(state) == [text or "" for text in TEXTS]
    assert [d.tokens.tolist() for d in _read(state, "ids")] == IDS
    corpus = CorpusConfig(kind="text", path=str(WRITTEN / "saved"), glob="**/state.json")
    names = [document.name for document in load_documents(corpus, "train")]
    assert names == ["state.json:0", "state.json:1", "state.json:4"]


def test_a_cache_of_datasets_with_an_intermediate_result():
    message = r"several tables: choose one by --glob \(\*\*/cache-.*, \*\*/json-train\*\.arrow\)"
    with pytest.raises(UserError, match=message):
        readable_glob(WRITTEN / "cache")
    assert _texts(WRITTEN / "cache" / "json-train.arrow") == [text or "" for text in TEXTS]


def test_a_cache_with_one_split_in_several_files(tmp_path):
    for i in range(2):
        name = f"json-train-0000{i}-of-00002.arrow"
        shutil.copyfile(WRITTEN / "cache" / "json-train.arrow", tmp_path / name)
    shutil.copyfile(WRITTEN / "cache" / "dataset_info.json", tmp_path / "dataset_info.json")
    assert readable_glob(tmp_path) == "**/*.arrow"


def test_splits_of_a_saved_folder(tmp_path):
    for split in ("train", "validation"):
        shutil.copytree(WRITTEN / "saved", tmp_path / split)
    splits = tmp_path / "dataset_dict.json"
    splits.write_text('{"splits": ["train", "validation"]}')
    assert readable_glob(tmp_path) == "**/state.json"
    corpus = CorpusConfig(kind="text", path=str(tmp_path), glob="**/state.json")
    assert len(load_documents(corpus, "validation")) == 3
    splits.write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"lists the splits \['train', 'test'\]: give the folder"):
        readable_glob(tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state\.json lists no files \(KeyError"),
        ({"_data_files": 3}, r"state\.json lists no files \(TypeError"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "lists files elsewhere"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, r"gone\.arrow"),
        ({"_data_files": [], "_indices_data_files": [{"filename": "i"}]}, "or chosen rows of them"),
    ],
)
def test_what_a_state_may_not_say(tmp_path, state, message):
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=message):
        _read(tmp_path / "state.json")


@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_kinds_of_texts(tmp_path, form, kind):
    kinds = {"dictionary": lambda: pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    texts = pyarrow.array(TEXTS * 3, kinds.get(kind, getattr(pyarrow, kind))())
    path = corpora.table(tmp_path / "a.arrow", {"n": range(15), "body": texts}, 4, form)
    assert _texts(path, "body") == [text or "" for text in TEXTS] * 3
    with pytest.raises(DataError, match=r"no column 'text'; pass --field \(there: n, body\)"):
        _read(path)
    with pytest.raises(DataError, match="row 0: 'n' is no text but int"):
        _read(path, "n")


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_kinds_of_token_ids(tmp_path, suffix):
    int32 = pyarrow.int32()
    path = corpora.table(
        tmp_path / f"a.{suffix}",
        {
            "short": pyarrow.array([*IDS, None], pyarrow.list_(int32)),
            "long": pyarrow.array([*IDS, None], pyarrow.large_list(pyarrow.uint16())),
            "fixed": pyarrow.array([[1, 2]] * 6, pyarrow.list_(int32, 2)),
            "holes": pyarrow.array([[1, None]] * 6, pyarrow.list_(int32)),
            "words": pyarrow.array([["x"]] * 6, pyarrow.list_(pyarrow.string())),
        },
    )
    for column, expected in (("short", [*IDS, []]), ("long", [*IDS, []]), ("fixed", [[1, 2]] * 6)):
        assert [d.tokens.tolist() for d in _read(path, column)] == expected
    with pytest.raises(DataError, match=r"is no intact .* with 1 nulls"):
        _read(path, "holes")
    with pytest.raises(DataError, match="'words' is no text but list"):
        _read(path, "words")


def test_rows_are_in_memory_one_by_one(tmp_path):
    ids = np.zeros(2**20, np.int32)
    path = corpora.table(tmp_path / "a.arrow", {"ids": pyarrow.array([ids] * 8)}, 4)
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    for document in read_documents(path, "a", "ids", LeftOut()):
        assert document.tokens.size == 2**20
        assert pyarrow.total_allocated_bytes() - before < 2**21
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()
