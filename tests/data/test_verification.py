"""When files are compared with their digests: before use, once, and again after every change."""

import os
import threading
import time

import pytest

from ttcd_jax.data import verification
from ttcd_jax.data.verification import VerifiedFiles
from ttcd_jax.files import difference, sha256


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """The names of the files that were read; files count as settled at once."""
    names = []

    def counted(path, *facts):
        names.append(path.name)
        return difference(path, *facts)

    monkeypatch.setattr(verification, "difference", counted)
    monkeypatch.setattr(verification, "_SETTLED", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


@pytest.fixture
def expected(tmp_path):
    paths = [tmp_path / f"shard{number}" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    return [(path, 100, sha256(path)) for path in paths]


def _problems(expected):
    files = VerifiedFiles(expected)
    return {files.problem(number) for number in range(len(expected))}


def test_a_restart_reads_only_what_changed(expected, reads):
    assert _problems(expected) == {None}
    assert sorted(reads) == [path.name for path, *_ in expected]
    assert _problems(expected) == {None}
    assert len(reads) == len(expected)
    path = expected[3][0]
    path.rename(path.with_name("copy"))
    path.write_bytes(path.with_name("copy").read_bytes())
    assert _problems(expected) == {None}
    assert reads[len(expected) :] == ["shard3"]


def test_a_change_behind_size_and_time_is_found(expected, reads):
    assert _problems(expected) == {None}
    path = expected[2][0]
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert _problems(expected) <= {None, f"{path}: its content changed"} != {None}
    files = VerifiedFiles(expected)
    for _ in range(2):
        assert files.problem(2) == f"{path}: its content changed"
    with path.open("r+b") as file:
        file.write(b"\x02")
    assert _problems(expected) == {None}


def test_a_file_that_has_just_changed_leaves_no_marker(expected, reads, monkeypatch, tmp_path):
    monkeypatch.setattr(verification, "_SETTLED", 3600)
    assert _problems(expected) == _problems(expected) == {None}
    assert len(reads) == 2 * len(expected)
    assert not (tmp_path / "cache").exists()


def test_a_reader_waits_for_its_files_alone(expected, monkeypatch):
    """Four threads are held by four files, and the two others are compared by their reader."""
    held, started = threading.Event(), threading.Semaphore(0)
    mine = threading.get_ident()

    def slow(path, *facts):
        if threading.get_ident() != mine:
            started.release()
            assert held.wait(60)
        return difference(path, *facts)

    monkeypatch.setattr(verification, "difference", slow)
    monkeypatch.setattr(verification.random, "Random", lambda seed: _InOrder())
    files = VerifiedFiles(expected)
    for _ in range(4):
        assert started.acquire(timeout=60)
    try:
        assert files.problem(0) is None  # it, and the last file, which belongs to all
    finally:
        held.set()
    assert files.problem(2) is None


class _InOrder:
    def sample(self, numbers, count):
        return [0, 5, *range(1, 5)]  # taken from the end


def test_of_two_processes_one_reads_a_file(expected, reads, monkeypatch):
    counted = verification.difference

    def slow(*file):
        time.sleep(0.05)
        return counted(*file)

    monkeypatch.setattr(verification, "difference", slow)
    for files in [VerifiedFiles(expected) for _ in range(3)]:
        assert [files.problem(number) for number in range(6)] == [None] * 6
    assert sorted(reads) == [path.name for path, *_ in expected]


def test_without_a_cache_folder_every_start_reads(expected, reads, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _problems(expected) == _problems(expected) == {None}
    assert len(reads) == 2 * len(expected)
    expected[1][0].unlink()
    assert VerifiedFiles(expected).problem(1) == f"{expected[1][0]}: missing"
