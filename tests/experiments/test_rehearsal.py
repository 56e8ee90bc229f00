"""The rehearsal names every part of a run with a mistake, tries the others, and leaves nothing."""

import re
from types import SimpleNamespace

import commands
import corpora
import pytest
import tiny_run
from checks import refused
from damage import flip
from object_store import serving
from small_models import byte_model, run_config

from ttcd_jax.commands import plan
from ttcd_jax.commands.rehearsal import Rehearsal
from ttcd_jax.data.sources import MixtureConfig, RecordsConfig, TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig, train_tokenizer
from ttcd_jax.errors import CheckpointError, DataError, ResourceError, UserError
from ttcd_jax.run import build, directory
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.start import inherited_model
from ttcd_jax.tasks.perplexity import Perplexity

TEXTS = ["A text of some length, read twice. " * 9] * 12
PARTS = ["data", "tokenizer", "model", "evaluations", "step", "memory", "run_dir"]


@pytest.fixture(autouse=True)
def step(monkeypatch):
    """The plan of a step that takes a byte, which no test but one compiles."""
    mesh = SimpleNamespace(shape={"fsdp": 8})
    planned = SimpleNamespace(accumulation_steps=1), mesh, plan.Plan({"all": 1}, [], "none")
    monkeypatch.setattr(plan, "plan_of", lambda *_: planned)


@pytest.fixture
def folder(tmp_path):
    corpora.records(
        corpora.text_folder(tmp_path / "text", TEXTS), tmp_path / "records", shard_tokens=2048
    )
    return tmp_path


def _of_records(folder, **changes):
    data = RecordsConfig(paths=str(folder / "records"), seq_len=32)
    fields = {"data": data, "evaluate_every": 2, "evaluations": (Perplexity(),)}
    return run_config(byte_model(), **fields | changes)


def _tried(capsys):
    """{part: ok, FAILED or not tried}, in order."""
    lines = capsys.readouterr().out.splitlines()
    return {x[1]: x[0] for x in (re.split(r"\s{2,}", line) for line in lines)}


def _failed(config, run_dir, capsys, error=UserError, target=None):
    """The parts that failed and those that were not tried; the error names the former."""
    message = refused("", Rehearsal(config, RunDirectory(run_dir), target).run, error=error)
    found = _tried(capsys)
    assert "|".join(found) == "|".join(PARTS)
    failed, left_out = ([x for x in found if found[x] == y] for y in ("FAILED", "not tried"))
    assert f"failed in {' and '.join(failed)}: " in message
    return failed, left_out


def test_all_parts_are_tried_and_nothing_is_left(folder, capsys):
    before = sorted(folder.rglob("*"))
    Rehearsal(_of_records(folder), RunDirectory(folder / "new/runs/run"), None).run()
    assert _tried(capsys) == dict.fromkeys(PARTS, "ok")
    assert sorted(folder.rglob("*")) == before


def test_a_run_that_has_done_more_steps_is_refused_as_by_the_launch(folder, capsys, monkeypatch):
    config = _of_records(folder)
    _, manifest = build.build_data(config, range(1))
    RunDirectory(folder / "run").claim(config.to_dict(), None, manifest)
    monkeypatch.setattr(directory, "complete_steps", lambda _: [12])
    fewer, changes = config.replace(steps=4), ["RunConfig.steps"]
    refused("in run_dir: ", Rehearsal(fewer, RunDirectory(folder / "run"), None, changes).run)
    assert "RunConfig.steps 4 is below the 12 steps" in capsys.readouterr().out


def test_a_mistake_in_each_part_is_named_and_the_others_are_tried(folder, capsys, monkeypatch):
    config, run = _of_records(folder), folder / "run"
    # Memory.
    used = plan.Plan({"all": 2**60}, [], "none")
    mesh, planned = SimpleNamespace(shape={}), SimpleNamespace(accumulation_steps=1)
    with monkeypatch.context() as context:
        context.setattr(plan, "plan_of", lambda *_: (planned, mesh, used))
        assert _failed(config, run, capsys, ResourceError) == (["memory"], [])

    # The step.
    def refuse(*_):
        raise UserError("a batch does not divide")

    with monkeypatch.context() as context:
        context.setattr(plan, "plan_of", refuse)
        assert _failed(config, run, capsys) == (["step"], ["memory"])
    # The run directory: below a file, in use, holding something else.
    (folder / "file").write_text("")
    (folder / "else").mkdir()
    (folder / "else/file").write_text("")
    for place in ("file/run", "else", "run[1]"):
        assert _failed(config, folder / place, capsys) == (["run_dir"], [])
    # That of another run.
    claimed = folder / "claimed"
    _, manifest = build.build_data(config, range(1))
    RunDirectory(claimed).claim(config.to_dict(), None, manifest)
    before = sorted(folder.rglob("*"))
    other = config.replace(seed=config.seed + 1)
    assert _failed(other, claimed, capsys) == (["run_dir"], [])
    Rehearsal(config, RunDirectory(claimed), None).run()
    assert _tried(capsys) == dict.fromkeys(PARTS, "ok")
    assert sorted(folder.rglob("*")) == before
    # That run, whose checkpoints have vanished.
    (claimed / "metrics.jsonl").write_text('{"step": 9}\n')
    assert _failed(config, claimed, capsys, CheckpointError) == (["run_dir"], [])
    (claimed / "metrics.jsonl").unlink()
    # That run, whose data have changed since.
    corpora.records(corpora.text_folder(folder / "less", TEXTS[1:]), folder / "others")
    others = config.replace(data=config.data.replace(paths=str(folder / "others")))
    assert _failed(others, claimed, capsys, DataError) == (["data"], ["model", "evaluations"])
    # The run that it starts from: there is none, or none of its checkpoints.
    assert _failed(config.replace(start_from=str(folder / "none")), run, capsys) == (["model"], [])
    untrained = config.replace(start_from=str(claimed))
    assert _failed(untrained, run, capsys, CheckpointError) == (["model"], [])
    # Held-out text.
    none = _of_records(folder, evaluations=(Perplexity(text=str(folder / "none")),))
    assert _failed(none, run, capsys, DataError) == (["evaluations"], [])
    # Several at once, with the exit status of the first.
    assert _failed(none, folder / "file/run", capsys, DataError) == (["evaluations", "run_dir"], [])
    # The records.
    flip(sorted((folder / "records").glob("*00000*"))[0])
    assert _failed(config, run, capsys, DataError) == (["data"], ["model", "evaluations"])
    assert not run.exists()
    gone = config.replace(data=config.data.replace(paths=str(folder / "gone")))
    others = ["tokenizer", "model", "evaluations"]
    assert _failed(gone, run, capsys, DataError) == (["data"], others)


def test_a_tokenizer_is_tried_on_text_and_records(folder, capsys):
    path, run = folder / "tokenizer.json", folder / "run"
    path.write_text(train_tokenizer(TEXTS, 258))
    tokenizer = TokenizerConfig(kind="json", path=str(path))
    text = corpora.text_folder(folder / "text", TEXTS)
    data = TextConfig(corpus=text, tokenizer=tokenizer, seq_len=32)
    mixed = MixtureConfig(parts=(data, _of_records(folder).data), seq_len=32)
    config = _of_records(folder, data=data)
    Rehearsal(config, RunDirectory(run), None).run()
    assert _tried(capsys) == dict.fromkeys(PARTS, "ok")
    left = ["model", "evaluations"]
    # Other records than the text's.
    assert _failed(config.replace(data=mixed), run, capsys, DataError) == (["tokenizer"], left)
    small = config.replace(model=byte_model(vocab_size=100))
    assert _failed(small, run, capsys, DataError) == (["tokenizer"], left)
    path.write_text("{}")
    assert _failed(config, run, capsys, DataError) == (["tokenizer"], left)
    gone = data.replace(corpus=text.replace(path=str(folder / "gone")))
    found = _failed(config.replace(data=gone), run, capsys, DataError)
    assert found == (["data", "tokenizer"], left)


def test_a_bucket_is_tried_and_emptied(folder, capsys, monkeypatch):
    with serving() as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TTCD_JAX_BUCKETS", str(folder / "copies"))
        run_dir = RunDirectory("s3://bucket/run")
        Rehearsal(_of_records(folder), run_dir, None).run()
        assert _tried(capsys) == dict.fromkeys(PARTS, "ok")
        sent, read = ({name for x, name, _ in store.log if x == y} for y in ("PUT", "GET"))
        arrays = {name for name in sent if re.search("rehearsal-.*/1/params/", name)}
        assert arrays
        assert arrays <= read
        assert store.names("bucket/") == []
        for refused_method in ("PUT", "DELETE"):
            store.fault = lambda method, name, bad=refused_method: 403 if method == bad else None
            assert _failed(_of_records(folder), "s3://bucket/run", capsys) == (["run_dir"], [])
        store.fault = lambda method, name: None
        assert store.names("bucket/run/rehearsal-")  # is no obstacle
        RunDirectory("s3://bucket/run").check_free()
        # A run without whose model there is nothing to try.
        store.fault = lambda method, name: 403
        inherit = inherited_model(run_dir)
        words = "RunConfig.start_from 's3://bucket/other' gives no model: PERMISSION_DENIED"
        refused(words, inherit, "model", {"start_from": "s3://bucket/other"})
        words = "RunConfig.start_from '/other' gives no model: /other is not a run directory"
        refused(words, inherit, "model", {"start_from": "/other"})


def test_the_command_tries_what_it_can(tmp_path):
    line = tiny_run.flags("text.gin", f"TEXT='{tmp_path / 'none'}'", "STEPS=4")
    result = commands.run("launch", *line, f"--run_dir={tmp_path / 'run'}", "--rehearse")
    assert result.returncode == DataError.exit_code, result.stderr
    assert "the rehearsal failed in data: see" in result.stderr
    assert re.search("^FAILED +data .*none", result.stdout, re.MULTILINE)
    for part in ("step", "memory", "run_dir"):
        assert re.search(f"^ok +{part} ", result.stdout, re.MULTILINE), result.stdout
    both = commands.run("launch", *line, "--dry_run", "--rehearse")
    assert both.returncode == UserError.exit_code
    assert "dry_run, rehearse" in both.stderr
    assert list(tmp_path.iterdir()) == []
