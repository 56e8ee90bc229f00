import hashlib
import os
import pathlib
import sysconfig

import pytest

from ttcd_jax.data.corpus import (
    SPLITS,
    CorpusConfig,
    load_documents,
    manifest,
    stream_documents,
)
from ttcd_jax.data.documents import Document
from ttcd_jax.errors import DataError, UserError


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    """A small standard library with everything in it that has to be left out."""
    files = {f"module_{i:03}.py": b"x = %d\n" % i for i in range(200)}
    files |= {"package/__init__.py": b"import this\n", "package/note.txt": b"no"}
    files |= {"empty.py": b"", "latin.py": b"# \xe9\n", "site-packages/numpy.py": b"no"}
    files |= {"test/test_x.py": b"no", "lib2to3/tests/test_y.py": b"no"}
    files |= {"idlelib/idle_test/test_z.py": b"no", "__pycache__/x.py": b"no"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def _folder(root: pathlib.Path, files: dict[str, str]) -> CorpusConfig:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CorpusConfig(kind="text", path=str(root))


def _names(documents):
    return [document.name for document in documents]


def _splits(config):
    """The documents to train on, and those held out."""
    return [load_documents(config, split) for split in SPLITS]


def test_stdlib_takes_whole_modules_and_splits_them(stdlib):
    train, validation = _splits(CorpusConfig())
    expected = {f"module_{i:03}.py" for i in range(200)} | {"package/__init__.py"}
    assert set(_names(train)) | set(_names(validation)) == expected
    assert set(_names(train)).isdisjoint(_names(validation))
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


def test_the_real_standard_library_is_found():
    train = load_documents(CorpusConfig(), "train")
    assert sum(len(document.text) for document in train) > 5_000_000
    parts = {part for name in _names(train) for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "__pycache__"})


def test_folder_with_splits_uses_them(tmp_path):
    config = _folder(tmp_path, {"train/b.txt": "b", "train/a.txt": "a", "validation/c.txt": "c"})
    train = [Document("a.txt", b"a"), Document("b.txt", b"b")]
    assert _splits(config) == [train, [Document("c.txt", b"c")]]


def test_folder_without_splits_is_split_by_name(tmp_path):
    config = _folder(tmp_path, {f"deep/{i}.txt": "x" for i in range(50)} | {"note.md": "no"})
    config = config.replace(validation_percent=40)
    train, validation = map(_names, _splits(config))
    assert sorted(train + validation) == sorted(f"deep/{i}.txt" for i in range(50))
    assert 10 <= len(validation) <= 30


def test_glob_selects_the_files(tmp_path):
    config = _folder(tmp_path, {"train/a.txt": "a", "train/b.md": "b", "validation/c.md": "c"})
    assert _names(load_documents(config.replace(glob="*.md"), "train")) == ["b.md"]


def test_one_file_is_split_after_a_line(tmp_path):
    text = "".join(f"line {i} é\n" for i in range(100)).encode()
    (tmp_path / "book.txt").write_bytes(text)
    config = CorpusConfig(kind="text", path=str(tmp_path / "book.txt"), validation_percent=10)
    (train,), (validation,) = _splits(config)
    assert train.name == validation.name == "book.txt"
    assert train.text + validation.text == text
    assert train.text.endswith(b"\n")
    assert len(text) * 0.1 <= len(validation.text) < len(text) * 0.12


def test_missing_or_empty_text_names_the_path_and_the_remedy(tmp_path):
    missing = CorpusConfig(kind="text", path=str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"no file or folder at .*absent: give the path of"):
        load_documents(missing, "train")
    config = _folder(tmp_path, {"train/a.txt": "", "validation/b.txt": "b"})
    with pytest.raises(DataError, match=r"the train split of .* is empty"):
        load_documents(config, "train")
    with pytest.raises(DataError, match=r"no file under .*train matches '\*\.md'"):
        load_documents(config.replace(glob="*.md"), "train")
    config = _folder(tmp_path / "all", {"a.txt": "a"}).replace(validation_percent=0)
    assert load_documents(config, "train")
    with pytest.raises(DataError, match=r"validation_percent=0\); add text, or give a folder"):
        load_documents(config, "validation")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "text"}, "kind 'text' takes the path"),
        ({"kind": "text", "path": ""}, "CorpusConfig.path is empty, as after a shell variable"),
        ({"path": "x"}, "kind 'stdlib' takes none"),
        ({"validation_files": 2}, "validation_files 2 is for files of yours: set kind 'text'"),
        ({"field": "body"}, "field 'body' is for files of yours"),
        ({"glob": "**/*.py"}, "is for files of yours"),
        ({"validation_percent": 100}, "validation_percent 100 must be between 0 and 99"),
        ({"glob": "/etc/*"}, r"glob /etc/\* must be a pattern below path, such as"),
        ({"glob": "../*"}, r"glob \.\./\* must be a pattern below path"),
        ({"glob": "a/../../*"}, "must be a pattern below path"),
        ({"glob": "**x"}, "must be a pattern below path"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(UserError, match=message):
        CorpusConfig(**fields)


def test_fingerprint_follows_names_and_contents():
    documents = [Document("a", b"bc"), Document("d", b"e")]
    changes = [
        [Document("a", b"bx"), Document("d", b"e")],
        [Document("ab", b"c"), Document("d", b"e")],
        [Document("a", b"bc"), Document("e", b"e")],
        documents[::-1],
        documents[:1],
    ]
    prints = {manifest(CorpusConfig(), each)["sha256"] for each in [documents, *changes]}
    assert len(prints) == len(changes) + 1
    content = b"".join(len(part).to_bytes(8) + part for part in (b"a", b"bc", b"d", b"e"))
    counts = {"kind": "stdlib", "num_documents": 2, "num_bytes": 3}
    digest = {"sha256": hashlib.sha256(content).hexdigest()}
    assert manifest(CorpusConfig(), list(documents)) == counts | digest


def test_streamed_documents_are_those_of_both_splits(tmp_path):
    config = _folder(tmp_path, {f"{i}.txt": "x" * i for i in range(40)})
    config = config.replace(validation_percent=30)
    streamed = list(stream_documents(config))
    assert [d.name for _, d in streamed] == sorted(f"{i}.txt" for i in range(1, 40))
    assert _splits(config) == [[d for s, d in streamed if s == split] for split in SPLITS]


def test_one_file_of_many_documents_is_split_by_their_names(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"body": "{i}"}}\n' for i in range(60)))
    config = CorpusConfig(kind="text", path=str(path), field="body", validation_percent=30)
    train, validation = _splits(config)
    assert 5 <= len(validation) <= 30
    everything = {Document(f"corpus.jsonl:{i}", b"%d" % i) for i in range(60)}
    assert {*train, *validation} == everything
    assert len(train) + len(validation) == 60


def test_nothing_is_held_out_of_a_file_without_a_last_line_break(tmp_path):
    (tmp_path / "book.txt").write_text("one line\nand half a")
    config = CorpusConfig(kind="text", path=str(tmp_path / "book.txt"), validation_percent=0)
    assert [d.text for d in load_documents(config, "train")] == [b"one line\nand half a"]


@pytest.mark.parametrize(
    ("text", "end"),
    [("one two three four " * 9, b" "), ("x" * 99, b"x"), ("\u65e5" * 50, "\u65e5".encode())],
)
def test_a_file_of_one_line_is_split_after_a_word_or_a_character(tmp_path, text, end):
    (tmp_path / "book.txt").write_text(text)
    config = CorpusConfig(kind="text", path=str(tmp_path / "book.txt"), validation_percent=10)
    (train,), (validation,) = _splits(config)
    assert (train.text + validation.text).decode() == text
    assert train.text.endswith(end)
    assert 0.1 <= len(validation.text) / len(text.encode()) < 0.2


@pytest.mark.parametrize("place", ["a.txt", "deep", "train"])
def test_links_that_leave_the_folder_are_refused(tmp_path, place):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s.txt").write_text("secret")
    config = _folder(tmp_path / "text", {"b.txt": "b", "validation/c.txt": "c"})
    target = tmp_path / "secret" / ("s.txt" if place == "a.txt" else "")
    (tmp_path / "text" / place).symlink_to(target)
    config = config.replace(glob="*.txt" if place != "deep" else "*/*.txt", validation_percent=0)
    with pytest.raises(DataError, match=rf"text/{place} is a link that leaves .*cp -rLl"):
        load_documents(config, "train")
    (tmp_path / "text" / place).unlink()
    (tmp_path / "text" / "d.txt").symlink_to("b.txt")  # one that stays
    (tmp_path / "link").symlink_to("text")
    config = config.replace(path=str(tmp_path / "link"), glob="*.txt")
    assert _names(load_documents(config, "train")) == ["b.txt", "d.txt"]


def test_the_name_of_a_file_may_be_any_bytes(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "wb") as file:
        file.write(b"text")
    config = CorpusConfig(kind="text", path=str(tmp_path), validation_percent=0)
    (document,) = load_documents(config, "train")
    assert os.fsencode(document.name) == b"\xff.txt"
    content = b"".join(len(part).to_bytes(8) + part for part in (b"\xff.txt", b"text"))
    assert manifest(config, [document])["sha256"] == hashlib.sha256(content).hexdigest()


def test_text_that_is_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("x" * 600)
    config = CorpusConfig(kind="text", path=str(tmp_path), validation_percent=0)
    monkeypatch.setattr("ttcd_jax.data.corpus.MAX_TEXT_BYTES", 1200)
    assert len(load_documents(config, "train")) == 2
    monkeypatch.setattr("ttcd_jax.data.corpus.MAX_TEXT_BYTES", 1199)
    remedy = f"experiments.prepare_data --input={tmp_path} --tokenizer=tokenizer.json"
    with pytest.raises(UserError, match=rf"1.17 KiB of text and more.*{remedy}"):
        load_documents(config, "train")


def test_the_last_files_of_a_folder_can_be_held_out(tmp_path):
    _folder(tmp_path, {f"sub/{i}.txt": "text" for i in range(5)} | {"sub/9.md": "no"})
    config = CorpusConfig(kind="text", path=str(tmp_path), validation_files=2)
    train, validation = _splits(config)
    assert _names(train) == ["sub/0.txt", "sub/1.txt", "sub/2.txt"]
    assert _names(validation) == ["sub/3.txt", "sub/4.txt"]
    with pytest.raises(DataError, match="has 5 files: 5 cannot be held out"):
        load_documents(config.replace(validation_files=5), "train")
    for place in ("sub/0.txt", "splits"):
        _folder(tmp_path / "splits", {"train/a.txt": "x", "validation/b.txt": "x"})
        with pytest.raises(DataError, match="it is one file or has its own splits"):
            load_documents(config.replace(path=str(tmp_path / place)), "train")


@pytest.mark.parametrize(
    ("others", "names"),
    [
        ([], ["a.txt", "sub/b.txt", "sub/lock"]),  # a lock that was left among text
        (["config.json"], ["a.txt"]),  # of a sweep
        (["study.json"], ["a.txt"]),
    ],
)
def test_runs_sweeps_and_studies_are_no_text(tmp_path, others, names):
    _folder(tmp_path, {"a.txt": "text", "sub/b.txt": "text", "sub/lock": "process 7 on x\n"})
    _folder(tmp_path / "run", {"lock": "process 7 on x\n", "data.json": "{}", ".data.json.7": "{"})
    _folder(tmp_path / "sub", dict.fromkeys(others, "{}"))
    config = CorpusConfig(kind="text", path=str(tmp_path), glob="**/[abl]*", validation_percent=0)
    assert _names(load_documents(config, "train")) == names


def test_links_of_the_hugging_face_cache_are_good_and_others_are_not(tmp_path):
    cache = tmp_path / "datasets--lab--set"
    _folder(cache, {"blobs/12": "text", "snapshots/1/data/no.md": "no"})
    (cache / "snapshots" / "1" / "data" / "a.txt").symlink_to("../../../blobs/12")
    for place in ("snapshots/1", "snapshots/1/data"):
        config = CorpusConfig(kind="text", path=str(cache / place), validation_percent=0)
        assert len(load_documents(config, "train")) == 1
    (tmp_path / "elsewhere.txt").write_text("text")
    (cache / "snapshots" / "1" / "b.txt").symlink_to("../../../elsewhere.txt")
    config = CorpusConfig(kind="text", path=str(cache / "snapshots" / "1"))
    with pytest.raises(DataError, match=r"b\.txt is a link that leaves"):
        load_documents(config, "train")
    (cache / "blobs").rename(tmp_path / "blobs")  # no cache any more
    (cache / "snapshots" / "1" / "b.txt").unlink()
    (cache / "a.txt").write_text("text")
    (cache / "snapshots" / "1" / "b.txt").symlink_to("../../a.txt")
    with pytest.raises(DataError, match=r"b\.txt is a link that leaves"):
        load_documents(config, "train")


def test_a_field_that_no_file_has_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    corpus = CorpusConfig(kind="text", path=str(tmp_path), field="nope", validation_percent=0)
    with pytest.raises(DataError, match="field 'nope' is for files of many documents"):
        load_documents(corpus, "train")
    (tmp_path / "b.jsonl").write_text('{"nope": "more"}')
    both = load_documents(corpus.replace(glob="**/*"), "train")
    assert [document.content for document in both] == [b"text", b"more"]
