"""A run traces the steps it is told to trace, and again when it gets a signal."""

import os
import signal
import subprocess
import sys
import time

RUN = (
    "--gin=recall.gin",
    "--param=RunConfig.steps=1000000",
    "--param=RunConfig.batch_size=1",
    "--param=TransformerConfig.num_layers=1",
    "--param=TransformerConfig.fast_layers=(0,)",
    "--profile=2:4",
)


def _wait_for_traces(folder, count, process):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended too early"
        traces = {file.relative_to(folder).parts[0] for file in folder.rglob("*.xplane.pb")}
        if len(traces) >= count:
            return traces
        time.sleep(0.05)
    raise AssertionError(f"{count} traces were not written")


def test_flag_and_signal_leave_traces_in_the_run_directory(tmp_path):
    line = [sys.executable, "-m", "experiments.launch", *RUN, f"--run_dir={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [*line, f"--compile_cache={tmp_path / 'cache'}"], env=environment, stdout=subprocess.DEVNULL
    )
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
    line = [sys.executable, "-m", "experiments.launch", "--gin=recall.gin", "--profile=2:281"]
    line += [f"--run_dir={tmp_path / 'run'}", "--compile_cache="]
    result = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert "'2:281' is not START:STOP with 0 <= START < STOP <= 280" in result.stderr
    assert not (tmp_path / "run").exists()
