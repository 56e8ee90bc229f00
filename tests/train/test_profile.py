import os
import signal
import warnings

import jax
import jax.numpy as jnp

from ttcd_jax.train.profile import STEPS_PER_SIGNAL, profiled, step_window


@jax.jit
def _step(state, batch):
    return state + batch["x"], {}


def _traces(folder, *, start, stop, window, signals=()):
    """The steps of each trace of a training."""
    state, batch = jnp.zeros(()), {"x": jnp.ones(())}
    with profiled(_step, folder, start=start, window=window) as step:
        for number in range(start, stop):
            if number in signals:
                os.kill(os.getpid(), signal.SIGUSR2)
            state, _ = step(state, batch)
    assert state == stop - start
    traces = {}
    for path in folder.iterdir():
        (file,) = path.rglob("*.xplane.pb")
        with warnings.catch_warnings(action="ignore"):  # of the reader's own types
            trace = jax.profiler.ProfileData.from_file(str(file))
            events = (event for x in trace.planes for line in x.lines for event in line.events)
            found = [dict(event.stats)["step_num"] for event in events if event.name == "train"]
        traces[path.name] = found
    return traces


def test_the_window_and_every_signal_leave_a_trace_of_whole_steps(tmp_path):
    # The second signal comes while the first one's steps are traced.
    found = _traces(tmp_path, start=0, stop=12, window=range(2, 4), signals=(7, 8))
    assert found == {"step_2": [2, 3], "step_7": [7, 8, 9]}
    assert STEPS_PER_SIGNAL == 3


def test_a_run_resumed_inside_its_window_or_after_it_traces_what_it_does(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    for window, traces in ((range(2, 4), {}), (step_window("2:100", 100), {"step_5": [5, 6]})):
        assert _traces(tmp_path, start=5, stop=7, window=window) == traces
    assert signal.getsignal(signal.SIGUSR2) == before
