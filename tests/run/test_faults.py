"""Files of a run on a machine with faults: full disks, no locks, odd files."""

import contextlib
import errno
import fcntl
import os
import shutil
import struct
from pathlib import Path
from unittest import mock

import commands
import corpora
import pytest
import tiny_run
from checks import files_of_at_most, refused
from small_models import run_config
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from experiments.studies.mad.records import claim
from ttcd_jax import files, train_run
from ttcd_jax.errors import DataError
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.reporting import MetricFiles, read_metrics
from ttcd_jax.run.training import check


def _steps(run_dir):
    return [record["step"] for record in read_metrics(run_dir / "metrics.jsonl")]


def test_what_a_full_disk_refused_is_written_when_there_is_room(tmp_path, caplog):
    metrics = MetricFiles(tmp_path, 0)
    for step in range(1, 13):
        with files_of_at_most(350) if 4 <= step < 10 else contextlib.nullcontext():
            metrics.write(step, {"loss": float(step)})
    assert _steps(tmp_path) == [*range(1, 13)]
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = [(e.step, e.summary.value[0].simple_value) for e in _events(path)[2:]]
    assert events == [(step, float(step)) for step in range(1, 13)]
    assert len(caplog.messages) <= 2


def _events(path: Path) -> list[Event]:
    """The events of a file of TensorBoard, their checksums verified."""
    content, events = path.read_bytes(), []
    while content:
        size = struct.unpack("<Q", content[:8])[0]
        parts = (content[:8], content[8:12]), (content[12 : 12 + size], content[12 + size :][:4])
        for part, checksum in parts:
            assert struct.unpack("<I", checksum)[0] == masked_crc32c(part)
        events.append(Event.FromString(parts[1][0]))
        content = content[16 + size :]
    return events


def test_a_file_that_cannot_grow_holds_a_bounded_number_of_bytes(tmp_path, caplog):
    (tmp_path / "folder").write_text("a file in its place")
    file = files.GrowingFile(tmp_path / "folder" / "file")
    for _ in range(30):
        file.append(bytes(100_000))
    (tmp_path / "folder").unlink()
    (tmp_path / "folder").mkdir()
    file.append(b"")
    assert (tmp_path / "folder" / "file").stat().st_size == files._MAX_WAITING
    assert len(caplog.messages) == 1


def test_a_run_directory_that_is_removed_is_not_made_anew(tmp_path, caplog):
    metrics = MetricFiles(tmp_path / "run", 0)
    metrics.write(1, {"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    for step in (2, 3):
        metrics.write(step, {"loss": 1.0})
    assert not (tmp_path / "run").exists()
    assert len(caplog.messages) == 2  # metrics and events


def test_metrics_that_cannot_be_flushed_do_not_stop_the_start(tmp_path, monkeypatch, caplog):
    error = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=error))
    MetricFiles(tmp_path, 0).write(1, {"loss": 1.0})
    assert _steps(tmp_path) == [1]
    assert any("metrics.jsonl cannot be written: Input/output" in x for x in caplog.messages)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    with RunDirectory(tmp_path / "run").lock(), claim(tmp_path / "records" / "job") as is_ours:
        assert is_ours
    with files.whole_folder(tmp_path / "folder") as folder:
        (folder / "part").write_text("text")
    assert (tmp_path / "folder" / "part").exists()


def test_files_and_folders_of_another_kind_are_refused_in_one_line_and_stay(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("metrics.jsonl", "zero"):
        words = f"{name} is no regular file; move it away"
        refused(words, read_metrics, tmp_path / name, error=DataError)
    name = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    refused("not UTF-8: choose another, or set LC_ALL=C.UTF-8", RunDirectory, name)
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "mine")
    refused("symbolic links", RunDirectory(tmp_path / "run").lock().__enter__)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, flush, rename = [], os.fsync, Path.replace

    def replace(path, to):
        calls.append("rename")
        return rename(path, to)

    def fsync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    files.write_whole(tmp_path / "file", "text")
    assert calls == [f".file.{os.getpid()}", "rename", tmp_path.name]
    calls.clear()
    with files.whole_folder(tmp_path / "folder") as folder:
        (folder / "part").write_text("text")
    assert calls == [".folder.unfinished", "part", "rename", tmp_path.name]


@pytest.mark.parametrize("names", [["config.gin"], ["data.json"], ["environment.json", "notes"]])
def test_a_folder_of_another_kind_is_never_claimed_and_keeps_no_lock(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    refused("is not empty and holds no run", train_run, run_config(), tmp_path)
    refused("is not empty and holds no run", check, run_config(), RunDirectory(tmp_path))
    check(run_config(), None)  # a plan of no folder
    assert {path.name for path in tmp_path.iterdir()} == {*names}


def test_a_run_directory_in_its_own_corpus_is_no_document(tmp_path):
    corpora.text_folder(tmp_path, ["some words on a line\n" * 50] * 4)
    sizes = "STEPS=4", f"TEXT='{tmp_path}'", "CorpusConfig.glob='**/*'", "TextConfig.seq_len=16"
    line = "launch", *tiny_run.flags("text.gin", *sizes), f"--run_dir={tmp_path / 'runs' / 'own'}"
    assert commands.run(*line).stderr == ""
    assert (tmp_path / "runs" / "own" / "checkpoints" / "4").is_dir()
    assert "is complete at step 4" in commands.output(*line)
