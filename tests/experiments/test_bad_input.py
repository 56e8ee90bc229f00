"""Mistakes in flags, and in the files of a run: one line, the status, nothing written."""

import contextlib
import json
import os
import pty
import shutil
from pathlib import Path

import commands
import pytest
import tiny_run
from flax import nnx
from small_models import byte_model

from experiments.cli import CONFIG_DIR
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import UserError
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import IMPORTED, RunDirectory, load_run
from ttcd_jax.run.training import train_run
from ttcd_jax.train.checkpoint import Checkpoints

RECALL = tiny_run.flags("recall.gin", *tiny_run.RECALL)
TEXT = tiny_run.flags("text.gin")
RECORDS = ["--gin=ipttcd_760m.gin"]
CONFIG = load_config(RunConfig, "recall.gin", config_dir=CONFIG_DIR)
DEEP = '{"a":' * 50_000
MODEL = byte_model(has_tied_head=False, memory=MemoryConfig(chunk_size=4))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A model that generates control characters alone, in a folder whose name has some."""
    directory = RunDirectory(tmp_path_factory.mktemp("runs") / "run\x1b[31m")
    directory.path.mkdir()
    params = nnx.to_pure_dict(nnx.state(Transformer(MODEL, rngs=nnx.Rngs(0)), nnx.Param))
    direction = params["head"][27]
    params["head"] = (params["head"] * 0).at[27].set(direction).at[28].set(-direction)
    with contextlib.closing(Checkpoints(directory.checkpoints, model=MODEL)) as checkpoints:
        checkpoints.save(7, {"params": params})
    data = {"type": IMPORTED, "seq_len": 32, "tokenizer": TokenizerConfig().to_dict()}
    directory.write_import({"model": MODEL.to_dict(), "data": data}, {})
    (directory.path.parent / "book.txt").write_text("It was a dark and stormy night. " * 8)
    return directory.path


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([*RECALL, "--param=RunConfig.seed=-1"], 2, "RunConfig.seed -1"),
        ([*RECALL, f"--run_dir={'x' * 300}"], 2, "File name too long"),
        ([*RECALL, "--run_dir="], 2, "--run_dir is empty"),
        ([*RECALL, "--run_dir=gs://bucket/run"], 2, "mount the bucket"),
        ([*RECALL, "--run_dir=file:///runs/a"], 2, "give its path alone"),
        ([*RECALL, "--profile="], 2, "--profile is empty"),
        ([*TEXT, "--param=TEXT=''"], 2, "CorpusConfig.path is empty"),
        ([*TEXT, "--param=TEXT='s3://bucket/text'"], 2, "mount the bucket"),
        ([*RECORDS, "--param=RECORDS='GS://bucket/data'"], 2, "mount the bucket"),
        ([*RECORDS, "--param=RecordsConfig.folders=('s3://a', 'b')"], 2, "mount the bucket"),
        ([*RECALL, "--param=MemoryConfig.chunk_size=4096"], 2, "chunk_size 4096"),
        ([*RECALL, "--param=TransformerConfig.num_layers=1000000000000"], 2, "1 .. 10,000"),
        ([*RECALL, "--param=TransformerConfig.vocab_size=2000000000"], 6, "GiB per device"),
        ([*RECALL, "--param=RunConfig.batch_size=1000000000"], 2, "16,777,216"),
        ([*RECALL, f"--param=STEPS={10**30}"], 2, "RunConfig.steps"),
        ([*RECALL, "--param=STEPS=2147483648"], 2, "in 1 .. 2^31 - 1"),
        ([*RECALL, f"--param=RunConfig.log_every={2**63}"], 2, "must be below 2^63"),
        ([*RECALL, f"--param=ScheduleConfig.peak={10**400}"], 2, "must be below 2^63"),
        ([*RECALL, "--param=RecallConfig.num_slots=100000000000"], 6, "--dry_run"),
        ([*RECALL, "--param=TransformerConfig.dim=100000000"], 6, "GiB per device"),
        ([*RECALL, "--dry_run", "--topology=h100x1000000"], 2, "1000000 devices, plans go up to"),
    ],
)
def test_launch_refuses(tmp_path, arguments, status, words):
    if not any(argument.startswith("--run_dir") for argument in arguments):
        arguments = [*arguments, f"--run_dir={tmp_path / 'run'}"]
    assert words in commands.refused("launch", *arguments, status=status)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ("null", 3, "is a NoneType, not an object"),
        ('["x"]', 3, "is a list, not an object"),
        (DEEP, 3, "nested too deeply"),
        ("{}", 2, "format 1"),
        ('{"format": 2}', 2, "no data"),
        ('{"format": 3}', 4, "config.json was edited or damaged since it was written: restore a"),
        ({"model": None}, 2, "no model"),
        ({"model": {"type": "TransformerConfig"}}, 2, "TransformerConfig lacks"),
        ({"data": None}, 2, "no data"),
        ({"data": {"type": "os.system"}}, 2, "without a tokenizer"),
        ({"data": {"type": "TextConfig"}}, 2, "TextConfig lacks corpus"),
        ({"data": {"type": "RecordsConfig"}}, 2, "paths"),
    ],
)
def test_a_configuration_of_another_kind_is_refused(run_dir, tmp_path, content, status, words):
    if isinstance(content, dict):
        stored = json.loads((run_dir / "config.json").read_text()) | content | {"format": 2}
        content = json.dumps({name: stored[name] for name in stored if name != "sha256"})
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(content)
    book = run_dir.parent / "book.txt"
    place = f"--run_dir={tmp_path / 'run'}"
    message = commands.refused("evaluate", place, "--task=ppl", f"--text={book}", status=status)
    assert words in message


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("evaluate --task=ppl --text=BOOK --seq_len=-4", 2, "Perplexity.seq_len -4"),
        ("evaluate --task=ppl --text=BOOK --seq_len=0", 2, "Perplexity.seq_len 0"),
        ("evaluate --task=ppl --text=BOOK --seq_len=1000000000", 3, "1 .. 1048576"),
        ("evaluate --task=ppl --text=BOOK --batch_size=1000000000", 2, "1 .. 65,536"),
        ("generate --prompt_file=/dev/zero", 3, "more than 268435456 bytes, the longest prompt"),
        ("evaluate --task=ppl --text=", 2, "Perplexity.text is empty"),
        ("evaluate --task=ppl --text=BOOK --mesh=", 2, "--mesh is empty"),
        ("generate --prompt_file=BOOK --json=FOLDER", 2, "must be a file in a folder"),
        ("generate --prompt_file=", 2, "--prompt_file is empty"),
        ("generate --prompt_file=BOOK --save_state=s3://bucket/x", 2, "mount the bucket"),
        ("generate --prompt_file=hdfs://host/book", 2, "mount the bucket"),
        ("report --output=FOLDER/page", 2, "nothing was measured in"),
    ],
)
def test_commands_on_a_run_refuse(run_dir, tmp_path, command, status, words):
    book = str(run_dir.parent / "book.txt")
    name, *rest = command.replace("BOOK", book).replace("FOLDER", str(tmp_path)).split()
    assert words in commands.refused(name, f"--run_dir={run_dir}", *rest, status=status)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["gs://b/x", Path("s3://b/x"), Path("file:///x"), "abfss://b@c/x"])
@pytest.mark.parametrize("call", [RunDirectory, load_run, lambda path: train_run(CONFIG, path)])
def test_the_library_refuses_buckets_and_addresses(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"mount the bucket|give its path alone"):
        call(path)
    assert list(tmp_path.iterdir()) == []


def test_commands_without_a_run_refuse(tmp_path):
    absent = tmp_path / "absent"
    for command, status, words in (
        (("report", f"--run_dir={absent}"), 2, f"nothing was measured in {absent}"),
        (("convert", "import", "--format=reference", absent, tmp_path / "run"), 3, f"at {absent}"),
        (("convert", "import", "--format=reference", "", tmp_path / "run"), 2, "is empty"),
    ):
        assert words in commands.refused(*command, status=status)
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_bad_results_or_to_a_bad_place_is_refused(tmp_path):
    path = tmp_path / "run" / "eval" / "recall" / "results.json"
    path.parent.mkdir(parents=True)
    (tmp_path / "file").touch()
    record = {"distance": "1-8", "queries": 4, "accuracy": 0.5}
    good = {"task": "recall", "label": "on", "series": {"on": [record]}, "chance": 0.25}
    bad = {"chance": 0.25}, *(good | {"series": x} for x in ({}, {"on": []}, {"on": [{}]}))
    report = "report", f"--run_dir={tmp_path / 'run'}"
    for content in (*map(json.dumps, bad), DEEP, "null"):
        path.write_text(content)
        assert "results.json" in commands.refused(*report, status=3)
    path.write_text(json.dumps(good))
    message = commands.refused(*report, f"--output={tmp_path / 'file'}")
    assert "file/recall.png" in message
    assert f"nothing was measured in {tmp_path}:" in commands.refused(
        *report, f"--run_dir={tmp_path}"
    )


def test_control_characters_reach_no_terminal(run_dir, tmp_path):
    """The name of the run and the text that it generates are escaped; a file gets the text."""
    book = run_dir.parent / "book.txt"
    line = ("generate", f"--run_dir={run_dir}", f"--prompt_file={book}", "--max_new_tokens=6")
    assert set(commands.output(*line).rstrip("\n")) <= {"\x1b", "\x1c"}
    ours, its = pty.openpty()
    with commands.start(*line, stdout=its, stderr=its) as process:
        assert process.wait(timeout=100) == 0
    os.close(its)
    shown = os.read(ours, 10_000).decode()
    assert "\\x1b" in shown or "\\x1c" in shown
    assert not {"\x1b", "\x1c"} & set(shown)
    place = f"--run_dir={tmp_path / 'run\x1b[31m'}"
    output = commands.output("launch", *RECALL, "--param=RunConfig.steps=1", place)
    assert "run\\x1b[31m" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("command", ["launch", "evaluate"])
def test_help_lists_the_flag_of_several_processes(command):
    assert "--distributed" in commands.output(command, "--help")
