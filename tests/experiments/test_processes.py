"""The launch and the evaluation on several processes: what they compute, and how they end."""

import fcntl
import json
import random
import re
import shutil
import signal
import socket
import subprocess

import commands
import numpy as np
import pytest
import tiny_run
from devices import fake_devices

from experiments.launch import RESUME_ME
from ttcd_jax.errors import UserError
from ttcd_jax.train.watchdog import PEER_LOST

BINDINGS = (
    *("TextConfig.seq_len=16", "RunConfig.batch_size=4", "RunConfig.keep_checkpoints=10"),
    *("STEPS=32", "RunConfig.mesh=@MeshConfig()", "MeshConfig.data=2", "MeshConfig.seq=2"),
)
TOLERANCE = 1e-5
CHANGE = ["--change=RunConfig.checkpoint_every"]
# Gloo's threads print piece by piece, mixed with each other.
GLOO = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is|\d|:"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words, rng = ("memory", "window", "teacher", "student", "chunk"), random.Random(0)
    lines = [" ".join(rng.choices(words, k=10)) for _ in range(100)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def start():
    """Starts the processes of one job: `start(module, [arguments of each], devices=of each)`; all
    are killed at the end."""
    started = []

    def start(module, arguments, devices, **options):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        environment = commands.cpu_environment(XLA_FLAGS=fake_devices(devices))
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
        job = []
        for number, own in enumerate(arguments):
            if len(arguments) > 1:
                own = [*own, f"--distributed=localhost:{port},{len(arguments)},{number}"]
            job.append(commands.start(module, *own, **options))
        started.extend(job)
        return job

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def launch(start, text):
    def launch(run_dir, *bindings, num_processes=2, devices=2, changes=(), **options):
        flags = tiny_run.flags("text.gin", f"TEXT='{text}'", *BINDINGS, *bindings)
        arguments = [*flags, *changes, f"--run_dir={run_dir}", "--hang_seconds=5"]
        return start("launch", [arguments] * num_processes, devices, **options)

    return launch


def _end(process, *statuses, timeout=200):
    """(stdout, last line of stderr) of a process that ends with 0, or with one of `statuses`."""
    stdout, stderr = process.communicate(timeout=timeout)
    assert process.returncode in (statuses or (0,)), (process.returncode, stdout, stderr)
    return stdout, stderr.rstrip().rpartition("\n")[2]


@pytest.fixture(scope="module")
def whole(launch, tmp_path_factory):
    """An uninterrupted run of two processes with two devices each."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    outputs = [_end(process)[0] for process in launch(run_dir, is_forked=False)]
    return run_dir, outputs


def test_processes_train_what_one_trains(whole, launch, tmp_path):
    run_dir, _ = whole
    (alone,) = launch(tmp_path / "run", num_processes=1, devices=4)
    _end(alone)
    np.testing.assert_allclose(
        tiny_run.losses(run_dir), tiny_run.losses(tmp_path / "run"), rtol=TOLERANCE
    )


def test_the_first_process_prints_and_all_write_one_checkpoint(whole):
    run_dir, (first, second) = whole
    assert "trained 32 steps" in first
    assert GLOO.sub("", second).split() == []
    steps = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert steps == [*range(4, 33, 4)]
    written = {path.name for path in (run_dir / "checkpoints" / "32" / "params").glob("ocdbt.*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}


def test_other_processes_and_another_mesh_go_on(whole, launch, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole[0], run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name) > 24:
            shutil.rmtree(path)
    mesh = ("MeshConfig.data=1", "MeshConfig.seq=4")
    job = launch(run_dir, *mesh, num_processes=4, devices=1)
    outputs = [_end(process)[0] for process in job]
    assert "resumed at step 24\n" in outputs[0]
    np.testing.assert_allclose(tiny_run.losses(run_dir), tiny_run.losses(whole[0]), rtol=TOLERANCE)


def test_processes_start_from_another_run_as_one_does(whole, launch, tmp_path):
    changes = [
        "RunConfig.steps=2",
        f"RunConfig.start_from='{whole[0]}'",
        "RunConfig.start_drops=('*/rate', '*_conv')",
        "TransformerConfig.method='ipttt'",
        "TransformerConfig.memory=@TargetMemoryConfig()",
        "TargetMemoryConfig.chunk_size=4",
    ]
    outputs = [_end(process)[0] for process in launch(tmp_path / "two", *changes)]
    assert "dropped: layers/0/mlp/rate" in outputs[0]
    assert "initialised: layers/0/mlp/target_conv" in outputs[0]
    (alone,) = launch(tmp_path / "one", *changes, num_processes=1, devices=4)
    _end(alone)
    losses = tiny_run.losses(tmp_path / "one")
    assert losses[0][1] < tiny_run.losses(whole[0])[0][1]
    np.testing.assert_allclose(tiny_run.losses(tmp_path / "two"), losses, rtol=TOLERANCE)


def test_the_same_command_goes_on_after_every_end(whole, launch, tmp_path):
    """All killed in a save; one killed; one stopped; SIGTERM to one: in the end the losses are
    those of the run that nothing interrupted, to the last bit."""
    run_dir = tmp_path / "run"
    job = launch(run_dir)
    tiny_run.wait_until(lambda: [*(run_dir / "checkpoints").glob("8.orbax-checkpoint-tmp*")], *job)
    for process in job:
        process.kill()

    job = launch(run_dir)
    tiny_run.wait_for_step(run_dir, 9, *job)
    job[1].kill()
    output, line = _end(job[0], PEER_LOST)
    assert re.search(r"resumed at step [48]\n", output)
    # A device may notice the loss while its neighbour waits for it: then the watchdog reports.
    assert re.match("error: (another process was lost|no step for)", line)

    # Without a save, in which the watchdog waits and JAX's heartbeat would report.
    job = launch(run_dir, "RunConfig.checkpoint_every=100", changes=CHANGE)
    tiny_run.wait_for_step(run_dir, 13, *job)
    job[1].send_signal(signal.SIGSTOP)
    assert _end(job[0], PEER_LOST)[1].startswith("error: no step for ")
    job[1].kill()

    job = launch(run_dir, changes=CHANGE)
    tiny_run.wait_for_step(run_dir, 18, *job)
    job[1].send_signal(signal.SIGTERM)
    outputs = [_end(process, RESUME_ME)[0] for process in job]
    stopped = re.search(r"stopped by SIGTERM at step (\d+), checkpoint saved; run", outputs[0])
    assert stopped

    job = launch(run_dir)
    outputs = [_end(process)[0] for process in job]
    assert f"resumed at step {stopped[1]}\n" in outputs[0]
    np.testing.assert_array_equal(tiny_run.losses(run_dir), tiny_run.losses(whole[0]))


def test_a_signal_to_one_process_saves_in_all_and_they_go_on(whole, launch, tmp_path):
    job = launch(tmp_path, "RunConfig.checkpoint_every=100")
    tiny_run.wait_for_step(tmp_path, 3, *job)
    job[1].send_signal(signal.SIGUSR1)
    for process in job:
        _end(process)
    step, last = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert 3 < step < last == 32
    written = {
        path.name for path in (tmp_path / "checkpoints" / str(step) / "params").glob("ocdbt.*")
    }
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}
    np.testing.assert_array_equal(tiny_run.losses(tmp_path), tiny_run.losses(whole[0]))


@pytest.mark.parametrize(("leaver", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_one_that_leaves_before_the_first_step_ends_the_other(launch, tmp_path, leaver, number):
    job = launch(tmp_path)
    tiny_run.wait_until((tmp_path / "config.json").exists, *job)
    job[leaver].send_signal(number)
    assert re.match(
        "error: (another process was lost|no step)", _end(job[1 - leaver], PEER_LOST)[1]
    )
    job[leaver].kill()


def test_ctrl_c_in_the_terminal_of_all_stops_them_after_one_step(launch, tmp_path):
    job = launch(tmp_path)
    tiny_run.wait_for_step(tmp_path, 5, *job)
    for process in job:
        process.send_signal(signal.SIGINT)
    first, second = [_end(process, RESUME_ME) for process in job]
    step = re.search(r"stopped by SIGTERM at step (\d+), checkpoint saved", first[0])[1]
    assert (tmp_path / "checkpoints" / step).is_dir()
    assert not re.search("Traceback", second[0])


def test_a_directory_in_use_is_refused_by_all(launch, tmp_path):
    with (tmp_path / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        first, second = launch(tmp_path)
        assert "is in use by" in _end(first, UserError.exit_code)[1]
        assert "another process was lost" in _end(second, PEER_LOST, timeout=60)[1]


@pytest.mark.parametrize(
    ("differing", "line"),
    [
        ("--param=RunConfig.batch_size=8", "batch_size: process 1 has 8, process 0 has 4; "),
        ("--param=MemoryConfig.eta=0.9", "model.memory.eta: process 1 has 0.9, process 0 has "),
        ("--run_dir={}/other", 'run_dir: process 1 has "{}/other", process 0 has "{}/run"; '),
        ("--profile=3:5", 'profile: process 1 has "range(3, 5)", process 0 has "range(0, 0)"; '),
        ("--param=TEXT='{}/other.txt'", "num_bytes: process 1 has 17095, process 0 has "),
    ],
)
def test_processes_that_differ_end_before_the_first_step(start, text, tmp_path, differing, line):
    (tmp_path / "other.txt").write_text("other words\n" * 1000 + "\f" + "words\n" * 1000)
    flags = [*tiny_run.flags("text.gin", f"TEXT='{text}'", *BINDINGS), f"--run_dir={tmp_path}/run"]
    job = start("launch", [flags, [*flags, differing.format(tmp_path)]], 2)
    for process in job:
        _, error = _end(process, UserError.exit_code)
        assert error.startswith("error: the processes of this job differ: ")
        assert line.format(tmp_path, tmp_path) in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_copies_of_the_data_may_lie_elsewhere(start, text, tmp_path):
    shutil.copy(text, tmp_path / text.name)
    flags = [*tiny_run.flags("text.gin", *BINDINGS, "STEPS=2"), f"--run_dir={tmp_path}/run"]
    places = [f"--param=TEXT='{path}'" for path in (text, tmp_path / text.name)]
    for process in start("launch", [[*flags, place] for place in places], 2):
        _end(process)


def test_evaluations_that_differ_end_before_they_measure(whole, start):
    arguments = [f"--run_dir={whole[0]}", "--task=ppl", "--batch_size=4"]
    job = start("evaluate", [arguments, [*arguments, "--max_rows=10"]], 2)
    for process in job:
        assert (
            "max_rows: process 1 has 10, process 0 has 512, "
            in _end(process, UserError.exit_code)[1]
        )


def test_evaluation_on_any_devices_is_that_of_one(whole, start):
    run_dir, _ = whole
    arguments = [f"--run_dir={run_dir}", "--task=ppl", "--max_rows=10", "--batch_size=4"]
    sizes = {1: [arguments], 4: [arguments], 2: [[*arguments, "--mesh=seq=2"]] * 2}
    found = []
    for devices, every in sizes.items():
        outputs = [_end(process)[0] for process in start("evaluate", every, devices)]
        assert ["written to" in output for output in outputs] == [True, False][: len(every)]
        result = json.loads((run_dir / "eval" / "ppl" / "results.json").read_text())
        found.append({name: rows[-1]["perplexity"] for name, rows in result["series"].items()})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=TOLERANCE)
