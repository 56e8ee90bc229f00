import errno
import hashlib
import json
import os
import platform
import sysconfig

import corpora
import numpy as np
import pytest
from checks import refused
from commands import ROOT

from ttcd_jax.data.corpus import (
    MEASURED,
    SPLITS,
    CorpusConfig,
    library,
    load_documents,
    manifest,
    stream_documents,
)
from ttcd_jax.data.documents import Document
from ttcd_jax.data.sources import check_unchanged
from ttcd_jax.errors import DataError


def _folder(root, files, **options):
    """A corpus of files with the given texts, or with their own names."""
    files = files if isinstance(files, dict) else dict(zip(files, files, strict=True))
    return corpora.text_folder(root, files, **options)


def _names(documents):
    return [document.name for document in documents]


def _splits(config):
    """The documents to train on, and those held out."""
    return [load_documents(config, split) for split in SPLITS]


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    """A small standard library with everything in it that has to be left out."""
    files = {f"module_{i:03}.py": b"x = %d\n" % i for i in range(200)}
    files |= {"package/__init__.py": b"import this\n", "package/note.txt": b"no"}
    files |= {"empty.py": b"", "latin.py": b"# \xe9\n", "site-packages/numpy.py": b"no"}
    files |= {"test/test_x.py": b"no", "lib2to3/tests/test_y.py": b"no"}
    files |= {"idlelib/idle_test/test_z.py": b"no", "__pycache__/x.py": b"no"}
    _folder(tmp_path, files)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def test_stdlib_takes_whole_modules_and_splits_them(stdlib):
    train, validation = _splits(CorpusConfig())
    expected = [*(f"module_{i:03}.py" for i in range(200)), "package/__init__.py"]
    assert sorted(_names(train + validation)) == expected
    assert _names(train) == sorted(_names(train))
    assert all(d.text == (stdlib / d.name).read_bytes() for d in train)


def test_split_depends_on_the_name_alone(stdlib):
    held_out = _names(load_documents(CorpusConfig(), "validation"))
    # sha256(name) mod 100 < 5, worked out with `sha256sum` and `bc`
    expected = ("006", "031", "035", "094", "128", "146", "161", "172", "175")
    assert held_out == [f"module_{number}.py" for number in expected]
    for name in held_out[:-1]:
        (stdlib / name).unlink()
    (stdlib / "module_100.py").write_text("changed = True\n")
    assert _names(load_documents(CorpusConfig(), "validation")) == held_out[-1:]


ALL, HOLD_OUT = {"validation_percent": 0}, {"validation_files": 1}
RUN = {"a.txt": "a"} | dict.fromkeys(("run/lock", "x/lock"), "process 7 on x\n")
RUN |= {"x/b.txt": "b", "run/data.json": "{}", "run/.data.json.7": "{"}
LOCKS = ALL | {"glob": "**/[abl]*"}


@pytest.mark.parametrize(
    ("files", "options", "train", "validation"),
    [
        (["train/b.txt", "train/a.txt", "validation/c.txt"], {}, ["a.txt", "b.txt"], ["c.txt"]),
        (["train/a.txt", "train/b.md", "validation/c.md"], {"glob": "*.md"}, ["b.md"], ["c.md"]),
        (["x/2.txt", "x/0.txt", "1.txt"], HOLD_OUT, ["1.txt", "x/0.txt"], ["x/2.txt"]),
        (["a.txt", "._a.txt", ".checkpoints/a.txt"], ALL, ["a.txt"], []),
        (["a.txt", ".b/c.txt"], ALL | {"glob": ".b/*.txt"}, [".b/c.txt"], []),
        # Runs, sweeps and studies are no text; a lock may be left among text.
        (RUN, LOCKS, ["a.txt", "x/b.txt", "x/lock"], []),
        (RUN | {"x/config.json": "{}"}, LOCKS, ["a.txt"], []),
        (RUN | {"x/study.json": "{}"}, LOCKS, ["a.txt"], []),
    ],
)
def test_files_of_a_folder(tmp_path, files, options, train, validation):
    found = [*stream_documents(_folder(tmp_path, files, **options))]
    names = [[x.name for part, x in found if part == split] for split in SPLITS]
    assert names == [train, validation]


def test_files_and_documents_of_a_file_are_held_out_by_their_names(tmp_path):
    folder = _folder(tmp_path, [f"{i}.txt" for i in range(60)], validation_percent=30)
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"body": "{i}"}}\n' for i in range(60)))
    for config in (folder, folder.replace(path=str(path), field="body")):
        streamed = list(stream_documents(config))
        names = (f"{i}.txt" if config is folder else f"corpus.jsonl:{i}" for i in range(60))
        assert sorted(_names(d for _, d in streamed)) == sorted(names)
        assert _splits(config) == [[d for s, d in streamed if s == split] for split in SPLITS]
        assert 5 <= len(load_documents(config, "validation")) <= 30


def test_names_that_mean_splits_are_warned_of(tmp_path, caplog):
    for name in ("train-0.txt", "testimony.txt", "set.valid.txt"):
        assert not caplog.text
        config = _folder(tmp_path, [name], **ALL)
        load_documents(config, "train")
    load_documents(config, "train")
    assert caplog.text.count("set.valid.txt is read as train-0.txt is") == 1
    assert "put files into folders train/ and validation/" in caplog.text


def test_files_beside_the_splits_of_a_folder_are_warned_of(tmp_path, caplog):
    config = _folder(tmp_path, ["train/a.txt", "validation/b.txt"])
    assert [*map(_names, _splits(config))] == [["a.txt"], ["b.txt"]]
    assert not caplog.text
    _folder(tmp_path, ["c.txt", "more/train/d.txt"])
    assert [*map(_names, _splits(config))] == [["a.txt"], ["b.txt"]]
    assert caplog.text.count("c.txt and all else outside train/ and validation/ (2 of its") == 1


@pytest.mark.parametrize(
    ("text", "percent", "end"),
    [
        ("".join(f"line {i} é\n" for i in range(100)), 10, b"\n"),
        ("one two three four " * 9, 10, b" "),
        ("x" * 99, 10, b"x"),
        ("x" + "\u65e5" * 50, 10, "\u65e5".encode()),
        ("one line\nand half a", 0, b"half a"),
        ("a title\n" + "one long line " * 40, 10, b" "),
    ],
)
def test_one_file_is_split_after_a_line_else_a_word_else_a_character(tmp_path, text, percent, end):
    (tmp_path / "book.txt").write_text(text)
    path = str(tmp_path / "book.txt")
    config = CorpusConfig(kind="text", path=path, validation_percent=percent)
    parts = dict(stream_documents(config))
    train, held_out = (parts.get(split, Document("book.txt", b"")) for split in SPLITS)
    assert train.name == held_out.name == "book.txt"
    assert (train.text + held_out.text).decode() == text
    assert train.text.endswith(end)
    assert percent / 100 <= len(held_out.text) / len(text.encode()) <= 2 * percent / 100


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ([], {"path": "absent"}, "no file or folder at absent: give the path of"),
        ({"train/a.txt": "", "validation/b.txt": "b"}, {}, "the train split of | is empty"),
        (["train/a.txt", "validation/b.txt"], {"glob": "*.md"}, "no file under |/train matches"),
        ({"a.txt": ""}, ALL, "validation_percent=0); add text, or give a folder"),
        (["a.txt", "b.txt"], {"validation_files": 2}, "has 2 files: 2 cannot be held out"),
        (["train/a.txt", "validation/b.txt"], {"validation_files": 1}, "or has its own splits"),
        (["a.txt"], {"path": "a.txt", "validation_files": 1}, "no files to hold out: it is one"),
        (["a.txt"], {"path": "a.txt", "glob": "*.txt"}, "a folder and a.txt is a file: leave the"),
        (["a.txt"], {"field": "nope"}, "field 'nope' is for files of many documents"),
    ],
)
def test_what_is_no_corpus(tmp_path, monkeypatch, files, options, words):
    monkeypatch.chdir(tmp_path)
    config = _folder(tmp_path, files).replace(**options)
    refused(words, load_documents, config, "train", error=DataError)


def test_a_field_that_some_file_has_is_read_beside_plain_text(tmp_path):
    files = {"a.txt": "text", "b.jsonl": '{"nope": "more"}'}
    both = load_documents(_folder(tmp_path, files, field="nope", glob="**/*", **ALL), "train")
    assert [document.content for document in both] == [b"text", b"more"]


def test_fingerprint_is_of_names_which_may_be_any_bytes_and_contents_in_order(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "wb") as file:
        file.write(b"text")
    (document,) = load_documents(CorpusConfig(kind="text", path=str(tmp_path), **ALL), "train")
    assert os.fsencode(document.name) == b"\xff.txt"
    documents = [document, Document("a", b"bc"), Document("d", b"", np.array([7], "<i4"))]
    parts = (b"\xff.txt", b"text", b"a", b"bc", b"d", bytes([7, 0, 0, 0]))
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()
    fingerprint = {"num_documents": 3, "num_bytes": 10, "sha256": digest}
    kind = {"kind": "text"}
    assert manifest(CorpusConfig(**kind, path="."), documents) == kind | fingerprint


def test_another_python_is_another_corpus_unless_its_library_is_the_same(stdlib):
    run_dir = stdlib / "site-packages"  # left out of the corpus
    now = manifest(CorpusConfig(), load_documents(CorpusConfig(), "train"))

    def check(stored):
        (run_dir / "data.json").write_text(json.dumps({"parts": [stored]} | stored))
        check_unchanged(run_dir, lambda: now | {"parts": [now]})

    assert now["python"] == platform.python_version()
    check(now)
    check(now | {"python": "3.1"})
    earlier = {name: now[name] for name in now if name != "python"}
    check(earlier)
    refused("(num_bytes: 1 -> ", check, earlier | {"num_bytes": 1, "sha256": "x"}, error=DataError)
    assert ("not" in library(now)) == (now["python"] != MEASURED)
    assert library(now | {"python": "3.1"}).endswith(f"3.1, not {MEASURED} as in the tables")
    pages = (ROOT / name for name in ("README.md", "docs/running.md"))
    assert all(f"Python {MEASURED}" in page.read_text() for page in pages)
    words = f"changed since|(python: 3.1 -> {now['python']})"
    refused(words, check, now | {"python": "3.1", "sha256": "x"}, error=DataError)


def test_text_that_is_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    config = _folder(tmp_path, {"a.txt": "x" * 600, "b.txt": "x" * 600}, **ALL)
    monkeypatch.setattr("ttcd_jax.data.corpus.MAX_TEXT_BYTES", 1200)
    assert len(load_documents(config, "train")) == 2
    monkeypatch.setattr("ttcd_jax.data.corpus.MAX_TEXT_BYTES", 1199)
    remedy = f"ttcd prepare --input={tmp_path} --tokenizer=tokenizer.json"
    refused(f"1.17 KiB of text and more|{remedy}", load_documents, config, "train")


LINKS = [
    *(("a.txt", "/s.txt", "*.txt"), ("deep", "", "*/*.txt"), ("train", "", "*.txt")),
    *(("deep", "", "**/*.txt"), ("a.txt", "/gone.txt", "*.txt")),
]


@pytest.mark.parametrize(("link", "file", "glob"), LINKS)
def test_links_that_leave_the_folder_are_refused(tmp_path, link, file, glob):
    _folder(tmp_path, ["secret/s.txt", "real/text/b.txt", "real/text/validation/c.txt"])
    text = tmp_path / "real" / "text"
    (text / link).symlink_to(f"../../secret{file}")
    config = CorpusConfig(kind="text", path=str(text), glob=glob, **ALL)
    refused("glob . must be a pattern below", config.replace, glob=".")
    words = f"text/{link} is a link that leaves |cp -rLl"
    refused(words, load_documents, config, "train", error=DataError)
    (text / link).unlink()
    (text / "d.txt").symlink_to("gone.txt")
    words = "d.txt cannot be read: No such file"
    refused(words, load_documents, config.replace(glob="*.txt"), "train", error=DataError)
    (text / "d.txt").unlink()
    (text / "d.txt").symlink_to("b.txt")  # one that stays
    (tmp_path / "link").symlink_to(text)
    config = config.replace(path=str(tmp_path / "link"), glob="*.txt")
    assert _names(load_documents(config, "train")) == ["b.txt", "d.txt"]
    (text / "other").symlink_to("../../secret")
    config = config.replace(path=str(text), glob="validation/**/*.txt")
    assert _names(load_documents(config, "train")) == ["validation/c.txt"]


def test_a_folder_that_cannot_be_read_is_refused_and_not_passed_over(tmp_path, monkeypatch):
    _folder(tmp_path, ["a.txt", "closed/b.txt"])
    scan = os.scandir

    def refusing(path):
        if os.fspath(path) == str(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    config = CorpusConfig(kind="text", path=str(tmp_path), **ALL)
    words = "closed cannot be read: Permission denied; |by a glob"
    refused(words, load_documents, config, "train", error=DataError)
    assert _names(load_documents(config.replace(glob="*.txt"), "train")) == ["a.txt"]


def test_links_of_the_hugging_face_cache_are_good_and_others_are_not(tmp_path):
    cache = tmp_path / "datasets--lab--set"
    _folder(tmp_path, ["elsewhere.txt"])
    _folder(cache, ["blobs/12", "a.txt", "snapshots/1/data/no.md"])
    snapshot = cache / "snapshots" / "1"
    link, good = snapshot / "b.txt", snapshot / "data" / "a.txt"
    good.symlink_to("../../../blobs/12")
    config = CorpusConfig(kind="text", path=str(snapshot), **ALL)
    for path in (snapshot, good.parent):
        assert len(load_documents(config.replace(path=str(path)), "train")) == 1
    config = config.replace(glob="b.txt")
    link.symlink_to("../../../elsewhere.txt")
    words = "b.txt is a link that leaves"
    refused(words, load_documents, config, "train", error=DataError)
    (cache / "blobs").rename(tmp_path / "blobs")  # no cache any more
    link.unlink()
    link.symlink_to("../../a.txt")
    refused(words, load_documents, config, "train", error=DataError)
