"""Changes of a run when it is resumed: fields that are named, and the place of its data."""

import json
import re
import shutil
from pathlib import Path

import commands
import corpora
import pytest
import tiny_run
from checks import refused
from small_models import run_config

from ttcd_jax import RunConfig
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import MixtureConfig, TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig, train_tokenizer
from ttcd_jax.errors import CheckpointError
from ttcd_jax.run.config import accepted_changes, common_fields
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.sharding.mesh import MeshConfig

CONFIG = run_config()
RECALL = ("recall.gin", *tiny_run.RECALL)


@pytest.fixture
def claim(tmp_path):
    """Claims one run directory: `claim(config, manifest, *changes)`."""
    directory = RunDirectory(tmp_path / "run")

    def claim(config, manifest=None, *changes):
        with directory.lock():
            directory.claim(config.to_dict(), "text", manifest or {}, changes=changes)
        return directory

    return claim


def _changes(directory):
    return json.loads((directory.path / "config.json").read_text())["changes"]


def test_a_run_from_before_a_field_existed_goes_on_with_its_default(claim):
    path = claim(CONFIG).path / "config.json"
    stored = json.loads(path.read_text()) | {"format": 2}
    del stored["sha256"], stored["keep_every"], stored["model"]["scans_layers"]
    path.write_text(json.dumps(stored))
    claim(CONFIG)
    words = "keep_every: None -> 4; add --change=RunConfig.keep"
    refused(words, claim, CONFIG.replace(keep_every=4))


def test_the_flags_that_a_refusal_prints_change_the_run(tmp_path):
    run_dir = f"--run_dir={tmp_path}"
    commands.output("launch", *tiny_run.flags(*RECALL, "STEPS=8"), run_dir)
    longer = "launch", *tiny_run.flags(*RECALL, "STEPS=12", "ScheduleConfig.peak=2e-2"), run_dir
    before = (tmp_path / "config.json").read_bytes(), (tmp_path / "config.gin").read_bytes()
    message = commands.refused(*longer)
    assert "optimizer.schedule.peak: 0.01 -> 0.02, steps: 8 -> 12; add " in message
    assert before[0] == (tmp_path / "config.json").read_bytes()
    assert before[1] == (tmp_path / "config.gin").read_bytes()
    flags = re.findall(r"--change=\S+", message)
    assert flags == ["--change=ScheduleConfig.peak", "--change=RunConfig.steps"]
    assert "resumed at step 8\n" in commands.output(*longer, *flags)
    assert [step for step, *_ in tiny_run.losses(tmp_path)] == [*range(1, 13)]
    directory = RunDirectory(tmp_path)
    config = RunConfig.from_dict(directory.read_config())
    assert (config.steps, config.optimizer.schedule.peak) == (12, 0.02)
    assert _changes(directory) == [
        {"step": 8, "field": "ScheduleConfig.peak", "old": 0.01, "new": 0.02},
        {"step": 8, "field": "RunConfig.steps", "old": 8, "new": 12},
    ]
    assert "STEPS=12" in (tmp_path / "config.gin").read_text()
    assert "is complete at step 12" in commands.output(*longer, *flags)
    shorter = "launch", *tiny_run.flags(*RECALL, "STEPS=4", "ScheduleConfig.peak=2e-2"), run_dir
    message = commands.refused(*shorter, "--change=RunConfig.steps")
    assert "RunConfig.steps 4 is below the 12 steps that " in message
    assert RunDirectory(tmp_path).read_config()["steps"] == 12


def test_a_field_is_named_as_in_gin_or_by_its_path_and_the_layout_changes_freely(claim):
    claim(CONFIG)
    claim(CONFIG.replace(log_every=3), None, "log_every")
    optimizer = CONFIG.optimizer.replace(clip_norm=0.5)
    names = "OptimizerConfig.clip_norm", "log_every"
    changed = CONFIG.replace(optimizer=optimizer)
    directory = claim(changed, None, *names)
    model = CONFIG.model.replace(remat="block", scans_layers=False)
    layout = {"accumulation_steps": 1, "mesh": MeshConfig(fsdp=1), "metrics": ()}
    claim(changed.replace(model=model, **layout))
    assert [(x["field"], x["old"], x["new"]) for x in _changes(directory)] == [
        ("RunConfig.log_every", 10, 3),
        ("OptimizerConfig.clip_norm", 1.0, 0.5),
        ("RunConfig.log_every", 3, 10),
    ]


def test_a_directory_of_another_command_and_a_name_without_a_field_are_refused(claim, tmp_path):
    refused("no field; did you mean 'steps'", claim, CONFIG, None, "steps.x")
    RunDirectory(tmp_path / "run").claim({"type": "MADSweepConfig", "recipe": 1}, None, {})
    words = "a run of another configuration: type: MADSweepConfig -> RunConfig, recipe: 1 -> None, "
    refused(f"{words}|; choose another --run_dir", claim, CONFIG)


def test_what_makes_another_run_is_refused_though_named(claim):
    path = claim(CONFIG).path / "config.json"
    before = path.read_bytes()
    for name, change in (
        ("seed", {"seed": 1}),
        ("batch_size", {"batch_size": 4}),
        ("data.num_slots", {"data": CONFIG.data.replace(num_slots=16)}),
        ("model.window", {"model": CONFIG.model.replace(window=64)}),
        ("optimizer.kind", {"optimizer": CONFIG.optimizer.replace(kind="muon")}),
        ("optimizer.clip_norm", {"optimizer": CONFIG.optimizer.replace(clip_norm=None)}),
    ):
        words, other = f"another configuration: {name}: | choose", CONFIG.replace(steps=9, **change)
        message = refused(words, claim, other, None, name, "RunConfig.steps")
        assert "--change" not in message
        claim(CONFIG)
        assert path.read_bytes() == before


def test_parts_of_a_mixture_may_lie_elsewhere_and_not_be_others():
    def stored(path, percent):
        corpus = CorpusConfig(kind="text", path=path, validation_percent=percent)
        text = TextConfig(corpus=corpus, tokenizer=TokenizerConfig(), seq_len=8)
        return {"data": MixtureConfig(parts=(text, text), weights=(1, 1), seq_len=8).to_dict()}

    here, moved, other = stored("a", 5), stored("b", 5), stored("b", 6)
    assert common_fields(here) == common_fields(moved) != common_fields(other)
    (first, second) = accepted_changes(Path("run"), here, moved, None)
    assert first == second == {"field": "CorpusConfig.path", "old": "a", "new": "b"}
    words = "data.parts.0.corpus.validation_percent: 5 -> 6"
    refused(words, accepted_changes, Path("run"), here, other, None)


def test_moved_text_goes_on_and_one_of_another_tokenizer_does_not(tmp_path):
    text = corpora.text_folder(tmp_path / "old" / "text", ["some words on a line\n" * 50] * 40)
    old, moved = Path(text.path).parent, tmp_path / "moved"
    (old / "tokenizer.json").write_text(train_tokenizer(["some words on a line"], 258))

    def line(folder):
        places = f"TEXT='{folder / 'text'}'", f"TokenizerConfig.path='{folder / 'tokenizer.json'}'"
        sizes = "STEPS=4", "TextConfig.seq_len=16", "TokenizerConfig.kind='json'"
        flags = tiny_run.flags("text.gin", *sizes, *places)
        return "launch", *flags, f"--run_dir={tmp_path / 'run'}"

    commands.output(*line(old))
    old.rename(moved)
    assert "is complete at step 4" in commands.output(*line(moved))
    directory = RunDirectory(tmp_path / "run")
    data = directory.read_part("data")
    assert data["corpus"]["path"] == str(moved / "text")
    assert data["tokenizer"]["path"] == str(moved / "tokenizer.json")
    fields = [x["field"] for x in _changes(directory)]
    assert fields == ["CorpusConfig.path", "TokenizerConfig.path"]
    task = f"--run_dir={directory.path}", "--task=ppl", "--max_rows=2"
    assert "written to" in commands.output("evaluate", *task)
    changed = shutil.copytree(moved, tmp_path / "changed")
    with (changed / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert "the training data changed since " in commands.refused(*line(changed), status=3)
    assert directory.read_part("data") == data


def test_an_edited_configuration_is_refused_and_one_without_a_digest_is_read(claim):
    directory = claim(CONFIG)
    path = directory.path / "config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored))  # other blanks
    assert directory.read_config() == CONFIG.to_dict()
    model = stored["model"] | {"init_std": stored["model"]["init_std"] * (1 + 1e-15)}
    unsealed = {x: stored[x] for x in stored if x != "sha256"}
    for edited in (stored | {"seed": 5}, stored | {"model": model}, unsealed):
        path.write_text(json.dumps(edited))
        words = "json was edited or damaged | --change"
        refused(words, directory.read_config, error=CheckpointError)
    path.write_text(json.dumps({"format": 2} | CONFIG.to_dict()))
    assert directory.read_config() == CONFIG.to_dict()
    claim(CONFIG.replace(steps=9), None, "RunConfig.steps")
    assert json.loads(path.read_text())["format"] == 3
