"""The end of a command: exit status, one line for a user's mistake, a traceback for ours."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import commands
import pytest

from ttcd_jax.units import printable

PROGRAM = """
    import sys
    from absl import flags
    from experiments import cli
    from ttcd_jax.errors import CheckpointError, DataError, UserError

    WIDTH = flags.DEFINE_integer("width", 3, "How wide.")
    flags.DEFINE_string("name", None, "Whose.")
    flags.DEFINE_list("names", [], "Of whom.")

    def main(argv):
        {body}

    if __name__ == "__main__":
        cli.run(main)
"""


@pytest.fixture
def command(tmp_path: Path):
    """Runs a command whose main has the given body."""

    def run(body: str, *arguments: str, shell: str = "") -> subprocess.CompletedProcess:
        script = tmp_path / "command.py"
        script.write_text(textwrap.dedent(PROGRAM).format(body=body))
        line = [sys.executable, str(script), *arguments]
        if shell:
            line = ["bash", "-c", f'set -o pipefail; "$0" "$@" {shell}', *line]
        return subprocess.run(line, capture_output=True, text=True, timeout=30)

    return run


def test_success_prints_and_leaves_with_zero(command):
    result = command("print(WIDTH.value, len(argv))", "--width=5")
    assert (result.returncode, result.stdout, result.stderr) == (0, "5 1\n", "")


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ("raise UserError('steps 3\\n\\x1b[31mred')", 2, "error: steps 3\\n\\x1b[31mred\n"),
        ("raise DataError('no text')", 3, "error: no text\n"),
        ("raise CheckpointError('damaged')", 4, "error: damaged\n"),
        ("from ttcd_kernels import dispatch as d; raise d.Unsupported('GPU')", 2, "error: GPU\n"),
        ("open('/no/such')", 2, "error: /no/such: No such file or directory\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        (
            "sys.path.insert(0, '/nowhere'); import absent.part",
            2,
            "error: this needs absent, which is missing: pip install absent\n",
        ),
    ],
)
def test_an_end_that_is_no_defect_of_ours_is_one_line_and_a_status(command, body, status, line):
    result = command(body)
    assert (result.returncode, result.stderr) == (status, line)


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('RESOURCE_EXHAUSTED: 9 bytes\\nmore')", "bytearray(2**62)"]
)
def test_exhausted_memory_is_one_line_with_the_remedy(command, body):
    result = command(body)
    assert result.returncode == 6
    assert re.fullmatch(
        r"error: out of memory \(.*\): take .* launch --dry_run .*\n", result.stderr
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--name=", "error: --name is empty, as after a shell variable that is not set"),
        ("--name=gs://bucket/x", "error: --name 'gs://bucket/x' is in a bucket"),
        ("--names=a,s3://b/x", "error: --names 's3://b/x' is in a bucket"),
        ("--names=", "error: --names is empty"),
        ("", "error: an argument is empty"),
    ],
)
def test_empty_flags_and_buckets_are_refused(command, argument, message):
    result = command("pass", argument)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(message)


@pytest.mark.parametrize(
    "error",
    ["ValueError('shape')", "BrokenPipeError('worker')", "ImportError('name')"],
)
def test_our_own_defect_keeps_its_traceback(command, error):
    result = command(f"raise {error}")  # the pipe is not our output
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    kind, text = error.removesuffix("')").split("('")
    assert f"{kind}: {text}" in result.stderr


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--widht=3", "error: Unknown command line flag 'widht'. Did you mean: width"),
        ("--width=three", "error: flag --width=three: invalid literal"),
        ("leftover", "error: unexpected argument 'leftover'; options are written --name=value"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_two(command, argument, expected):
    result = command("pass", argument)
    assert result.returncode == 2
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1


def test_help_succeeds_without_loading_jax(command):
    result = command("pass", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--width: How wide." in result.stdout
    loaded = "import sys, experiments.cli, ttcd_jax.run.bindings; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "False\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("evaluate --task=ruler --help", "--lengths=4096"),
        ("evaluate --help --task=final_block", "documents have `min_doc_tokens`"),
        ("bench step --help", "--rounds=5"),
        ("evaluate --help", ""),
        ("evaluate --task=absent --help", ""),
    ],
)
def test_help_has_the_options_of_what_is_chosen(line, expected):
    shown = commands.output(*line.split())
    assert ("options and their defaults:" in shown) == bool(expected)
    assert expected.lower() in shown.lower()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_a_reader_that_goes_away_is_no_error(command, arguments, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    body = "[print('x' * 1000) for _ in range(1000)]"
    result = command(body, *arguments, shell="| true")
    assert (result.returncode, result.stderr) == (141, "")


def test_closed_standard_streams_are_opened_on_nothing(command, tmp_path):
    body = "print(1); file = open('file.txt', 'w'); file.write('mine'); file.close()"
    body = body.replace("file.txt", str(tmp_path / "file.txt"))
    assert command(body, shell="<&- >&-").returncode == 0
    assert (tmp_path / "file.txt").read_text() == "mine"


def test_output_on_a_full_disk_is_one_line(command):
    result = command("print(1)", shell="> /dev/full")
    assert result.returncode == 6
    assert result.stderr == "error: [Errno 28] No space left on device: make room\n"


def test_an_error_that_cannot_be_printed_keeps_its_status(command):
    assert command("raise DataError('no such file')", shell="2> /dev/full").returncode == 3


def test_control_characters_are_escaped():
    assert printable("café \x1b[2J\u202e\n\udcff") == "café \\x1b[2J\\u202e\\n\\udcff"
    for mark in "\x9b\u061c\u200f\u2028\u2029\u2066\u2069\ud800":
        assert printable(mark) == mark.encode("unicode_escape").decode()


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("JAX_PLATFORMS", "foo", "error: Unable to initialize backend 'foo': "),
        ("JAX_PLATFORMS", "cuda", "error: JAX_PLATFORMS=cuda has no device here: unset it"),
        ("JAX_DISABLE_JIT", "1", "error: JAX_DISABLE_JIT is set, and programs here are compiled"),
        ("JAX_ENABLE_X64", "maybe", "error: invalid truth value 'maybe' for environment 'JAX_"),
    ],
)
def test_a_variable_with_which_jax_cannot_start_is_one_line(
    command, monkeypatch, variable, value, line
):
    monkeypatch.setenv(variable, value)
    result = command("import jax.numpy as jnp; jnp.zeros(1)")
    assert result.stderr.startswith(line)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


def test_a_failed_assertion_of_ours_keeps_its_traceback(command):
    result = command("import jax; assert not argv")
    assert (result.returncode, "Traceback" in result.stderr) == (1, True)


def test_control_characters_are_escaped_where_text_leaves():
    code = (
        "import sys; from absl import logging; from experiments import cli; "
        "cli.open_standard_streams();"
        "print('a\\x1b]0;x\\x07\\u202e\\udcff\\tb'); logging.warning('c\\x1b[2J');"
        "print('\\r\\x1b[Kd', end='')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"a\\x1b]0;x\\x07\\u202e\\udcff\tb\n\r\x1b[Kd"
    assert b"c\\x1b[2J\n" in done.stderr
