"""Faults of the machine under a run: full disks, power loss, kills, files that vanish."""

import errno
import fcntl
import os
import resource
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import commands
import pytest
import tiny_run
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from experiments.studies.mad.records import claim
from ttcd_jax import files
from ttcd_jax.errors import DataError, ResourceError, UserError
from ttcd_jax.files import GrowingFile, write_whole
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.reporting import MetricFiles, read_metrics

KILLED_CLAIM = """
import os, signal, sys
from pathlib import Path

from ttcd_jax.run.bindings import load_config
from ttcd_jax import RunConfig
from ttcd_jax.run.directory import RunDirectory

config = load_config(RunConfig, "recall.gin", config_dir=Path("experiments/configs")).to_dict()
replace, renamed = Path.replace, []

def killed(self, target):
    renamed.append(target)
    if len(renamed) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)

Path.replace = killed
directory = RunDirectory(sys.argv[1])
with directory.lock():
    directory.claim(config, "text", {"num_documents": 1})
"""
# A run whose sixth report raises an error.
FAILING = """
import sys
from pathlib import Path

from experiments import cli
from ttcd_jax.run.bindings import load_config
from ttcd_jax import RunConfig, train_run
from ttcd_jax.errors import CheckpointError, DataError
from ttcd_jax.train.loop import MetricCallback

def fail(step, metrics):
    if step == 6:
        raise ERROR

def main(argv):
    config = load_config(RunConfig, "recall.gin", argv[2:], config_dir=Path("experiments/configs"))
    train_run(config, argv[1], on_metrics=[MetricCallback(1, fail)])

cli.run(main, arguments=None)
"""
# `experiments.launch`, whose terminal hangs up after its fifth report.
HUNG_UP = """
import os, runpy, signal

from ttcd_jax.run.reporting import MetricFiles

write = MetricFiles.write

def report(self, step, metrics):
    is_new = write(self, step, metrics)
    if step == 5:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
    return is_new

MetricFiles.write = report
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup
runpy.run_module("experiments.launch", run_name="__main__", alter_sys=True)
"""
LAST = "; last good checkpoint: step 4; the same command goes on\n"
LAUNCH = ("launch", *tiny_run.flags("recall.gin", *tiny_run.RECALL))


def _run(run_dir: Path, **options) -> subprocess.CompletedProcess:
    return commands.run(*LAUNCH, f"--run_dir={run_dir}", **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("faults") / "whole"
    assert _run(run_dir).returncode == 0
    return run_dir


@pytest.fixture
def finished_copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounts no disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def limited():
    """Limits the size of files to so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_under_a_run_ends_it_with_need_and_free(finished, small_disk):
    run_dir = small_disk / "run"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = commands.start(*LAUNCH, f"--run_dir={run_dir}", **pipes)
    tiny_run.wait_for_step(run_dir, 5, process)
    process.send_signal(signal.SIGSTOP)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while filler.stat().st_size < 2**20:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ResourceError.exit_code, errors
    *warnings, line = errors.splitlines()
    assert " was not saved: No space left on device (it needs about " in line
    assert all("cannot be written: No space left on device" in text for text in warnings)
    assert len(warnings) <= 2
    filler.unlink()
    assert _run(run_dir).returncode == 0
    assert tiny_run.losses(run_dir) == tiny_run.losses(finished)


@pytest.mark.parametrize(
    ("error", "status", "end"),
    [
        ("DataError('a.txt has gone')", 3, LAST),
        ("RuntimeError('RESOURCE_EXHAUSTED: no memory')", 6, LAST),
        ("RuntimeError('INTERNAL: Out of memory allocating 64 bytes')", 6, LAST),
        ("CheckpointError('none is intact')", 4, "error: none is intact\n"),
    ],
)
def test_a_run_that_fails_names_its_last_checkpoint(tmp_path, error, status, end):
    program = tmp_path / "failing.py"
    program.write_text(FAILING.replace("ERROR", error))
    bindings = *tiny_run.BINDINGS, *tiny_run.RECALL
    message = commands.mistake(commands.run(program, tmp_path / "run", *bindings), status)
    assert message.endswith(end)


def test_what_a_full_disk_refused_is_written_when_there_is_room(tmp_path, limited, caplog):
    metrics = MetricFiles(tmp_path, 0)
    for step in range(1, 13):
        limited(350 if 4 <= step < 10 else None)
        metrics.write(step, {"loss": float(step)})
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [
        *range(1, 13)
    ]
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert [(e.step, e.summary.value[0].simple_value) for e in _events(path)[2:]] == [
        (step, float(step)) for step in range(1, 13)
    ]
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
    file = GrowingFile(tmp_path / "folder" / "file")
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
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    MetricFiles(tmp_path, 0).write(1, {"loss": 1.0})
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert any("metrics.jsonl cannot be written: Input/output" in x for x in caplog.messages)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def refused(file, kind):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with RunDirectory(tmp_path / "run").lock(), claim(tmp_path / "records" / "job") as is_ours:
        assert is_ours
    with files.whole_folder(tmp_path / "folder") as folder:
        (folder / "part").write_text("text")
    assert (tmp_path / "folder" / "part").exists()


def test_a_folder_that_is_refused_keeps_no_lock(tmp_path):
    (tmp_path / "mine").write_text("mine")
    message = commands.mistake(_run(tmp_path))
    assert "is not empty and holds no run" in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_without_events_is_a_warning(finished_copy):
    shutil.rmtree(finished_copy / "tensorboard")
    shutil.rmtree(finished_copy / "checkpoints" / "24")
    (finished_copy / "tensorboard").write_text("a file in its place")
    result = _run(finished_copy)
    assert result.returncode == 0
    assert "resumed at step 20" in result.stdout
    assert result.stderr.count("\n") == 1
    assert "cannot be written" in result.stderr


@pytest.mark.parametrize("tail", [bytes(300) + b"\n", b'{"step": 25, "lo\xff\n', b"[]\n3\n{}\n"])
def test_damaged_metrics_do_not_stop_a_restart(finished, finished_copy, tail):
    path = finished_copy / "metrics.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + tail + rest + tail)
    shutil.rmtree(finished_copy / "checkpoints" / "24")
    result = _run(finished_copy)
    assert result.returncode == 0, result.stderr
    assert f"{2 * tail.count(b'\n')} of " in result.stderr
    assert tiny_run.losses(finished_copy) == tiny_run.losses(finished)


def test_metrics_that_are_no_regular_file_are_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("metrics.jsonl", "zero"):
        with pytest.raises(DataError, match=f"{name} is no regular file; move it away"):
            read_metrics(tmp_path / name)


def test_a_run_directory_whose_name_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"not UTF-8: choose another, or set LC_ALL=C\.UTF-8"):
        RunDirectory(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="symbolic links"), RunDirectory(tmp_path / "run").lock():
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    flush, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(_name(fd)), flush(fd)))
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (calls.append("rename"), replace(self, to))
    )
    write_whole(tmp_path / "file", "text")
    assert calls == [f".file.{os.getpid()}", "rename", tmp_path.name]
    calls.clear()
    with files.whole_folder(tmp_path / "folder") as folder:
        (folder / "part").write_text("text")
    assert calls == [".folder.unfinished", "part", "rename", tmp_path.name]


def _name(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


@pytest.mark.parametrize("killed_at", range(1, 5))
def test_a_claim_that_was_killed_is_taken_up_again(tmp_path, killed_at):
    program, run_dir = tmp_path / "claim.py", tmp_path / "run"
    program.write_text(KILLED_CLAIM)
    assert commands.run(program, run_dir, str(killed_at)).returncode == -signal.SIGKILL
    assert not (run_dir / "config.json").exists()
    assert commands.run(program, run_dir, "0").returncode == 0
    names = {"config.json", "config.gin", "data.json", "environment.json", "lock"}
    assert {path.name for path in run_dir.iterdir()} == names
    assert commands.run(program, run_dir, "0").returncode == 0


@pytest.mark.parametrize("names", [["config.gin"], ["data.json"], ["environment.json", "notes"]])
def test_a_folder_of_another_kind_is_never_claimed(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    directory = RunDirectory(tmp_path)
    with directory.lock(), pytest.raises(UserError, match="is not empty and holds no run"):
        directory.claim({}, "text", {})
    assert {path.name for path in tmp_path.iterdir()} == {*names, "lock"}


def test_a_run_directory_in_its_own_corpus_is_no_document(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("some words on a line\n" * 50)
    sizes = "STEPS=4", f"TEXT='{tmp_path}'", "CorpusConfig.glob='**/*'", "TextConfig.seq_len=16"
    line = "launch", *tiny_run.flags("text.gin", *sizes), f"--run_dir={tmp_path / 'runs' / 'own'}"
    assert commands.run(*line).stderr == ""
    assert (tmp_path / "runs" / "own" / "checkpoints" / "4").is_dir()
    assert "is complete at step 4" in commands.output(*line)


@pytest.mark.parametrize("is_folder_left", [True, False])
def test_vanished_checkpoints_are_refused(finished_copy, is_folder_left):
    shutil.rmtree(finished_copy / "checkpoints")
    if is_folder_left:
        (finished_copy / "checkpoints").mkdir()
    before = (finished_copy / "metrics.jsonl").read_bytes()
    message = commands.mistake(_run(finished_copy), status=4)
    assert "metrics.jsonl reports 24 steps and " in message
    assert "checkpoints holds no checkpoint: restore a copy, or " in message
    assert (finished_copy / "metrics.jsonl").read_bytes() == before


def test_a_terminal_that_is_gone_saves_the_run(finished, tmp_path):
    program, run_dir = tmp_path / "hung_up.py", tmp_path / "run"
    program.write_text(HUNG_UP)
    reader, terminal = os.pipe()
    os.close(reader)
    result = commands.run(program, *LAUNCH[1:], f"--run_dir={run_dir}", stdout=terminal)
    os.close(terminal)
    assert result.returncode == 75, result.stderr
    assert "standard output cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1
    assert 5 <= tiny_run.losses(run_dir)[-1][0] < 24
    assert "resumed at step" in _run(run_dir).stdout
    assert tiny_run.losses(run_dir) == tiny_run.losses(finished)


def test_output_on_a_full_disk_does_not_end_a_run(finished, tmp_path):
    with open("/dev/full", "w") as full:
        process = commands.start(*LAUNCH, f"--run_dir={tmp_path}", stdout=full)
        assert process.wait(100) == 0
    assert tiny_run.losses(tmp_path) == tiny_run.losses(finished)
