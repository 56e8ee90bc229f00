"""The command end to end: text in, records out, a run trained and evaluated on them."""

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import string
import subprocess
from pathlib import Path

import commands
import numpy as np
import pytest
import tiny_run

from ttcd_jax import units
from ttcd_jax.data.records import open_records, read_manifest
from ttcd_jax.data.tokenizer import JsonTokenizer
from ttcd_jax.run.directory import load_run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for module in (argparse, json.decoder, string):
        shutil.copyfile(module.__file__, folder / f"{module.__name__}.txt")
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"größe {i} 日本\n" * i)
    return folder


@pytest.fixture(scope="module")
def tokenizer(text):
    path = text.parent / f"{text.name}.json"
    arguments = (f"--input={text}", "--train_tokenizer=300", f"--output={path}")
    assert f"300 tokens in {path}" in commands.output("prepare_data", *arguments)
    return path


@pytest.fixture(scope="module")
def records(text, tokenizer):
    folder = text.parent / f"{text.name}.records"
    _prepare(text, tokenizer, folder, 2)
    return folder


def _prepare(text, tokenizer, folder, processes):
    places = (f"--input={text}", f"--tokenizer={tokenizer}", f"--output={folder}")
    options = ("--validation_percent=20", f"--processes={processes}")
    return commands.output("prepare_data", *places, *options)


@pytest.mark.parametrize("processes", [1, 4])
def test_files_are_the_same_for_every_number_of_processes(
    text, tokenizer, records, tmp_path, processes
):
    out = _prepare(text, tokenizer, tmp_path / "records", processes)
    assert {p.name: p.read_bytes() for p in (tmp_path / "records").iterdir()} == {
        p.name: p.read_bytes() for p in records.iterdir()
    }
    facts = read_manifest(records)["splits"]["train"]
    assert f"train: {facts['num_documents']} documents" in out
    assert os.listdir(tmp_path) == ["records"]


def test_records_are_the_text(text, tokenizer, records):
    encoder = JsonTokenizer(str(tokenizer))
    found = [
        encoder.decode(documents.read(index, 0, size))
        for documents in (open_records(records, split) for split in ("train", "validation"))
        for index, size in enumerate(documents.sizes)
    ]
    texts = [path.read_text() for path in text.iterdir()]
    assert sorted(found) == sorted(text for text in texts if text)


def test_a_run_trains_is_pinned_and_evaluated(text, tokenizer, records, tmp_path):
    here = tmp_path / "here"
    here.symlink_to(records)
    bindings = ["include 'data/records.gin'", f"RECORDS=('{here}',)", "RecordsConfig.seq_len=16"]
    bindings += ["TransformerConfig.vocab_size=300", "STEPS=3"]
    launch = ("launch", *tiny_run.flags("quickstart.gin", *bindings))
    run_dir = tmp_path / "run"
    assert "trained 3 steps" in commands.output(*launch, f"--run_dir={run_dir}")
    manifest = json.loads((run_dir / "data.json").read_text())
    assert manifest["sha256"] == [read_manifest(records)["sha256"]]
    out = commands.output("evaluate", f"--run_dir={run_dir}", "--task=ppl", "--max_rows=8")
    assert "bits per byte" in out
    assert load_run(run_dir).tokenizer.vocab_size == 300
    places = (f"--input={text}", f"--tokenizer={tokenizer}", f"--output={tmp_path / 'other'}")
    commands.output("prepare_data", *places)
    here.unlink()
    here.symlink_to(tmp_path / "other")
    message = commands.refused(*launch, f"--run_dir={run_dir}", status=3)
    assert "the training data changed" in message


def test_records_and_text_mix_by_step(text, tokenizer, records, tmp_path):
    bindings = ["include 'data/mixture.gin'", f"RECORDS='{records}'", f"TEXT='{text}'"]
    bindings += ["SEQ_LEN=16", "MixtureConfig.stages=((0, (8, 2)), (2, (0, 1)))", "STEPS=4"]
    bindings += ["TransformerConfig.vocab_size=300", "CorpusConfig.validation_percent=0"]
    launch = ("launch", *tiny_run.flags("quickstart.gin", *bindings))
    message = commands.refused(*launch, f"--run_dir={tmp_path / 'bytes'}", status=3)
    assert f"({records}/tokenizer.json and byte): prepare the records" in message
    its = tiny_run.params("TokenizerConfig.kind='json'", f"TokenizerConfig.path='{tokenizer}'")
    assert "trained 4 steps" in commands.output(*launch, *its, f"--run_dir={tmp_path / 'run'}")
    out = commands.output("evaluate", f"--run_dir={tmp_path / 'run'}", "--task=ppl", "--max_rows=8")
    assert "bits per byte" in out
    assert load_run(tmp_path / "run").tokenizer.vocab_size == 300


def test_a_run_ends_before_it_reads_changed_records(records, tmp_path):
    """Their size and time as before; once they are restored, the run goes on."""
    copy = shutil.copytree(records, tmp_path / "copy")
    tokens = copy / "train.00000.tokens.bin"
    bindings = ["include 'data/records.gin'", f"RECORDS=('{copy}',)", "RecordsConfig.seq_len=16"]
    bindings += ["TransformerConfig.vocab_size=300", "STEPS=2000"]
    run_dir = tmp_path / "run"
    launch = ("launch", *tiny_run.flags("quickstart.gin", *bindings), f"--run_dir={run_dir}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with commands.start(*launch, **pipes) as process:
        tiny_run.wait_for_step(run_dir, 3, process)
        process.terminate()
        process.communicate()
    done = tiny_run.losses(run_dir)
    modified, intact = tokens.stat().st_mtime_ns, tokens.read_bytes()
    tokens.write_bytes(intact[:6] + bytes([intact[6] ^ 1]) + intact[7:])
    os.utime(tokens, ns=(modified, modified))
    message = commands.refused(*launch, status=3)
    assert f"{tokens}: its content changed; copy it again" in message
    assert "Grain" not in message  # adds notes to the exceptions that it lets through
    assert tiny_run.losses(run_dir) == done
    tokens.write_bytes(intact)
    with commands.start(*launch, **pipes) as process:
        tiny_run.wait_for_step(run_dir, len(done) + 3, process)
        process.kill()
    assert tiny_run.losses(run_dir)[: len(done)] == done


def test_lines_without_a_document_are_reported(tmp_path):
    lines = ['{"text": "good"}'] * 3000
    lines[7] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    output = tmp_path / "records"
    arguments = (f"--input={tmp_path / 'a.jsonl'}", "--tokenizer=byte", f"--output={output}")
    result = commands.run("prepare_data", *arguments, "--processes=2")
    assert result.returncode == 0
    assert "1 of 3,000 lines hold no document: " in result.stderr
    assert "a.jsonl, line 8 is not JSON" in result.stderr
    assert read_manifest(output)["lines_left_out"] == 1
    (reason,) = json.loads((output / "left_out.json").read_text())
    assert reason.startswith(f"{tmp_path / 'a.jsonl'}, line 8 is not JSON")


def test_a_compressed_file_is_unpacked(text, tmp_path):
    lines = "".join(json.dumps({"text": p.read_text()}) + "\n" for p in sorted(text.iterdir()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    arguments = ("--tokenizer=byte", "--validation_percent=0")
    output = tmp_path / "records"
    commands.output("prepare_data", f"--input={tmp_path}", f"--output={output}", *arguments)
    num_bytes = sum(p.stat().st_size for p in text.iterdir())
    assert read_manifest(output)["splits"]["train"]["text"]["num_bytes"] == num_bytes


def test_nothing_is_overwritten(text, tokenizer, records):
    before = (records / "manifest.json").read_bytes()
    arguments = (f"--input={text}", f"--output={records}")
    assert f"{records} exists" in commands.refused("prepare_data", "--tokenizer=byte", *arguments)
    assert (records / "manifest.json").read_bytes() == before
    arguments = ("--train_tokenizer=300", f"--input={text}", f"--output={tokenizer}")
    assert f"{tokenizer} exists" in commands.refused("prepare_data", *arguments)


def test_a_killed_command_leaves_nothing_that_looks_complete(tmp_path):
    source = tmp_path / "corpus.jsonl"
    os.mkfifo(source)  # the command waits for the rest of it
    output = tmp_path / "records"
    arguments = (f"--input={source}", "--tokenizer=byte", f"--output={output}", "--processes=2")
    process = commands.start("prepare_data", *arguments)
    with source.open("w") as pipe:
        for _ in range(1200):
            pipe.write(json.dumps({"text": "x" * 10_000}) + "\n")
        pipe.flush()
        tiny_run.wait_until(lambda: list(tmp_path.glob(".records.*/train.*.tokens.bin")))
        children = _children(process.pid)
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not output.exists()
    tiny_run.wait_until(lambda: not any(Path(f"/proc/{child}/exe").exists() for child in children))
    source.unlink()
    source.write_text("".join(json.dumps({"text": "y" * i}) + "\n" for i in range(90)))
    assert "train: " in commands.output("prepare_data", *arguments)
    assert "train: " in commands.output("prepare_data", f"--verify={output}")


def _children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_stopped_command_clears_up(tmp_path):
    source = tmp_path / "corpus.jsonl"
    os.mkfifo(source)
    arguments = (f"--input={source}", "--tokenizer=byte", f"--output={tmp_path / 'records'}")
    process = commands.start("prepare_data", *arguments)
    with source.open("w"):
        tiny_run.wait_until(lambda: list(tmp_path.glob(".records.*")))
        process.terminate()
        assert process.wait(60) == 143
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


SAVING = """
import runpy

from ttcd_jax.data import preparation

preparation._SAVE_SECONDS = 0
runpy.run_module("experiments.prepare_data", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_command_is_continued(tmp_path, stop):
    source, program, output = (tmp_path / name for name in ("a.jsonl", "program.py", "records"))
    program.write_text(SAVING)
    os.mkfifo(source)
    arguments = (f"--input={source}", "--tokenizer=byte", "--processes=1")
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
    assert all((other / x.name).read_bytes() == x.read_bytes() for x in output.iterdir())
    assert sorted(os.listdir(output)) == sorted(os.listdir(other))


def test_a_tokenizer_of_a_large_corpus_is_made_from_a_part(text, tmp_path):
    program, path = tmp_path / "program.py", tmp_path / "tokenizer.json"
    program.write_text(
        "import sys\nfrom experiments import cli, prepare_data\n"
        "prepare_data._TOKENIZER_BYTES = 10_000\ncli.run(prepare_data.main)\n"
    )
    arguments = (f"--input={text}", "--train_tokenizer=300", f"--output={path}")
    result = commands.run(program, *arguments)
    assert result.returncode == 0, result.stderr
    assert re.search(r"one document of \d+ is read, about 9.77 KiB of the input", result.stderr)


def test_a_document_that_cannot_be_tokenized_is_named(text, tokenizer, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfe")
    output = tmp_path / "records"
    arguments = (f"--input={tmp_path}", f"--tokenizer={tokenizer}", f"--output={output}")
    message = commands.refused("prepare_data", *arguments, "--validation_percent=0", status=3)
    assert "latin.txt: text is not UTF-8 at byte 2 of 5; convert it (iconv" in message
    arguments = (f"--input={tmp_path}", "--train_tokenizer=300", f"--output={output}")
    message = commands.refused("prepare_data", *arguments, "--validation_percent=0", status=3)
    assert "error: latin.txt: text is not UTF-8 at byte 2 of 5" in message
    assert os.listdir(tmp_path) == ["latin.txt"]


def test_damage_is_named(records, tmp_path):
    copy = shutil.copytree(records, tmp_path / "copy")
    tokens = copy / "validation.00000.tokens.bin"
    ids = np.fromfile(tokens, "<u2")
    ids[3] += 1
    ids.tofile(tokens)
    message = commands.refused("prepare_data", f"--verify={copy}", status=3)
    assert f"{tokens}: its content changed" in message


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "pass one of --tokenizer, --train_tokenizer, --verify (0 are given)"),
        (("--tokenizer=byte", "--verify=x"), 2, "(2 are given)"),
        (("--tokenizer=byte", "--input=x"), 2, "--tokenizer also needs --output"),
        (
            ("--tokenizer=byte", "--input=/absent", "--output={new}"),
            2,
            "no file or folder at --input",
        ),
        (("--tokenizer=byte", "--input=", "--output={new}"), 2, "--input is empty"),
        (
            ("--tokenizer=byte", "--input={text}", "--glob=../*", "--output={new}"),
            2,
            "must be a pattern below path",
        ),
        (("--tokenizer=byte", "--input=Makefile", "--output={new}"), 3, "is of an unknown kind"),
        (
            ("--train_tokenizer=1000000000000", "--input={text}", "--output={new}"),
            2,
            "a vocabulary of 1000000000000 is too large: take 16777216 or less",
        ),
        (("--train_tokenizer=100", "--input={text}", "--output={new}"), 2, "take 258 or more"),
        (("--tokenizer=/absent.json", "--input={text}", "--output={new}"), 3, "no tokenizer file"),
        (("--tokenizer=byte", "--input=/dev/null", "--output={new}"), 2, "no file or folder at"),
        (
            ("--tokenizer=byte", "--input={text}", "--samples_are_rows", "--output={new}"),
            3,
            "this is text, and a sample that is a row has token ids",
        ),
        (("--verify=/absent",), 3, "/absent holds no token records"),
    ],
)
def test_errors(text, tmp_path, arguments, status, message):
    given = [argument.format(text=text, new=tmp_path / "x") for argument in arguments]
    assert message in commands.refused("prepare_data", *given, status=status)
    assert os.listdir(tmp_path) == []
