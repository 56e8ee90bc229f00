"""The command end to end: texts, saved states, the page (mistakes: tests/test_refusals.py)."""

import json
import re

import commands
import numpy as np
import pytest
from checks import assert_same
from small_models import byte_model, rows_of
from tiny_run import save_text_model

from ttcd_jax import MemoryConfig, load_run
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.inference import Generation, Request, dense, inference_model, load_memory, start_from
from ttcd_jax.interop.hugging_face import open_hugging_face
from ttcd_jax.train.layers_on_disk import by_name

MODEL = byte_model(window=16, student_window=8, memory=MemoryConfig(chunk_size=16))
MODEL = MODEL.replace(has_tied_head=False, init_std=0.5)
BOOK = "It was a dark and stormy night. "
DRAW = ("--max_new_tokens=20", "--temperature=1", "--top_k=20", "--seed=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two prompts and a random model whose likeliest tokens are printable ASCII."""

    def change(params):
        is_printable = (np.arange(MODEL.vocab_size) > 32) & (np.arange(MODEL.vocab_size) < 127)
        params["head"] = params["head"] * is_printable[:, None]

    folder = tmp_path_factory.mktemp("generate")
    save_text_model(folder / "run", MODEL, change)
    (folder / "book.txt").write_text(BOOK)
    (folder / "question.txt").write_text("Who")
    return folder


@pytest.fixture(scope="module")
def run(place):
    """Runs the command with prompts by their names: (output, errors)."""

    def run(*arguments, prompts=(), text=""):
        files = [f"--prompt_file={place / f'{name}.txt'}" for name in prompts]
        line = ("generate", f"--run_dir={place / 'run'}", *files, *arguments)
        result = commands.run(*line, input=text)
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr

    return run


@pytest.fixture(scope="module")
def first(run, place):
    """(output, errors, record) of a single prompt, whose state was kept."""
    kept = f"--save_state={place / 'state'}", f"--output={place / 'facts.json'}"
    output, errors = run(*DRAW, *kept, prompts=["book"])
    return output, errors, json.loads((place / "facts.json").read_text())


def test_a_single_text_is_printed_and_reported(first, place):
    output, errors, record = first
    (text,) = record["texts"]
    assert output == text["text"] + "\n"
    assert text["text"] == ByteTokenizer().decode(text["tokens"])
    assert (len(text["tokens"]), text["finish_reason"]) == (20, "length")
    assert (record["run_dir"], record["step"]) == (str(place / "run"), 7)
    assert text["text"].isprintable()
    rate = r"\([\d,.]+/s"
    found = rf"read 33 tokens {rate} with compilation\), generated 20 {rate}\), state [\d.]+ KiB\n"
    assert re.search(found, errors)
    assert "53 tokens read" in errors


def test_several_prompts_are_a_batch_of_the_same_texts_and_end_at_stop_strings(run, place, first):
    output, _ = run(*DRAW, f"--output={place / 'both.json'}", prompts=["question", "book"])
    texts = json.loads((place / "both.json").read_text())["texts"]
    assert texts[1] == first[2]["texts"][0]
    for text in texts:
        assert f"--- {text['prompt_file']}\n{text['text']}\n" in output
    text = texts[1]["text"]
    stop = text[9:12]
    output, _ = run(*DRAW, f"--stop={stop}", "--stop=\n", prompts=["book"])
    assert output == text[: text.index(stop)] + "\n"


def test_a_kept_state_is_asked_by_file_and_from_standard_input(run, place, first):
    base = (f"--load_state={place / 'state'}", *DRAW)
    expected, errors = run(*base, prompts=["question"])
    assert f"{place / 'state'}: 53 tokens read\n" in errors
    assert "read 3 tokens (" in errors
    assert run(*base, "--prompt_file=-", text="Who")[0] == expected
    assert run(*base, "--seed=3", prompts=["question"])[0] != expected
    line = ("generate", f"--run_dir={place / 'run'}", base[0], "--prompt_file=-")
    question = f"--prompt_file={place / 'question.txt'}"
    assert "has 1 rows, and there are 2 prompts" in commands.refused(*line, question, input="Who")


def test_a_state_that_was_frozen_is_read_and_says_so(run, place):
    state = place / "frozen"
    run("--memory=frozen", f"--save_state={state}", "--max_new_tokens=0", prompts=["book"])
    _, errors = run(f"--load_state={state}", prompts=["question"])
    assert "its memory is read only (--memory=frozen)" in errors
    line = ("generate", f"--run_dir={place / 'run'}", f"--load_state={state}", "--prompt_file=-")
    for flag in ("memory=kept", f"save_memory={place / 'none'}"):
        words = f"never written, so --{flag.partition('=')[0]} has no effect"
        assert words in commands.refused(*line, f"--{flag}", input="Who")


def test_a_memory_is_kept_asked_and_written_into_a_plain_model(place, tmp_path):
    """From process to process: a loud memory, whose sum with itself is another text."""
    memory = MemoryConfig(chunk_size=4, output="teacher_raw", eta=50.0)
    save_text_model(run_dir := tmp_path / "run", byte_model(memory=memory, init_std=0.5))
    line = ("generate", f"--run_dir={run_dir}", "--max_new_tokens=12")
    book, question = (f"--prompt_file={place / name}.txt" for name in ("book", "question"))
    kept = tmp_path / "memory"
    result = commands.run(*line, book, "--max_new_tokens=0", f"--save_memory={kept}")
    assert f"memory saved in {kept}: 256 bytes" in result.stderr
    run, flag = load_run(run_dir), f"--load_memory={kept}"
    model, tokens = inference_model(run.model), run.tokenizer.encode("Who")
    memory = load_memory(kept, model)
    files = f"--output={tmp_path / 'x.json'}", f"--save_memory={tmp_path / 'more'}"
    twice = commands.run(*line, question, flag, flag, *files)
    assert load_memory(tmp_path / "more", model).tokens_read == 66 + 4 + 12  # bos and "Who"
    assert "a memory of 66 tokens" in twice.stderr
    (text,) = json.loads((tmp_path / "x.json").read_text())["texts"]
    found = {}
    for name, state in (("twice", start_from(model, [2 * memory])), ("never", None)):
        request = Request(tokens=tokens, max_new_tokens=12)
        found[name] = [x.token for x in Generation(model, run.tokenizer, [request], state=state)]
    assert text["tokens"] == found["twice"] != found["never"]
    (run_dir / "import.json").unlink()  # an empty one, of no import
    export = ("convert", "export", "--format=huggingface", f"--memory={kept}")
    commands.output(*export, run_dir, folder := tmp_path / "plain")
    assert "| tokens of texts in the down projections | 33 |" in (folder / "README.md").read_text()
    assert not (folder / "modeling_ttcd.py").exists()
    leaves, config, _ = open_hugging_face(folder)
    assert config.method == "swa"
    read = {name: leaf.read() for name, leaf in by_name(leaves).items()}
    assert_same(read, rows_of(dense(run.model, memory)))


def test_the_commands_of_the_page_run(place, tmp_path):
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/text").symlink_to(place / "run")
    (tmp_path / "README.md").symlink_to(commands.ROOT / "README.md")
    lines = commands.lines_of("generation.md")
    for line, prints in zip(lines, (True, False, True), strict=True):
        result = commands.line(line, input="What is it?\n", cwd=tmp_path)
        assert (result.returncode, bool(result.stdout.strip())) == (0, prints), result.stderr
    page = (commands.ROOT / "docs/generation.md").read_text()
    program = tmp_path / "program.py"
    program.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    assert commands.output(program, cwd=tmp_path).strip()
