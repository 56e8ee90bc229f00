"""The command end to end: text in, records out, a run trained on them."""

import argparse
import json
import os
import shutil
import signal
import string
import subprocess
from pathlib import Path

import commands
import corpora
import pytest
import tiny_run
from damage import flip_bit
from small_models import run_config

from ttcd_jax import load_run, units
from ttcd_jax.data.records import open_records, read_manifest
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer, tokenizer_of
from ttcd_jax.run.directory import RunDirectory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, json.decoder, string):
        shutil.copyfile(module.__file__, folder / f"{module.__name__}.txt")
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"größe {i} 日本\n" * i)
    return folder


FROM_A_PART = """
import sys
from ttcd_jax.commands import cli, prepare_data
prepare_data._TOKENIZER_BYTES = 100_000
cli.run(prepare_data.main)
"""


@pytest.fixture(scope="module")
def tokenizer(text):
    """A tokenizer of a large corpus, made from a part of it."""
    path, program = text.parent / f"{text.name}.json", text.parent / "program.py"
    program.write_text(FROM_A_PART)
    result = commands.run(program, f"--input={text}", "--train_tokenizer=300", f"--output={path}")
    assert f"300 tokens in {path}" in result.stdout, result.stderr
    assert "one document of 2 is read, about 97.66 KiB of the input" in result.stderr
    return path


def _prepare(text, tokenizer, folder, *flags):
    places = (f"--input={text}", f"--tokenizer={tokenizer}", f"--output={folder}")
    return commands.output("prepare_data", *places, *flags)


@pytest.fixture(scope="module")
def records(text, tokenizer):
    folder = text.parent / f"{text.name}.records"
    _prepare(text, tokenizer, folder, "--validation_percent=20", "--processes=3")
    return folder


def test_records_are_the_text_for_every_number_of_processes(text, tokenizer, records, tmp_path):
    flags = ("--validation_percent=20", "--processes=1")
    out = _prepare(text, tokenizer, tmp_path / "records", *flags)
    assert corpora.files(tmp_path / "records") == corpora.files(records)
    entry = read_manifest(records)["splits"]["train"]
    assert f"train: {entry['num_documents']} documents" in out
    assert os.listdir(tmp_path) == ["records"]
    encoder, found = build_tokenizer(tokenizer_of(tokenizer)), []
    for documents in (open_records(records, split) for split in ("train", "validation")):
        sizes = enumerate(documents.sizes)
        found += [encoder.decode(documents.read(index, 0, size)) for index, size in sizes]
    assert sorted(found) == sorted(filter(None, (path.read_text() for path in text.iterdir())))


def test_documents_begin_and_end_as_those_of_the_run_whose_tokenizer_it_is(
    text, tokenizer, tmp_path
):
    own = TokenizerConfig(kind="json", path=str(tokenizer), bos_id=7, eos_id=8)
    data = TextConfig(corpus=corpora.text_file(text), tokenizer=own, seq_len=8)
    run = RunDirectory(tmp_path / "run")
    run.claim(run_config("swa", data=data).to_dict(), "", {})
    run.checkpoints.mkdir(exist_ok=True)
    shutil.copy(tokenizer, run.path / "tokenizer.json")
    _prepare(text, run.path / "tokenizer.json", tmp_path / "records")
    train = open_records(tmp_path / "records", "train")
    ids = train.read(0, 0, int(train.sizes[0]))
    assert (ids[0], ids[-1]) == (7, 8)


def test_a_run_on_records_and_text_trains_and_is_pinned(text, tokenizer, records, tmp_path):
    here, run_dir = tmp_path / "here", tmp_path / "run"
    shutil.copytree(records, here)
    bindings = ["include 'data/mixture.gin'", f"RECORDS='{here}'", f"TEXT='{text}'"]
    bindings += ["SEQ_LEN=16", "MixtureConfig.stages=((0, (8, 2)), (2, (0, 1)))", "STEPS=3"]
    bindings += ["TransformerConfig.vocab_size=300", "TokenizerConfig.kind='json'"]
    bindings += [f"TokenizerConfig.path='{tokenizer}'"]
    launch = ("launch", *tiny_run.flags("quickstart.gin", *bindings), f"--run_dir={run_dir}")
    assert "trained 3 steps" in commands.output(*launch)
    of_records, _ = json.loads((run_dir / "data.json").read_text())["parts"]
    assert of_records["sha256"] == [read_manifest(records)["sha256"]]
    assert load_run(run_dir).tokenizer.vocab_size == 300
    tokens = here / "train.00000.tokens.bin"
    flip_bit(tokens, 6)
    for command in (launch, ("prepare_data", f"--verify={here}")):
        message = commands.refused(*command, status=3)
        assert f"{tokens}: its content changed; copy it again" in message
        assert "Grain" not in message  # adds notes to the exceptions that it lets through
    shutil.rmtree(here)
    _prepare(text, tokenizer, here)
    assert "the training data changed" in commands.refused(*launch, status=3)


def test_a_killed_command_leaves_nothing_that_looks_complete(tmp_path):
    source, output = tmp_path / "corpus.jsonl", tmp_path / "records"
    os.mkfifo(source)  # the command waits for the rest of it
    arguments = (f"--input={source}", "--tokenizer=byte", f"--output={output}", "--processes=2")
    process = commands.start("prepare_data", *arguments)
    with source.open("w") as pipe:
        pipe.write((json.dumps({"text": "x" * 10_000}) + "\n") * 1200)
        pipe.flush()
        tiny_run.wait_until(lambda: list(tmp_path.glob(".records.*/train.*.tokens.bin")))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not output.exists()
    tiny_run.wait_until(lambda: not any(Path(f"/proc/{child}/exe").exists() for child in children))


SAVING = """
import runpy

from ttcd_jax.data import records

records._SAVE_SECONDS = 0
runpy.run_module("experiments.prepare_data", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_is_continued_or_clears_up(tmp_path, stop):
    source, program, output = (tmp_path / name for name in ("a.jsonl", "program.py", "records"))
    program.write_text(SAVING)
    os.mkfifo(source)
    arguments = (f"--input={source}", "--tokenizer=byte", "--processes=1")
    process = commands.start("prepare_data", *arguments, f"--output={tmp_path / 'empty'}")
    with source.open("w"):
        tiny_run.wait_until(lambda: list(tmp_path.glob(".empty.*")))
        process.send_signal(stop)
        assert process.wait(60) == 128 + stop
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "program.py"]  # no token was stored
    process = commands.start(program, *arguments, f"--output={output}", stderr=subprocess.PIPE)
    lines = [json.dumps({"text": f"{i} " * 3000}) + "\n" for i in range(400)]
    with source.open("w") as pipe:
        pipe.writelines(lines)
        pipe.flush()
        tiny_run.wait_until(lambda: (tmp_path / ".records.unfinished/manifest.json").exists())
        refusal = commands.refused("prepare_data", *arguments, f"--output={output}")
        assert "is being written by another process" in refusal
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + stop
    assert ".records.unfinished is kept: the same command continues it" in errors
    source.unlink()
    source.write_text("".join(lines))
    result = commands.run("prepare_data", *arguments, f"--output={output}")
    assert result.returncode == 0, result.stderr
    assert " tokens are stored: " in result.stderr
    assert f"100.0% of {units.size(source.stat().st_size)}" in result.stderr
    other = tmp_path / "other"
    commands.output("prepare_data", *arguments, f"--output={other}")
    assert corpora.files(output) == corpora.files(other)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("", 2, "pass one of --tokenizer, --train_tokenizer, --verify (0 are given)"),
        ("--tokenizer=byte --verify=x", 2, "(2 are given)"),
        ("--tokenizer=byte --input=x", 2, "--tokenizer also needs --output"),
        ("--tokenizer=byte --input=/absent {out}", 3, "no file or folder at /absent: give"),
        ("--tokenizer=byte --input=/dev/null {out}", 3, "no file or folder at"),
        ("--tokenizer=byte {in} --output={text}", 2, "exists and is not an empty folder"),
        ("--train_tokenizer=300 {in} --output={json}", 2, ".json exists: choose"),
        ("--train_tokenizer=100 {in} {out}", 2, "take 258 or more"),
        ("--train_tokenizer=99999999 {in} {out}", 2, "take 16777216 or less"),
        ("--tokenizer=/absent.json {in} {out}", 3, "no tokenizer file"),
        ("--tokenizer=byte {in} {out} --samples_are_rows", 3, "a sample that is a row has token"),
        ("--tokenizer={json} {latin} {out}", 3, "latin.txt: text is not UTF-8 at byte 2 of 5; con"),
        ("--train_tokenizer=300 {latin} {out}", 3, "error: latin.txt: text is not UTF-8 at byte 2"),
        ("--train_tokenizer=300 {ids} {out}", 3, "has token ids: name a column of text in --field"),
        ("--verify=x {in}", 2, "--input has no effect with --verify: leave it out"),
        ("--train_tokenizer=300 {in} {out} --samples_are_rows", 2, "--samples_are_rows has no eff"),
        ("--tokenizer=byte {latin} {out} --glob=*.md", 3, "chooses files of a folder and"),
        ("--verify=/absent", 3, "/absent holds no token records"),
    ],
)
def test_errors(text, tokenizer, tmp_path, arguments, status, message):
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfe")
    corpora.table(tmp_path / "ids.arrow", {"text": [[1, 2]]})
    places = {"text": text, "json": tokenizer, "in": f"--input={text}"}
    places["latin"] = f"--input={tmp_path / 'latin.txt'} --validation_percent=0"
    places["ids"] = f"--input={tmp_path / 'ids.arrow'} --validation_percent=0"
    given = arguments.format(**places, out=f"--output={tmp_path / 'new'}").split()
    assert message in commands.refused("prepare_data", *given, status=status)
    assert sorted(os.listdir(tmp_path)) == ["ids.arrow", "latin.txt"]
