"""The end of a command: exit status, one line for a user's mistake, a traceback for ours."""

import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import commands
import jax
import pytest

from ttcd_jax.commands.cli import keep_programs
from ttcd_jax.units import printable

PROGRAM = """
    import sys
    from absl import flags
    from ttcd_jax.commands import cli
    from ttcd_jax.errors import CheckpointError, DataError, UserError

    WIDTH = flags.DEFINE_integer("width", 3, "How wide.")
    flags.DEFINE_string("name", None, "Whose.")
    flags.DEFINE_list("names", [], "Of whom.")
    flags.DEFINE_string("records", None, "Rows of pages, which may be in a bucket.")

    def main(argv):
        {body}

    if __name__ == "__main__":
        cli.run(main)
"""
JAX = "import jax.numpy as jnp; jnp.zeros(1)"
# What a command does, its argument, status and words of its line.
MISTAKES = [
    ("raise UserError('steps 3\\n\\x1b[31mred')", "", 2, "error: steps 3\\n\\x1b[31mred\n"),
    ("raise DataError('no text')", "", 3, "error: no text\n"),
    ("raise CheckpointError('damaged')", "", 4, "error: damaged\n"),
    ("from ttcd_kernels import dispatch as d; raise d.Unsupported('GPU')", "", 2, "error: GPU"),
    ("open('/no/such')", "", 2, "error: /no/such: No such file or directory\n"),
    ("sys.path.insert(0, '/x'); import absent.part", "", 2, "error: this needs absent, which "),
    ("raise RuntimeError('RESOURCE_EXHAUSTED: 9\\nmore')", "", 6, "out of memory (RES|--dry_run "),
    ("bytearray(2**62)", "", 6, "error: out of memory (): take a smaller batch, "),
    ("pass", "--name=", 2, "error: --name is empty, as after a shell variable that is not set"),
    ("pass", "--name=gs://bucket/x", 2, "error: --name 'gs://bucket/x' is in a bucket"),
    ("pass", "--names=a,s3://b/x", 2, "error: --names 's3://b/x' is in a bucket"),
    ("pass", "--names=", 2, "error: --names is empty"),
    ("pass", "", 2, "error: an argument is empty"),
    ("pass", "--widht=3", 2, "error: Unknown command line flag 'widht'. Did you mean: width"),
    ("pass", "--width=three", 2, "error: flag --width=three: invalid literal"),
    ("pass", "leftover", 2, "error: unexpected argument 'leftover'; options are written --na"),
]


def _script(path: Path, body: str) -> Path:
    path.write_text(textwrap.dedent(PROGRAM).format(body=body))
    return path


@pytest.fixture
def command(tmp_path: Path):
    """Runs a command whose main has the given body."""

    def run(body: str, *arguments: str, shell: str = "") -> subprocess.CompletedProcess:
        line = [sys.executable, str(_script(tmp_path / "command.py", body)), *arguments]
        if shell:
            line = ["bash", "-c", f'set -o pipefail; "$0" "$@" {shell}', *line]
        return subprocess.run(line, capture_output=True, text=True, timeout=30)

    return run


def test_an_end_that_is_no_defect_of_ours_is_one_line_and_a_status(tmp_path):
    for body, argument, *ending in MISTAKES:
        line = [_script(tmp_path / "command.py", body), argument][: 2 if body == "pass" else 1]
        commands.refuse([(line, *ending)])
    result = commands.run(_script(tmp_path / "command.py", "raise KeyboardInterrupt"))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        ("JAX_PLATFORMS=foo", "Unable to initialize backend 'foo': "),
        ("JAX_PLATFORMS=cuda", "JAX_PLATFORMS=cuda has no device here: unset it"),
        ("JAX_DISABLE_JIT=1", "JAX_DISABLE_JIT is set, and programs here are "),
        ("JAX_ENABLE_X64=maybe", "invalid truth value 'maybe' for environment 'J"),
    ],
)
def test_a_variable_with_which_jax_does_not_start_is_one_line(command, monkeypatch, variable, line):
    monkeypatch.setenv(*variable.split("="))
    assert commands.mistake(command(JAX)).startswith(f"error: {line}")


def test_our_own_defect_keeps_its_traceback(command):
    for body in ("raise BrokenPipeError('worker')", "raise ImportError('name')"):
        result = command(body)
        assert result.returncode == 1
        assert "Traceback" in result.stderr
    result = command("import jax; assert not argv")
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "AssertionError")


def test_success_and_help_leave_with_zero_without_loading_jax(command):
    result = command("print(WIDTH.value, len(argv))", "--width=5", "--records=s3://b/x")
    assert (result.returncode, result.stdout, result.stderr) == (0, "5 1\n", "")
    result = command("pass", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--width: How wide." in result.stdout
    loaded = "import sys, ttcd_jax.commands.cli, ttcd_jax.run.bindings; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "False\n"


def test_help_has_the_options_of_what_is_chosen():
    expected = {
        "evaluate --task=ruler --help": "--lengths=4096",
        "evaluate --help --task=final_block": "Documents have `min_doc_tokens`",
        "bench step --help": "--rounds=5",
        "launch --gin=quickstart.gin --help": '--param="STEPS=250"',
        **dict.fromkeys(("evaluate --help", "launch --help", "evaluate --task=absent --help"), ""),
    }
    for line, words in expected.items():
        shown = commands.output(*line.split())
        assert ("options and their defaults:" in shown or '--param="' in shown) == bool(words)
        assert words in shown
        assert ("--distributed" in shown) == line.startswith(("evaluate", "launch"))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_a_reader_that_goes_away_is_no_error(command, arguments, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    body = "[print('x' * 1000) for _ in range(1000)]"
    result = command(body, *arguments, shell="| true")
    assert (result.returncode, result.stderr) == (141, "")


def test_standard_streams_may_be_closed_or_on_a_full_disk(command, tmp_path):
    file = tmp_path / "file.txt"
    body = f"print(1); file = open({str(file)!r}, 'w'); file.write('mine'); file.close()"
    assert command(body, shell="<&- >&-").returncode == 0
    assert file.read_text() == "mine"
    result = command("print(1)", shell="> /dev/full")
    assert result.returncode == 6
    assert result.stderr == "error: [Errno 28] No space left on device: make room\n"
    assert command("raise DataError('no such file')", shell="2> /dev/full").returncode == 3


def test_control_characters_are_escaped_where_text_leaves():
    assert printable("café \x1b[2J\u202e\n\udcff") == "café \\x1b[2J\\u202e\\n\\udcff"
    for mark in "\x9b\u061c\u200f\u2028\u2029\u2066\u2069\ud800":
        assert printable(mark) == mark.encode("unicode_escape").decode()
    code = (
        "from absl import logging; from ttcd_jax.commands import cli; cli.open_standard_streams();"
        "print('a\\x1b]0;x\\x07\\u202e\\udcff\\tb'); logging.warning('c\\x1b[2J');"
        "print('\\r\\x1b[Kd')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"a\\x1b]0;x\\x07\\u202e\\udcff\tb\n\\r\\x1b[Kd\n"
    assert b"c\\x1b[2J\n" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        ("XDG_CACHE_HOME", "a", "a/ttcd_jax"),
        ("HOME", "/home/b", "/home/b/.cache/ttcd_jax"),
        ("JAX_COMPILATION_CACHE_DIR", "named", "that of jax"),
    ],
)
def test_programs_are_kept_in_the_users_cache_unless_jax_has_a_folder(
    monkeypatch, variable, value, chosen
):
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    updates = {"jax_compilation_cache_dir": "that of jax"}
    with mock.patch.object(jax.config, "update", updates.__setitem__):
        keep_programs()
    assert updates["jax_compilation_cache_dir"] == chosen
