"""Records, runs and files in buckets, on a server of this process that fails as asked."""

import errno
import fcntl
import os
import signal
from pathlib import Path
from unittest import mock

import commands
import corpora
import pytest
import tiny_run
from checks import refused
from object_store import ObjectStore, serving
from small_models import config_of, run_config

from ttcd_jax import files, load_run, storage, train_run
from ttcd_jax.data.records import prepare_records
from ttcd_jax.data.sources import RecordsConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import CheckpointError
from ttcd_jax.measure.page import Section
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.page import write_records


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """The server, empty; failures are repeated for a second."""
    with server.lock:
        server.objects.clear()
    server.fault, server.page = lambda method, name: None, 100
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "1")
    brief = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "100ms"}
    monkeypatch.setattr(storage, "RETRIES", brief)
    storage._bucket.cache_clear()
    move(monkeypatch, tmp_path / "copies")
    yield server
    server.fault = lambda method, name: None
    storage._bucket.cache_clear()


def move(monkeypatch, folder):
    """Goes on as another machine, without copies."""
    monkeypatch.setenv("TTCD_JAX_BUCKETS", str(folder))


def fails(store: ObjectStore, *faults, method="", name=""):
    """The next requests of a method and a name meet these faults."""
    left = iter(faults)

    def fault(found_method, found):
        if method in found_method and name in found:
            return next(left, None)
        return None

    store.fault = fault


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_file_or_folder_is_there_whole_or_not_at_all(scheme, store, tmp_path, monkeypatch):
    folder = storage.to_path(f"{scheme}://bucket/a/folder/")
    file, store.page = folder.parent / "x.json", 2
    assert storage.address(folder) == f"{scheme}://bucket/a/folder"
    files.write_json(file, {"x": 1})
    files.write_json(storage.to_path(f"{scheme}://bucket/a/folder2.json"), {})

    def fill(*names):
        with files.whole_folder(folder) as unfinished:
            for name in names:
                (unfinished / name).parent.mkdir(exist_ok=True)
                (unfinished / name).write_text(name)

    fails(store, None, None, 403, method="P", name="folder/")
    refused("cannot write|PERMISSION_DENIED|the credentials", fill, "a", "left", "sub/b")
    assert ".unfinished" in store.names("bucket/a/folder/")
    assert not folder.exists()
    move(monkeypatch, tmp_path / "others")
    folder = storage.to_path(f"{scheme}://bucket/a/folder/")
    refused("its writer was killed|bucket/a/folder'", storage.fetch, folder, error=OSError)
    fill("a", "b", "sub/c")
    assert store.names("bucket/a/folder/") == ["a", "b", "sub/c"]
    refused("folder exists and|choose another", fill, "a")

    move(monkeypatch, tmp_path / "third")
    there = storage.copy_of(f"{scheme}://bucket/a")
    assert files.read_json(there / "x.json") == {"x": 1}
    assert (there / "folder/sub/c").read_text() == "sub/c"
    count = len(store.log)
    (there / "x.json").write_text("mine")
    storage.fetch(there)
    assert {status for _, name, status in store.log[count:] if "?" not in name} == {304}
    assert (there / "x.json").read_text() == "mine"
    with store.lock:
        store.objects["bucket/a/x.json"] = 10**6, b"theirs"
        del store.objects["bucket/a/folder/b"]
    error = OSError(errno.ENOSYS, "no locks")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    storage.fetch(there)
    assert (there / "x.json").read_text() == "theirs"
    assert not (there / "folder/b").exists()


def test_an_upload_that_is_interrupted_keeps_the_folder(store, monkeypatch):
    folder = storage.to_path("gs://bucket/records")
    with monkeypatch.context() as patched:
        patched.setattr(storage, "_upload", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), files.whole_folder(folder, os.listdir) as unfinished:
            (unfinished / "shard").write_text("an hour's work")
    assert not folder.exists()
    with files.whole_folder(folder, os.listdir) as unfinished:
        assert (unfinished / "shard").read_text() == "an hour's work"
    assert store.names("bucket/records/") == ["shard"]


def test_records_of_pages_are_written_into_a_bucket(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section, runs = Section("title", [{"name": "a", "loss": 1.5}]), [Path("of no environment")]
    write_records("s3://bucket/x.jsonl", [section], runs, "x")
    assert store.names("bucket/") == ["x.jsonl"]
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_server_that_fails_for_a_while_is_asked_again(scheme, store):
    path = storage.to_path(f"{scheme}://bucket/a/x")
    fails(store, 503, 500, 429)
    files.write_whole(path, b"content")
    fails(store, 1.5, 0.2, 503)
    assert storage.names(path.parent) == ["x"]
    path.unlink()
    fails(store, 500, 0.2, 503)
    assert storage.fetch(path).read_bytes() == b"content"
    fails(store, *[503] * 99)
    refused("503|the network|bucket/a/x'", storage.fetch, path, error=OSError)
    refused("cannot write|503|bucket/a/x", files.write_whole, path, b"new")
    assert store.objects["bucket/a/x"][1] == b"content"


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_one_process_has_a_run_until_it_shows_no_life(scheme, store, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LEASE_SECONDS", 0.8)
    monkeypatch.setattr(storage, "_RACE_SECONDS", 0.1)
    run = f"{scheme}://bucket/run"
    path = storage.to_path(run)
    with RunDirectory(run).lock():
        first = storage._leases[path]
        refused("in use by process", RunDirectory(run).lock().__enter__)
        refused("in use by process", storage.lease(path).__enter__)  # of another machine
        first._is_over.set()  # it is stopped
        with storage.lease(path):
            refused("process |has taken the run", first.renew, error=OSError)
            first.end()
            assert store.names("bucket/run/") == ["lock"]
    assert store.names("bucket/run/") == []


def _kills(store, process, method, end, is_applied):
    """Kills the process at its first request of a method whose name has this end."""

    def fault(found_method, name):
        if (method, True) == (found_method, name.endswith(end)):
            process[0].send_signal(signal.SIGKILL)
            process[0].wait()
            return None if is_applied else 503
        return None

    store.fault = fault


KILLS = [
    ("PUT", "checkpoints/4/DIGEST.json", False, "compiling its step"),  # has metrics, no checkpoint
    ("DELETE", "checkpoints/4/DIGEST.json", True, "resumed at step 12"),
]


def test_a_run_killed_anywhere_goes_on_elsewhere_with_the_same_losses(store, tmp_path, monkeypatch):
    more = "STEPS=16", "RunConfig.keep_checkpoints=2"
    flags = tiny_run.flags("recall.gin", *tiny_run.RECALL, *more)
    commands.output("launch", *flags, f"--run_dir={tmp_path}/plain")
    process, resumed = [], ""
    for turn, kill in enumerate([*KILLS, None]):
        move(monkeypatch, tmp_path / f"machine{turn}")
        store.objects.pop("bucket/run/lock", None)  # as if a minute had passed
        if kill:
            _kills(store, process, *kill[:3])
        line = "launch", *flags, "--run_dir=s3://bucket/run"
        process[:] = [commands.start(*line, stdout=-1, stderr=-1)]
        output, errors = process[0].communicate(timeout=200)
        assert process[0].returncode == (-signal.SIGKILL if kill else 0), errors
        assert resumed in output
        store.fault, resumed = (lambda method, name: None), kill and kill[3]
    run = RunDirectory("s3://bucket/run")
    assert tiny_run.losses(run.path) == tiny_run.losses(tmp_path / "plain")
    steps = {name.split("/")[0] for name in store.names("bucket/run/checkpoints/")}
    assert steps == {"12", "16"}
    assert "bucket/run/lock" not in store.objects


def test_another_machine_reads_records_and_runs(store, tmp_path, monkeypatch, caplog):
    corpus = corpora.text_folder(tmp_path / "text", ["one text " * 99, "another text " * 99])
    with files.whole_folder(storage.to_path("gs://bucket/records")) as folder:
        prepare_records(corpus, TokenizerConfig(), folder)
    data, run = RecordsConfig(paths="gs://bucket/records", seq_len=8), "gs://bucket/run"
    model = config_of("swa").replace(vocab_size=258)
    config = run_config(model, steps=4, data=data, checkpoint_every=2)
    train_run(config, run)
    move(monkeypatch, tmp_path / "others")
    left = storage.to_path(run) / "checkpoints/4/params/d/left"  # by a process killed here
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of another save of this step")
    replace = Path.replace

    def killed(path, target):
        if "checkpoints/4/params" in str(target):
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            load_run(run)
    loaded = load_run(run)
    assert loaded.step == 4
    assert data.open("train")[0].read(0, 0, 4).tolist() == [256, *b"one"]
    object_ = next(x for x in store.names("bucket/") if "run/checkpoints/4/params/d/" in x)
    with store.lock:
        generation, content = store.objects["bucket/" + object_]
        store.objects["bucket/" + object_] = generation, content[:-1] + bytes([content[-1] ^ 1])
    move(monkeypatch, tmp_path / "third")
    assert load_run(run).step == 2
    assert "refused damaged or unsealed checkpoint step 4" in caplog.text
    fails(store, *[503] * 10**4, method="P", name="checkpoints/6/")
    longer, changes = config.replace(steps=6), {"changes": ["RunConfig.steps"]}
    words = "step 6 was not saved|503|last good step: 4"
    refused(words, train_run, longer, run, error=CheckpointError, **changes)
