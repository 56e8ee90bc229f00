"""A run traces the steps it is told to trace, and again when it gets a signal."""

import signal
import subprocess

import commands
import tiny_run

BINDINGS = (*tiny_run.RECALL, "RunConfig.checkpoint_every=250")


def _traces(run_dir):
    folder = run_dir / "profile"
    return {file.relative_to(folder).parts[0] for file in folder.rglob("*.xplane.pb")}


def test_flag_and_signal_leave_traces_in_the_run_directory(tmp_path):
    flags = tiny_run.flags("recall.gin", *BINDINGS, "STEPS=1000000")
    places = f"--run_dir={tmp_path / 'run'}", f"--compile_cache={tmp_path / 'cache'}"
    line = ("launch", *flags, *places, "--profile=2:4")
    process = commands.start(*line, stdout=subprocess.DEVNULL)
    try:
        tiny_run.wait_until(lambda: _traces(tmp_path / "run"), process)
        assert _traces(tmp_path / "run") == {"step_2"}
        process.send_signal(signal.SIGUSR2)
        tiny_run.wait_until(lambda: len(_traces(tmp_path / "run")) == 2, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
    assert list((tmp_path / "cache").glob("jit_train_step-*"))
