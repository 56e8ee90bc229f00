"""The command end to end: texts, saved states, a loop of prompts, mistakes."""

import json
import re
import shutil
import signal
import subprocess

import commands
import numpy as np
import pytest
from damage import flip_bit
from small_models import byte_model
from tiny_run import save_text_model

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.methods.ipttcd import MemoryConfig

MODEL = byte_model(window=16, student_window=8, memory=MemoryConfig(chunk_size=16))
MODEL = MODEL.replace(has_tied_head=False, init_std=0.5)
BOOK = "It was a dark and stormy night. "
DRAW = ("--max_new_tokens=20", "--temperature=1", "--top_k=20", "--seed=2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A random model whose likeliest tokens are printable ASCII."""

    def change(params):
        is_printable = (np.arange(MODEL.vocab_size) > 32) & (np.arange(MODEL.vocab_size) < 127)
        params["head"] = params["head"] * is_printable[:, None]

    run_dir = tmp_path_factory.mktemp("runs") / "run"
    save_text_model(run_dir, MODEL, change)
    return run_dir


@pytest.fixture(scope="module")
def run(run_dir):
    def run(*arguments, status=0, text=""):
        result = commands.run("generate", f"--run_dir={run_dir}", *arguments, input=text)
        if status:
            return commands.mistake(result, status)
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr

    return run


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "book.txt").write_text(BOOK)
    (folder / "question.txt").write_text("Who")
    return folder


@pytest.fixture(scope="module")
def first(run, places):
    """(output, errors, record) of a single prompt, whose state was kept."""
    kept = f"--save_state={places / 'state'}", f"--json={places / 'facts.json'}"
    output, errors = run(*DRAW, *kept, f"--prompt_file={places / 'book.txt'}")
    return output, errors, json.loads((places / "facts.json").read_text())


def test_a_single_text_is_printed_and_reported(first, run_dir):
    output, errors, record = first
    (text,) = record["texts"]
    assert output == text["text"] + "\n"
    assert text["text"] == ByteTokenizer().decode(text["tokens"])
    assert (len(text["tokens"]), text["finish_reason"]) == (20, "length")
    assert (record["run_dir"], record["step"]) == (str(run_dir), 7)
    assert text["text"].isprintable()
    number = r"[\d,.]+"
    assert re.search(
        rf"read 33 tokens \({number}/s with compilation\), generated 20 \({number}/s\), "
        rf"state {number} KiB\n",
        errors,
    )
    assert "53 tokens read" in errors


def test_several_prompts_are_a_batch_of_the_same_texts_and_end_at_stop_strings(run, places, first):
    files = (places / "question.txt", places / "book.txt")
    arguments = [f"--prompt_file={file}" for file in files]
    output, _ = run(*arguments, *DRAW, f"--json={places / 'both.json'}")
    texts = json.loads((places / "both.json").read_text())["texts"]
    assert texts[1] == first[2]["texts"][0]
    for text in texts:
        assert f"--- {text['prompt_file']}\n{text['text']}\n" in output
    text = texts[1]["text"]
    stop = text[9:12]
    output, _ = run(arguments[1], *DRAW, f"--stop={stop}", "--stop=\n")
    assert output == text[: text.index(stop)] + "\n"


def test_a_kept_state_is_asked_by_file_by_line_and_from_standard_input(run, places, first):
    base = (f"--load_state={places / 'state'}", *DRAW)
    expected, errors = run(*base, f"--prompt_file={places / 'question.txt'}")
    assert f"{places / 'state'}: 53 tokens read\n" in errors
    assert run(*base, "--prompt_file=-", text="Who")[0] == expected
    output, errors = run(*base, "--interactive", text="Who\nWhere\nWho\n\nnever read\n")
    assert output.startswith(expected)
    assert output.endswith(expected)
    assert len(output) > 2 * len(expected)
    assert errors.count("read 3 tokens (") == 2
    other, _ = run(*base, "--interactive", "--seed=3", text="Who")
    assert other != expected


def test_ctrl_c_ends_a_text_and_not_the_loop(run_dir, places, first):
    book = f"--prompt_file={places / 'book.txt'}"
    arguments = (f"--run_dir={run_dir}", "--interactive", "--max_new_tokens=1000000", book)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = commands.start("generate", *arguments, **pipes, text=False)
    for _ in range(2):
        process.stdin.write(b"Who\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        while not (line := process.stderr.readline()).startswith(b"read 3 tokens"):
            assert line
        process.stdout.readline()  # the rest of the text
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_damaged_state_and_one_of_other_rows_are_refused(run, places, first):
    copy = places / "copy"
    shutil.copytree(places / "state", copy)
    flip_bit(copy / "state.safetensors", -9)
    damaged = run(f"--load_state={copy}", "--interactive", status=4)
    assert "state.safetensors: its content changed" in damaged
    two = [f"--prompt_file={places / 'question.txt'}"] * 2
    error = run(f"--load_state={places / 'state'}", *two, status=2)
    assert "has 1 rows, and there are 2 prompts" in error


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "nothing to do: pass --prompt_file"),
        (["--prompt_file=absent.txt"], 3, "--prompt_file=absent.txt cannot be read: No such file"),
        (["--prompt_file=-", "--interactive"], 2, "standard input is read once"),
        (["--prompt_file=a", "--prompt_file=b", "--interactive"], 2, "--prompt_file names 2"),
        (["--interactive", "--json=x.json"], 2, "leave one out"),
        (["--interactive", "--load_state=x", "--max_length=9"], 2, "--load_state has its own"),
        (["--interactive", "--save_state=x"], 2, "pass --prompt_file"),
        (["--prompt_file=-", "--save_state=tests"], 2, "tests exists and is not an empty folder"),
        (["--prompt_file=-", "--json=absent/x.json"], 2, "--json=absent/x.json must be a file in "),
        (["--prompt_file=-", "--temperature=-1"], 2, "temperature -1.0 must be 0 or more"),
        (["--prompt_file=-", "--memory=none"], 2, "memory"),
        (["--prompt_file=-", "--step=8"], 4, "there is no checkpoint step 8"),
    ],
)
def test_mistakes_are_one_line(run, arguments, status, words):
    assert words in run(*arguments, status=status)


def test_the_commands_of_the_page_run(run_dir, tmp_path):
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/text").symlink_to(run_dir)
    (tmp_path / "README.md").symlink_to(commands.ROOT / "README.md")
    for line, text, prints in zip(
        *(commands.lines_of("generation.md"), ("", "", "What is it?\n"), (True, False, True)),
        strict=True,
    ):
        result = commands.line(line, input=text, cwd=tmp_path)
        assert (result.returncode, bool(result.stdout.strip())) == (0, prints), result.stderr
    page = (commands.ROOT / "docs/generation.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    assert commands.output(program, cwd=tmp_path).strip()
