"""Mistakes in flags, and in the files of a run: one line, the status, nothing written."""

import json
import os
import pty
import shutil
from pathlib import Path

import commands
import pytest
import tiny_run
from checks import refused
from small_models import byte_model

from experiments.cli import CONFIG_DIR
from ttcd_jax.errors import UserError
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.run.training import train_run

RECALL = tiny_run.flags("recall.gin", *tiny_run.RECALL)
CONFIG = load_config(RunConfig, "recall.gin", config_dir=CONFIG_DIR)
DEEP = '{"a":' * 50_000
MODEL = byte_model(has_tied_head=False, memory=MemoryConfig(chunk_size=4))


def _generates_escapes(params):
    """Of an odd and of an even sum one control character is the likeliest."""
    direction = params["head"][27]
    params["head"] = (params["head"] * 0).at[27].set(direction).at[28].set(-direction)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A model that generates control characters alone, in a folder whose name has some."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_run.save_text_model(folder / "run\x1b[31m", MODEL, _generates_escapes)
    (folder / "book.txt").write_text("It was a dark and stormy night. " * 8)
    return folder / "run\x1b[31m"


@pytest.mark.parametrize(
    ("gin", "bindings", "words"),
    [
        ("recall", "RunConfig.seed=-1", "RunConfig.seed -1"),
        ("text", "TEXT=''", "CorpusConfig.path is empty"),
        ("text", "TEXT='s3://bucket/text'", "mount the bucket"),
        ("ipttcd_760m", "RECORDS='GS://bucket/data'", "mount the bucket"),
        ("ipttcd_760m", "RecordsConfig.folders=('s3://a', 'b')", "mount the bucket"),
        ("recall", "TransformerConfig.num_layers=1000000000000", "1 .. 10,000"),
        ("recall", "RunConfig.batch_size=1000000000", "16,777,216"),
        ("recall", f"STEPS={10**30}", "RunConfig.steps"),
        ("recall", "STEPS=2147483648", "in 1 .. 2^31 - 1"),
        ("recall", f"RunConfig.log_every={2**63}", "must be below 2^63"),
        ("recall", f"ScheduleConfig.peak={10**400}", "must be below 2^63"),
        ("recall", "RunConfig.accumulation_steps=3", "3|32|accumulation_steps"),
        ("recall", "RunConfig.spike_factor=1", "spike_factor|above 1, at most 1e6, or None"),
        ("recall", "RunConfig.max_skipped_steps=-1", "max_skipped_steps -1|at least 0"),
    ],
)
def test_configurations_that_are_refused(gin, bindings, words):
    load = {"root": RunConfig, "params": [bindings], "config_dir": CONFIG_DIR}
    refused(words, load_config, gin_file=f"{gin}.gin", **load)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--gin=quikstart.gin"], 2, "quikstart.gin|quickstart.gin"),
        (["--prams=x"], 2, "prams|param"),
        (["--param=MemoryConfig.chunk_size=4096"], 2, "chunk_size 4096"),
        ([f"--run_dir={'x' * 300}"], 2, "File name too long"),
        (["--run_dir="], 2, "--run_dir is empty"),
        (["--run_dir=gs://bucket/run"], 2, "mount the bucket"),
        (["--run_dir=file:///runs/a"], 2, "give its path alone"),
        (["--profile="], 2, "--profile is empty"),
        (["--profile=2:281"], 2, "'2:281' is not START:STOP with 0 <= START < STOP <= 24"),
        (["--param=TransformerConfig.vocab_size=2000000000"], 6, "GiB per device"),
        (["--param=TransformerConfig.dim=100000000"], 6, "GiB per device"),
        (["--param=RecallConfig.num_slots=100000000000"], 6, "--dry_run"),
        (["--dry_run", "--topology=h100x1000000"], 2, "1000000 devices, plans go up to"),
        (["--param=TransformerConfig.vocab_size=7"], 2, "7|8|vocab_size"),
        (["--param=TEXT='PLACE/empty'"], 3, "PLACE/empty"),
    ],
)
def test_launch_refuses(tmp_path, arguments, status, words):
    (tmp_path / "empty").mkdir()
    base = tiny_run.flags("text.gin") if "TEXT" in arguments[0] else RECALL
    arguments = [*base, f"--run_dir={tmp_path / 'run'}", *arguments]
    arguments = [x.replace("PLACE", str(tmp_path)) for x in arguments]
    message = commands.refused("launch", *arguments, status=status)
    assert all(word.replace("PLACE", str(tmp_path)) in message for word in words.split("|"))
    assert not [*tmp_path.rglob("*.*")]


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
        ("evaluate --run_dir=RUN --task=ppl --text=BOOK --seq_len=-4", 2, "Perplexity.seq_len -4"),
        ("evaluate --run_dir=RUN --task=ppl --text=BOOK --seq_len=1000000000", 3, "1 .. 1048576"),
        ("evaluate --run_dir=RUN --task=ppl --text=BOOK --batch_size=1000000000", 2, "1 .. 65,536"),
        ("evaluate --run_dir=RUN --task=ppl --text=", 2, "Perplexity.text is empty"),
        ("evaluate --run_dir=RUN --task=ppl --text=BOOK --mesh=", 2, "--mesh is empty"),
        ("evaluate --run_dir=FOLDER --task=ppl", 2, "FOLDER is not a run directory: it"),
        ("generate --run_dir=RUN --prompt_file=/dev/zero", 3, "more than 268435456 bytes, the lo"),
        ("generate --run_dir=RUN --prompt_file=BOOK --json=FOLDER", 2, "must be a file in a fold"),
        ("generate --run_dir=RUN --prompt_file=", 2, "--prompt_file is empty"),
        ("generate --run_dir=RUN --prompt_file=BOOK --save_state=s3://bucket/x", 2, "mount the bu"),
        ("generate --run_dir=RUN --prompt_file=hdfs://host/book", 2, "mount the bucket"),
        ("report --run_dir=RUN --output=FOLDER/page", 2, "nothing was measured in"),
        ("report --run_dir=FOLDER/absent", 2, "nothing was measured in FOLDER/absent"),
        ("convert import --format=reference FOLDER/absent FOLDER/run", 3, "at FOLDER/absent"),
        ("convert import --format=reference  FOLDER/run", 2, "is empty"),
    ],
)
def test_commands_refuse(run_dir, tmp_path, command, status, words):
    places = {"RUN": run_dir, "BOOK": run_dir.parent / "book.txt", "FOLDER": tmp_path}
    for name, path in places.items():
        command, words = (text.replace(name, str(path)) for text in (command, words))
    assert words in commands.refused(*command.split(" "), status=status)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["gs://b/x", Path("s3://b/x"), Path("file:///x"), "abfss://b@c/x"])
@pytest.mark.parametrize("call", [RunDirectory, load_run, lambda path: train_run(CONFIG, path)])
def test_the_library_refuses_buckets_and_addresses(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"mount the bucket|give its path alone"):
        call(path)
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
