"""A run traces the steps it is told to trace, and again when it gets a signal."""

import signal
import subprocess
import time

import commands

RUN = (
    "--gin=recall.gin",
    "--param=RunConfig.steps=1000000",
    "--param=RunConfig.batch_size=1",
    "--param=TransformerConfig.num_layers=1",
    "--param=TransformerConfig.fast_layers=(0,)",
    "--profile=2:4",
)


def _wait_for_traces(folder, count, process):
    deadline, traces = time.monotonic() + 100, set()
    while len(traces) < count:
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"{count} traces were not written"
        time.sleep(0.05)
        traces = {file.relative_to(folder).parts[0] for file in folder.rglob("*.xplane.pb")}
    return traces


def test_flag_and_signal_leave_traces_in_the_run_directory(tmp_path):
    places = f"--run_dir={tmp_path}", f"--compile_cache={tmp_path / 'cache'}"
    process = commands.start("launch", *RUN, *places, stdout=subprocess.DEVNULL)
    try:
        assert _wait_for_traces(tmp_path / "profile", 1, process) == {"step_2"}
        process.send_signal(signal.SIGUSR2)
        assert len(_wait_for_traces(tmp_path / "profile", 2, process)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
    assert list((tmp_path / "cache").glob("jit_train_step-*"))


def test_a_window_that_the_run_never_reaches_is_refused(tmp_path):
    places = f"--run_dir={tmp_path / 'run'}", "--compile_cache="
    result = commands.run("launch", "--gin=recall.gin", "--profile=2:281", *places)
    message = commands.mistake(result)
    assert "'2:281' is not START:STOP with 0 <= START < STOP <= 280" in message
    assert not (tmp_path / "run").exists()
