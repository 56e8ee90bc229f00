"""The launch and the evaluation on several processes: what they compute, and how they end."""

import json
import os
import random
import re
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import mock

import commands
import jax
import numpy as np
import pytest
import tiny_run
from devices import fake_devices
from flax import nnx
from object_store import serving

from ttcd_jax import load_run, storage
from ttcd_jax.errors import CheckpointError, UserError
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.train import digest
from ttcd_jax.train.watchdog import PEER_LOST

BINDINGS = (
    *("TextConfig.seq_len=16", "RunConfig.batch_size=4", "STEPS=16"),
    *("RunConfig.mesh=@MeshConfig()", "MeshConfig.data=2", "MeshConfig.seq=2"),
)
FLAGS = tiny_run.flags("text.gin", *BINDINGS)
TOLERANCE = 1e-5
# Gloo's threads print piece by piece, mixed with each other.
GLOO = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is|\d|:"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two copies of a text."""
    words, rng = ("memory", "window", "teacher", "student", "chunk"), random.Random(0)
    lines = [" ".join(rng.choices(words, k=10)) for _ in range(100)]
    paths = [tmp_path_factory.mktemp(name) / "words.txt" for name in "ab"]
    for path in paths:
        path.write_text("\n".join(lines))
    return paths


@pytest.fixture(scope="module")
def start():
    """Starts the processes of a job: `start(module, [arguments of each], devices=of each)`, with
    their own `variables` if given."""
    started = []

    def start(module, arguments, devices, variables=({},) * 9, **options):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        job = []
        for number, own in enumerate(arguments):
            if len(arguments) > 1:
                own = [*own, f"--distributed=localhost:{port},{len(arguments)},{number}"]
            own_variables = {"XLA_FLAGS": fake_devices(devices)} | variables[number]
            environment = commands.cpu_environment(**own_variables)
            job.append(commands.start(module, *own, env=environment, **options))
        started.extend(job)
        return job

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _end(process, status=0):
    """(stdout, last line of stderr) of a process that ends with a status."""
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == status, (process.returncode, stdout, stderr)
    return stdout, stderr.rstrip().rpartition("\n")[2]


def _flags(run_dir, text, *bindings):
    return [*FLAGS, *tiny_run.params(f"TEXT='{text}'", *bindings), f"--run_dir={run_dir}"]


@pytest.fixture(scope="module")
def whole(start, texts, tmp_path_factory):
    """A run of two processes with two devices each, whose copies of the data lie elsewhere."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    job = start("launch", [_flags(run_dir, text) for text in texts], 2, is_forked=False)
    return run_dir, [_end(process)[0] for process in job]


def test_processes_train_what_one_does_and_all_write_one_checkpoint(whole, start, texts, tmp_path):
    run_dir, (first, second) = whole
    (alone,) = start("launch", [_flags(tmp_path, texts[0])], 4)
    _end(alone)
    np.testing.assert_allclose(tiny_run.losses(run_dir), tiny_run.losses(tmp_path), rtol=TOLERANCE)
    assert "trained 16 steps" in first
    assert GLOO.sub("", second).split() == []
    steps = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert steps == [8, 12, 16]
    written = {path.name for path in (run_dir / "checkpoints" / "16" / "params").glob("ocdbt.*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}


def test_processes_start_from_another_run_as_one_does(whole, start, texts, tmp_path):
    changes = (
        *("RunConfig.steps=2", f"RunConfig.start_from='{whole[0]}'"),
        "RunConfig.start_drops=('*/rate', '*_conv')",
        *("TransformerConfig.method='ipttt'", "TransformerConfig.memory=@TargetMemoryConfig()"),
        "TargetMemoryConfig.chunk_size=4",
    )
    flags = _flags(tmp_path / "two", texts[0], *changes)
    outputs = [_end(process)[0] for process in start("launch", [flags, flags], 2)]
    assert "dropped: layers/0/mlp/rate" in outputs[0]
    assert "initialised: layers/0/mlp/target_conv" in outputs[0]
    (alone,) = start("launch", [_flags(tmp_path / "one", texts[0], *changes)], 4)
    _end(alone)
    losses = tiny_run.losses(tmp_path / "one")
    assert losses[0][1] < tiny_run.losses(whole[0])[0][1]
    np.testing.assert_allclose(tiny_run.losses(tmp_path / "two"), losses, rtol=TOLERANCE)


def test_machines_without_a_disk_in_common_train_into_a_bucket(whole, start, texts, tmp_path):
    """One may not upload its part, and says so; the next job, whose machines changed places, finds
    the step before damaged. Its losses and parameters are those of processes that share a disk."""
    with serving() as store:
        machines = [{"TTCD_JAX_BUCKETS": str(tmp_path / x)} | store.environment() for x in "ab"]
        flags = [_flags("s3://bucket/run", text) for text in texts]
        part = "bucket/run/checkpoints/12/params/ocdbt.process_1"
        other = part.replace("params", "train") + "/"

        def refused(method: str, name: str) -> int | None:
            if method != "PUT" or part not in name:
                return None
            for _ in range(100):  # until something of the step is there
                if store.names(other):
                    break
                time.sleep(0.05)
            return 403

        store.fault = refused
        short = [[*x, "--hang_seconds=10"] for x in flags]
        first, second = start("launch", short, 2, machines)
        _, error = _end(second, CheckpointError.exit_code)
        assert error.startswith(
            "error: checkpoint step 12 was not saved: OSError: [Errno 5] PERMIS"
        )
        assert error.endswith("; last good step: in the log of process 0")
        _, error = _end(first, PEER_LOST)
        assert "another process was lost" in error
        store.fault = lambda method, name: None
        assert store.names(other)
        store.objects.pop("bucket/run/lock", None)  # as if a minute had passed
        name = next(
            x for x in store.names("bucket/") if "checkpoints/8/train/ocdbt.process_1/d" in x
        )
        generation, content = store.objects["bucket/" + name]
        store.objects["bucket/" + name] = (
            generation + 10**6,
            content[:-1] + bytes([content[-1] ^ 1]),
        )
        first, _ = (_end(x)[0] for x in start("launch", flags, 2, machines[::-1]))
        assert "resumed at step 4" in first, first
        with mock.patch.dict(os.environ, machines[0] | {"TTCD_JAX_BUCKETS": str(tmp_path / "c")}):
            run = RunDirectory("s3://bucket/run")
            assert tiny_run.losses(run.path) == tiny_run.losses(whole[0])
            for step in (8, 12, 16):
                storage.fetch(run.checkpoints / str(step))
                assert digest.verify(run.checkpoints / str(step)) == []
            found, expected = (load_run(x).model for x in ("s3://bucket/run", whole[0]))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))
    for machine in "ab":
        assert not [*tmp_path.glob(f"{machine}/s3/bucket/run/checkpoints/*tmp")]


@pytest.fixture
def short_path():
    """A folder whose path an error shows whole."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("command", "differing", "words"),
    [
        (
            *("launch", "--run_dir={0}/other --profile=3:5 --param=MemoryConfig.eta=0.9"),
            'run_dir: process 1 has "{0}/other", process 0 has "{0}/r|profile: process 1 has '
            '"range(3, 5)", process 0 has "range(|model.memory.eta: process 1 has 0.9, process 0 ',
        ),
        ("launch", "--param=TEXT='{}/other.txt'", "num_bytes: process 1 has 17095, process 0 has "),
        ("evaluate", "--max_rows=10", "max_rows: process 1 has 10, process 0 has 512, "),
    ],
)
def test_processes_that_differ_do_not_start(
    whole, start, texts, short_path, command, differing, words
):
    (short_path / "other.txt").write_text("other words\n" * 1000 + "\f" + "words\n" * 1000)
    flags = [f"--run_dir={whole[0]}", "--task=ppl", "--batch_size=4"]
    if command == "launch":
        flags = _flags(short_path / "run", texts[0])
    differing, words = (x.format(short_path) for x in (differing, words))
    for process in start(command, [flags, [*flags, *differing.split()]], 2):
        _, error = _end(process, UserError.exit_code)
        assert error.startswith("error: the processes of this job differ: ")
        assert all(part in error for part in words.split("|")), error
    assert not (short_path / "run" / "metrics.jsonl").exists()


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
