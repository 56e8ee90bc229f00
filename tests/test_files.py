"""Atomic files and folders: after a kill or a failure nothing half-written has the final name."""

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from checks import refused
from safetensors.numpy import save_file

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import check_unused, read_arrays, whole_file, whole_folder, write_whole

KILLED = """
import os, signal, sys
from pathlib import Path

from ttcd_jax import files

with getattr(files, sys.argv[1])(Path(sys.argv[2])) as unfinished:
    file = unfinished / "part" if unfinished.is_dir() else unfinished
    file.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("form", [whole_file, whole_folder])
def test_a_killed_process_leaves_the_name_as_it_was(form, tmp_path):
    command = [sys.executable, "-c", KILLED, form.__name__, tmp_path / "new"]
    done = subprocess.run(command, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name.startswith(".new.") for p in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize("form", [whole_file, whole_folder])
@pytest.mark.parametrize(
    ("error", "reported"), [(OSError(28, "No space left"), UserError), (KeyError("x"), KeyError)]
)
def test_an_error_leaves_nothing(form, error, reported, tmp_path):
    def fail():
        with form(tmp_path / "new") as unfinished:
            (unfinished / "part" if unfinished.is_dir() else unfinished).write_text("half")
            raise error

    with pytest.raises(reported):
        fail()
    assert os.listdir(tmp_path) == []


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "old")
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with contextlib.suppress(KeyError), whole_file(path) as unfinished:
        unfinished.write_text("newer")
        raise KeyError
    write_whole(tmp_path / "deep" / "file", b"\xff")
    assert (path.read_text(), (tmp_path / "deep" / "file").read_bytes()) == ("new", b"\xff")
    assert sorted(os.listdir(tmp_path)) == ["deep", "file"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_follow_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "folder") as folder, whole_file(folder / "file") as file:
            save_file({"x": np.zeros(2)}, file)  # makes files of mode 0600
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("folder", "folder/file")]
    assert modes == [0o777 & ~umask, 0o666 & ~umask]


def test_a_place_that_cannot_be_used_or_is_being_filled_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("mine")
    words = "cannot write |/file/x: |; choose another folder"
    refused(words, write_whole, tmp_path / "file" / "x", "")
    with pytest.raises(UserError, match="not an empty folder"), whole_folder(tmp_path):
        pass
    for used in (tmp_path, tmp_path / "file"):
        refused("exists and is not an empty folder", check_unused, used)
    with whole_folder(tmp_path / "new") as folder:
        (folder / "x").write_text("mine")
        busy = pytest.raises(UserError, match="is being written by another process")
        with busy, whole_folder(tmp_path / "new"):
            pass
        assert (folder / "x").read_text() == "mine"
    assert os.listdir(tmp_path / "new") == ["x"]
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "new"]


def test_arrays_that_would_not_fit_are_not_read(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1000))
    assert read_arrays(tmp_path / "a.npz")["x"].size == 1000
    monkeypatch.setattr("ttcd_jax.files._MOST_ARRAY_BYTES", 8000)
    words = "8128 bytes of arrays, at most 8000 are read"
    refused(words, read_arrays, tmp_path / "a.npz", error=DataError)
