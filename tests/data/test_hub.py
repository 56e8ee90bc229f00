"""`prepare_data --source` against a server on this machine (fake_hub.py)."""

import json
import os

import commands
import corpora
import fake_hub
import pytest
from checks import refused
from fake_hub import SHA

from ttcd_jax.data.hub import parse_source
from ttcd_jax.data.records import open_records, read_manifest

TEXTS = {f"data/part-{i}.jsonl": f"text {i}" for i in range(4)}


@pytest.fixture
def hub():
    files = {name: json.dumps({"text": text}).encode() for name, text in TEXTS.items()}
    return fake_hub.Hub("lab/set", files | {"README.md": b"about", "data/more.jsonl.gz": b"x"})


def _prepare(run, hub, folder, source, *flags, variables=None, **options):
    with fake_hub.serve(hub) as address:
        environment = commands.cpu_environment(HF_ENDPOINT=address, HF_HOME=str(folder / "home"))
        environment.pop("HF_HUB_OFFLINE", None)
        environment |= {"NO_PROXY": "127.0.0.1"} | (variables or {})
        given = ("--tokenizer=byte", f"--output={folder / 'records'}", f"--source={source}", *flags)
        return run("prepare_data", *given, env=environment, **options)


def _texts(folder, split):
    records = open_records(folder / "records", split)
    ids = [records.read(i, 1, size - 1) for i, size in enumerate(records.sizes)]
    return [bytes(x.astype("u1")).decode() for x in ids]


def test_files_of_a_data_set_are_downloaded_once(hub, tmp_path):
    flags = ("--glob=**/*.jsonl", "--validation_files=1", f"--download={tmp_path / 'cache'}")
    _prepare(commands.output, hub, tmp_path, "lab/set@main", *flags)
    assert _texts(tmp_path, "train") == list(TEXTS.values())[:3]
    assert _texts(tmp_path, "validation") == ["text 3"]
    gets = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert sorted(gets) == [f"/datasets/lab/set/resolve/{SHA}/{name}" for name in TEXTS]
    os.rename(tmp_path / "records", tmp_path / "first")
    hub.asked.clear()
    _prepare(commands.output, hub, tmp_path, f"lab/set@{SHA}:data/*.jsonl", *flags[1:])
    assert not [method for method, path in hub.asked if "/resolve/" in path]
    snapshot = tmp_path / "cache" / "datasets--lab--set" / "snapshots" / SHA
    os.rename(tmp_path / "records", tmp_path / "second")
    given = ("--tokenizer=byte", f"--input={snapshot}", "--glob=data/*.jsonl", flags[1])
    commands.output("prepare_data", *given, f"--output={tmp_path / 'records'}")
    manifests = [read_manifest(tmp_path / name) for name in ("first", "second", "records")]
    assert len({manifest["sha256"] for manifest in manifests}) == 1


def test_a_named_data_set_is_read_as_it_was_published(tmp_path):
    columns = {"input_ids": ("ndarray:uint32", None, [corpora.mds_array(range(16))])}
    index = corpora.mds(tmp_path, columns, num_shards=1)
    parts = {x.name: x.read_bytes() for x in (index, index.with_name("shard.00000.mds"))}
    folders = ("book-65536/proc00-64", "book-65536/proc63-64", "arxiv/proc00-64")
    files = {f"{folder}/{name}": x for folder in folders for name, x in parts.items()}
    files["book-65536/index.json"] = b"of all parts"
    hub = fake_hub.Hub("princeton-nlp/prolong-data-64K", files)
    out = _prepare(commands.output, hub, tmp_path, "prolong_64k_books", "--validation_percent=0")
    assert "train: 2 documents" in out
    records = open_records(tmp_path / "records", "train")
    assert records.samples_are_rows
    assert records.read(1, 0, 16).tolist() == list(range(16))
    asked = [path.partition(SHA)[2] for method, path in hub.asked if method == "HEAD"]
    assert len(asked) == 4
    assert all(path.startswith("/book-65536/proc") for path in asked)


@pytest.mark.parametrize(
    ("source", "answer", "variables", "status", "message"),
    [
        ("lab/nothing", {}, {}, 3, "/lab/nothing is not there, or private: check the name"),
        ("lab/set@next", {}, {}, 3, "/datasets/lab/set has no such revision"),
        ("lab/set:*.csv", {}, {}, 3, "/datasets/lab/set has no file that matches '*.csv'"),
        ("long_data_collections", {}, {}, 3, "/emozilla/Long-Data-Collections-Pretrain-Without-"),
        ("lab/set", {"status": 401}, {}, 3, "/lab/set is gated: accept its terms there, and set"),
        ("lab/set", {"status": 403}, {}, 3, "/datasets/lab/set is gated"),
        ("lab/set", {"status": 500}, {}, 3, "lab/set cannot be downloaded (Server error '500"),
        ("lab/set", {}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, 3, "or give a local copy by --inp"),
        ("lab/set", {}, {"HF_HUB_OFFLINE": "1"}, 3, "unset the `HF_HUB_OFFLINE`"),
        ("lab/set", {}, {"HF_ENDPOINT": "hub.local"}, 2, "HF_ENDPOINT='hub.local' is no address"),
        ("lab/set", {}, {"HF_ENDPOINT": "http://x:y"}, 2, "HF_ENDPOINT='http://x:y' is no addre"),
    ],
)
def test_what_the_hub_refuses(hub, tmp_path, source, answer, variables, status, message):
    vars(hub).update(answer)
    options = {"variables": variables, "status": status}
    assert message in _prepare(commands.refused, hub, tmp_path, source, **options)
    assert not (tmp_path / "records").exists()


def test_a_cut_download_and_a_name_outside_the_folder_are_refused(hub, tmp_path):
    hub.cut = 3
    result = _prepare(commands.run, hub, tmp_path, "lab/set:data/part-0.jsonl")
    assert (result.returncode, result.stdout) == (3, "")
    assert "1 files (18 bytes) of http" in result.stderr
    assert "cannot be downloaded (peer closed connection" in result.stderr
    hub.cut, hub.files["../../x.jsonl"] = 0, b"{}"
    result = _prepare(commands.run, hub, tmp_path / "other", "lab/set:**/*.jsonl")
    assert (result.returncode, result.stdout) == (3, "")
    assert "'../../x.jsonl'" in result.stderr
    assert not list(tmp_path.rglob("x.jsonl"))


def test_names_and_what_is_none():
    source = parse_source("lab/set@v1.0:a/**/*.parquet")
    assert source[:3] == ("lab/set", "v1.0", "a/**/*.parquet")
    for text in ("lab", "nothing_known", "lab/set/more", "../set", "lab/..", "lab/set@", ""):
        refused("is neither one of long_data_collections, prolong", parse_source, text)
