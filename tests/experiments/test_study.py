"""Studies: several recipes with several seeds, compared on the same held-out text."""

import json
import re
import types
from pathlib import Path

import commands
import numpy as np
import pytest
import tiny_run
from checks import refused

from experiments.cli import CONFIG_DIR
from experiments.study import runs
from experiments.study.records import write_records
from experiments.study.runs import StudyConfig, write_study
from ttcd_jax.data.corpus import CorpusConfig, load_documents
from ttcd_jax.errors import DataError
from ttcd_jax.files import write_whole
from ttcd_jax.measure.by_document import means_over_documents
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.directory import RunDirectory

INCLUDED = ("data/text_bytes.gin", "train/adamw_short.gin")
BINDINGS = (
    *("STEPS=1", "RunConfig.steps=%STEPS", "TextConfig.seq_len=32"),
    *("TransformerConfig.vocab_size=258", "CorpusConfig.path='{folder}/corpus'"),
    *(x for x in tiny_run.BINDINGS if not re.search("fast_layers|Memory|[.]window=", x)),
)
METHODS = {  # what each includes and binds
    "base": ("method/swa.gin", "TransformerConfig.window=8"),
    "other": (
        *("method/ipttcd_short_budget.gin", "TransformerConfig.window=8"),
        *("TransformerConfig.fast_layers=(0,)", "MemoryConfig.chunk_size=4"),
    ),
    "third": (None, "TransformerConfig.method='full'", "TransformerConfig.window=None"),
}
STUDY = """
StudyConfig.recipes = ('{folder}/base.gin', '{folder}/other.gin')
StudyConfig.once = ('{folder}/third.gin',)
StudyConfig.seeds = (3, 5)
StudyConfig.evaluations = (@Position(), @Recurrence())
StudyConfig.piece_bytes = 40
StudyConfig.max_pieces = 6
Position.seq_len = 40
Recurrence.seq_len = 40
Recurrence.window = 8
Recurrence.reach = 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    rng = np.random.default_rng(0)
    for path in ("train/0", "train/1", "train/2", "validation/0", "validation/1"):
        text = "".join(rng.choice([*"abc "], 230))
        write_whole(folder / "corpus" / f"{path}.txt", text)
    for name, (method, *bindings) in METHODS.items():
        lines = [f"include '{file}'" for file in (method, *INCLUDED) if file]
        lines += [x.format(folder=folder) for x in (*BINDINGS, *bindings)]
        (folder / f"{name}.gin").write_text("\n".join(lines))
    (folder / "study.gin").write_text(STUDY.format(folder=folder))
    return folder


def _study(folder: Path, *params: str) -> StudyConfig:
    return load_config(StudyConfig, str(folder / "study.gin"), params, config_dir=CONFIG_DIR)


@pytest.fixture(scope="module")
def computed(folder):
    """A study's folder, and the commands that it took."""
    config, path, started = _study(folder), folder / "out", []

    def run(line, check):
        assert not check
        started.append(line)
        return commands.run(line[2].removeprefix("experiments."), *line[3:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "subprocess", types.SimpleNamespace(run=run))
        for _ in range(2):  # the second time nothing is missing
            texts = runs.held_out_texts(config, [], path)
            for name, seed in config.chosen():
                runs.compute(config, name, seed, [], texts, path)
        patch.chdir(folder)  # as the command is given: relative to the working directory
        sections = write_study(config, texts, Path(path.name))
        write_records(config, sections, path, path / "records.jsonl", "COMMAND")
    return path, started


def test_every_run_is_trained_once_and_evaluated_on_the_same_pieces(computed):
    path, started = computed
    assert len(started) == 5
    assert sorted(x.name for x in path.glob("*-*")) == [
        *("base-3", "base-5", "other-3", "other-5", "third-3")
    ]
    texts = runs.held_out_texts(_study(path.parent), [], path)["corpus"]
    pieces = [x.read_text() for x in sorted(texts.iterdir())]
    assert [len(piece) for piece in pieces] == [40] * 6
    with RunDirectory(path).lock(), pytest.raises(DataError, match="no file under"):
        load_documents(CorpusConfig(kind="text", path=str(path)), "train")
    corpus = [x.read_text() for x in sorted((path.parent / "corpus" / "validation").iterdir())]
    assert all(any(piece in text for text in corpus) for piece in pieces)


def test_tables_are_means_of_seeds_and_paired_differences(computed):
    path, _ = computed

    def records(name, seed, label):
        file = path / f"{name}-{seed}" / "eval" / f"position.{name}-corpus" / "results.json"
        found = json.loads(file.read_text())["series"][f"{name}, corpus{label}"]
        return [x for x in found if x["positions"] == "1-31"]

    def sums(name, label):
        nll = np.zeros((6, 1))
        for seed in (3, 5):
            for x in records(name, seed, label):
                nll[x["document"]] += x["nll"]
        return nll

    tokens = np.full((6, 1), 2.0 * 31)
    expected = means_over_documents(sums("other", ", fast weights on") - sums("base", ""), tokens)
    tables = (path / "tables.txt").read_text()
    table = tables.split("Loss by position (corpus): nats per token, less base\n")[1]
    header, _, first, *_ = table.splitlines()
    cell = dict(zip(header.split(), first.replace(" ± ", "±").split(), strict=True))["1-31"]
    half = (expected.high[0] - expected.low[0]) / 2
    assert cell == f"{expected.mean[0]:.3f}±{half:.3f}"
    page = (path / "index.html").read_text()
    assert page.count("<img") == 7
    assert "other, off (eta = 0)" in page


def test_records_have_the_numbers_of_the_tables(computed):
    path, _ = computed
    head, *rows = map(json.loads, (path / "records.jsonl").read_text().splitlines())
    assert (head["command"], head["seeds"]) == ("COMMAND", [3, 5])
    assert head["commit"]
    assert [*head["recipes"]] == ["base", "other", "third"]
    assert len({digest for _, digest in head["recipes"].values()}) == 3
    cells = {(x["section"], x["row"]): x for x in rows}
    tables = (path / "tables.txt").read_text()
    name = "Loss by position (corpus): nats per token, less base"
    mean, half = cells[name, "other"]["1-31"]
    assert f"{mean:.3f} ± {half:.3f}" in tables.split(name)[1].split("\n\n")[0]
    found = cells["Loss by position (corpus): every seed, all tokens", "other, off (eta = 0)"]
    assert f"{found['seed 5']:.4g}" in tables
    assert {"Runs"} < {x["section"] for x in rows}


def test_results_of_other_pieces_and_settings_are_not_shown_again(computed, folder, monkeypatch):
    (path, _), evaluated = computed, []
    done = types.SimpleNamespace(returncode=0, write=list)
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(run=lambda *_, **__: done))
    monkeypatch.setattr(runs, "evaluate", lambda task, *_: evaluated.append(task.name) or done)
    for params, names in (((), []), (["StudyConfig.max_pieces=4"], ["position", "recurrence"])):
        config = _study(folder, *params)
        texts = runs.held_out_texts(config, [], path)
        assert len([*texts["corpus"].iterdir()]) == config.max_pieces
        runs.compute(config, "base", 3, [], texts, path)
        assert evaluated == names
    changed = config, "base", 3, ["RunConfig.steps=2"], {}, path
    refused("of another configuration: steps: 1 -> 2; choose", runs.compute, *changed)


def test_mistakes_are_refused(folder, tmp_path):
    refused("--only=x is not one of the study's base, other, third", _study(folder).chosen, ["x"])
    refused(
        "two recipes of the study have one name", _study, folder, "StudyConfig.once=('x/base',)"
    )
    text = (folder / "base.gin").read_text()
    (folder / "longer.gin").write_text(text.replace("seq_len=32", "seq_len=64"))
    for words, param in (
        ("lower StudyConfig", "piece_bytes=999"),
        ("one data configuration", f"once=('{folder}/longer.gin',)"),
    ):
        study = _study(folder, f"StudyConfig.{param}")
        refused(words, runs.held_out_texts, study, [], tmp_path)


def test_a_study_without_evaluations_shows_the_memory(computed, folder):
    path, _ = computed
    write_study(_study(folder, "StudyConfig.evaluations=()"), {}, path)
    assert (path / "index.html").read_text().count("<img") == 3
    assert "|eta S| / |W_base|" in (path / "tables.txt").read_text()
