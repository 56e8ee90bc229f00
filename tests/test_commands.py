"""A forked command behaves as one that is started."""

import commands
import pytest


@pytest.mark.parametrize("line", [("launch", "--help"), ("generate", "--run_dir=x")])
def test_it_says_the_same_and_ends_with_the_same_status(line):
    forked, started = (commands.run(*line, is_forked=is_forked) for is_forked in (True, False))
    assert forked.args == started.args
    expected = (started.returncode, started.stdout, started.stderr)
    assert (forked.returncode, forked.stdout, forked.stderr) == expected
