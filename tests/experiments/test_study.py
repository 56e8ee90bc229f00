"""Studies: several recipes with several seeds, compared on the same held-out text."""

import json
import types
from pathlib import Path

import commands
import numpy as np
import pytest
import tiny_run

from experiments.cli import CONFIG_DIR
from experiments.study import runs
from experiments.study.page import write_study
from experiments.study.runs import StudyConfig
from ttcd_jax.data.corpus import CorpusConfig, load_documents
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.measure.by_document import means_over_documents
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.directory import RunDirectory

BASE = """
include 'data/text_bytes.gin'
include 'train/adamw_short.gin'
STEPS = 1
RunConfig.steps = %STEPS
CorpusConfig.path = '{corpus}'
TextConfig.seq_len = 32
TransformerConfig.vocab_size = 258
"""
BASE += "\n".join(x for x in tiny_run.BINDINGS if "fast_layers" not in x and "Memory" not in x)
METHODS = {
    "base": "include 'method/swa.gin'",
    "other": "include 'method/ipttcd_short_budget.gin'\nTransformerConfig.fast_layers = (0,)\n"
    "MemoryConfig.chunk_size = 4",
    "third": "TransformerConfig.method = 'full'\nTransformerConfig.window = None",
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
    for split, count in (("train", 3), ("validation", 2)):
        (folder / "corpus" / split).mkdir(parents=True)
        for i in range(count):
            text = "".join(rng.choice([*"abc "], 230))
            (folder / "corpus" / split / f"{i}.txt").write_text(text)
    for name, method in METHODS.items():
        # Includes come first.
        base = BASE.format(corpus=folder / "corpus")
        if name == "third":
            base = base.replace("TransformerConfig.window=8\n", "")
        include, _, rest = method.partition("\n") if "include" in method else ("", "", method)
        (folder / f"{name}.gin").write_text(f"{include}\n{base}\n{rest}\n")
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
        write_study(config, texts, Path(path.name))
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


def test_results_of_other_pieces_and_settings_are_not_shown_again(computed, folder):
    path, _ = computed
    config = _study(folder)
    task, file = config.evaluations[0], path / "base-3/eval/position.base-corpus/results.json"
    for params, is_done in (((), True), (["StudyConfig.max_pieces=4"], False)):
        texts = runs.held_out_texts(_study(folder, *params), [], path)["corpus"]
        assert len([*texts.iterdir()]) == (6 if is_done else 4)
        assert runs._is_done(task, file, texts) == is_done
    with pytest.raises(UserError, match="of another configuration: steps: 1 -> 2; choose"):
        runs.compute(config, "base", 3, ["RunConfig.steps=2"], {}, path)


def test_damaged_results_are_one_line(computed, folder):
    path, _ = computed
    file = path / "base-3" / "eval" / "position.base-corpus" / "results.json"
    whole = file.read_text()
    file.write_text(json.dumps(json.loads(whole) | {"series": {"base, corpus": 3}}))
    with pytest.raises(DataError, match=f"{file} is damaged"):
        write_study(_study(folder), {"corpus": path}, path)
    file.write_text(whole)


def test_mistakes_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="--only=x is none of the study's base, other, third"):
        _study(folder).chosen(["x"])
    with pytest.raises(UserError, match="lower StudyConfig"):
        runs.held_out_texts(_study(folder, "StudyConfig.piece_bytes=999"), [], tmp_path)
    with pytest.raises(UserError, match="two recipes of the study have one name"):
        _study(folder, "StudyConfig.once=('elsewhere/base.gin',)")
    text = (folder / "base.gin").read_text()
    (folder / "longer.gin").write_text(text.replace("seq_len = 32", "seq_len = 64"))
    longer = _study(folder, f"StudyConfig.once=('{folder}/longer.gin',)")
    with pytest.raises(UserError, match="one data configuration"):
        runs.held_out_texts(longer, [], tmp_path)


def test_a_study_without_evaluations_shows_the_memory(computed, folder):
    path, _ = computed
    write_study(_study(folder, "StudyConfig.evaluations=()"), {}, path)
    assert (path / "index.html").read_text().count("<img") == 3
    assert "|eta S| / |W_base|" in (path / "tables.txt").read_text()
