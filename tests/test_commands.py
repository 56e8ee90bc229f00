"""A forked command behaves as one that is started, and so does one of several in a process."""

import signal
import subprocess

import commands
import pytest

LINES = [("launch", "--help"), ("launch", "--prams=x"), ("generate", "--run_dir=x")]


@pytest.mark.parametrize("line", LINES)
def test_it_says_the_same_and_ends_with_the_same_status(line):
    forked, started = (commands.run(*line, is_forked=is_forked) for is_forked in (True, False))
    assert forked.args == started.args
    expected = (started.returncode, started.stdout, started.stderr)
    assert (forked.returncode, forked.stdout, forked.stderr) == expected
    assert commands.ends([*LINES, line])[-1] == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it(number):
    arguments = ("generate", "--run_dir=x", "--prompt_file=-")  # waits for its input
    with commands.start(*arguments, stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=60) == -number


def test_variables_that_jax_reads_when_it_is_imported_are_refused():
    with pytest.raises(AssertionError, match="is_forked=False"):
        commands.start("launch", env=commands.cpu_environment(JAX_ENABLE_X64="1"))
