"""Studies: several recipes with several seeds, compared on the same held-out text."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import commands
import numpy as np
import pytest
import tiny_run
from checks import refused

from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.commands.study import runs
from ttcd_jax.commands.study.runs import StudyConfig, write_records, write_study
from ttcd_jax.data.corpus import CorpusConfig, load_documents
from ttcd_jax.data.documents import Document
from ttcd_jax.errors import DataError
from ttcd_jax.files import write_whole
from ttcd_jax.measure.by_document import means_over_documents, means_over_seeds
from ttcd_jax.models.config import training_flops_per_token
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.tasks.controls import Controls
from ttcd_jax.tasks.documents import PositionLoss
from ttcd_jax.tasks.recall import Evidence

TINY = [x for x in tiny_run.BINDINGS if not re.search("fast_layers|Memory|[.]window=", x)]
INCLUDED = ("data/text_bytes.gin", "train/adamw_short.gin")
BINDINGS = (
    *("STEPS=1", "RunConfig.steps=%STEPS", "TextConfig.seq_len=32"),
    *("TransformerConfig.vocab_size=258", "CorpusConfig.path='{folder}/corpus'"),
    *TINY,
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


def _texts(study, path):
    return runs.held_out_texts(study, study.runs(), path)


def _compute(study, path):
    """The recipes and texts, and how many runs were trained, each in a fork."""
    recipes, texts, run = study.runs(), _texts(study, path), mock.Mock()
    run.side_effect = lambda x, check: commands.run(x[2].removeprefix("ttcd_jax.commands."), *x[3:])
    with mock.patch.object(runs, "subprocess", mock.Mock(run=run)):
        for name, seed in sorted(study.chosen(recipes), key=lambda run: run[0] != runs.START):
            runs.compute(study, name, seed, recipes[name], texts, path)
    return recipes, texts, run.call_count


@pytest.fixture(scope="module")
def path(folder):
    """The folder of a study, as the command writes it: relative to the working directory."""
    study, path = _study(folder), folder / "out"
    assert _compute(study, path)[-1] == 5
    recipes, texts, trained = _compute(study, path)
    assert trained == 0
    with contextlib.chdir(folder):
        sections = write_study(study, recipes, texts, Path(path.name))
    command = "COMMAND BOOKS='/home/me/my-books/x.txt' tokens/s"
    write_records(study, recipes, sections, path, path / "records.jsonl", command)
    return path


def test_every_run_is_evaluated_on_the_same_pieces(path):
    names = ["base-3", "base-5", "other-3", "other-5", "third-3"]
    assert sorted(x.name for x in path.glob("*-*")) == names
    texts, documents = _texts(_study(path.parent), path)["corpus"]
    pieces = [x.read_text() for x in sorted(texts.iterdir())]
    assert [len(piece) for piece in pieces] == [40] * 6
    with RunDirectory(path).lock(), pytest.raises(DataError, match="no file under"):
        load_documents(CorpusConfig(kind="text", path=str(path)), "train")
    corpus = path.parent / "corpus" / "validation"
    for piece, name in zip(pieces, documents, strict=True):
        assert piece in (corpus / name).read_text()


def test_pieces_are_of_whole_characters_and_never_short(folder, tmp_path):
    text = "".join(f"{i}é日" for i in range(200))
    document = Document("x.txt", text.encode())
    starts = range(0, len(document.text) - 40, 40)
    pieces = [runs._text(document, start, 40) for start in starts]
    assert all(piece in text and 40 <= len(piece.encode()) <= 43 for piece in pieces)
    refused(
        "x.txt is not UTF-8", runs._text, Document("x.txt", b"\xe9t\xe9 "), 0, 4, error=DataError
    )
    (task, _) = _study(folder).evaluations
    assert (runs._of_all(task, 80).max_rows, runs._of_all(task, 9)) == (80, task)


def test_tables_and_records_are_means_of_seeds_and_paired_differences(path):
    def sums(name, label):
        nll = np.zeros((2, 6, 1))
        for index, seed in enumerate((3, 5)):
            file = path / f"{name}-{seed}" / "eval" / f"position.{name}-corpus" / "results.json"
            for x in json.loads(file.read_text())["series"][f"{name}, corpus{label}"]:
                if x["positions"] == "1-31":
                    nll[index, x["document"]] += x["nll"]
        return nll

    tokens = np.full((6, 1), 31.0)
    expected = means_over_documents(sums("other", ", fast weights on") - sums("base", ""), tokens)
    head, *rows = map(json.loads, (path / "records.jsonl").read_text().splitlines())
    wanted = {"command": "COMMAND BOOKS='DIR' tokens/s", "seeds": [3, 5]}
    wanted |= {"interval": "seeds and documents (of fewer than five: pieces of 40 bytes), in pairs"}
    assert head["commit"]
    assert head | wanted == head
    assert [*head["recipes"]] == ["base", "other", "third"]
    assert len({digest for _, digest in head["recipes"].values()}) == 3
    cells = {(x["section"], x["row"]): x for x in rows}
    name, half = "nats per token, less base", (expected.high[0] - expected.low[0]) / 2
    cell = cells[f"Loss by position (corpus): {name}", "other"]["1-31"]
    assert cell == [round(expected.mean[0], 3), round(half, 3)]
    tables, page = ((path / file).read_text() for file in ("tables.txt", "index.html"))
    assert "{:.3f} ± {:.3f}".format(*cell) in tables.split(f"(corpus): {name}\n")[1]
    found = cells["Loss by position (corpus): every seed, all tokens", "other, off (eta = 0)"]
    assert f"{found['seed 5']:.4g}" in tables
    assert {"training FLOPs", "gate", "window share"} < cells["Runs", "other, seed 3"].keys()
    by_document = cells[f"Loss by position (corpus): {name}, by document", "other"]
    assert {"0.txt", "1.txt"} < by_document.keys()
    assert "share of the headroom between base and third" in tables
    assert "|eta S| / |W_base|" in tables
    assert (page.count("<svg"), page.count('class="chip"')) == (8, 5)
    assert "other, off (eta = 0)" in page


DRAWN = (
    *("RunConfig.data=@EvidenceConfig()", "EvidenceConfig.num_facts=2", "STEPS=1"),
    *("EvidenceConfig.num_keys=3", "EvidenceConfig.num_values=3", "EvidenceConfig.num_fillers=2"),
    *("TransformerConfig.vocab_size=8", "RunConfig.steps=%STEPS", *METHODS["other"][1:]),
    *TINY,
)


def test_pieces_of_a_document_are_one_in_intervals():
    """Unless there are too few documents, or a piece was too short for an evaluation."""
    rng, pieces = np.random.default_rng(0), [*"aabcdde"]
    records = [PositionLoss("all", 1, 9, x, 8, y) for x, y in enumerate(rng.normal(9, 1, 7))]
    measured, names = runs._united({"base": {3: {"base": records}}}, pieces)
    of_each = [[x.nll for x, y in zip(records, pieces, strict=True) if y == name] for name in names]
    wanted = means_over_documents(
        *np.array([[[sum(x)], [8 * len(x)]] for x in of_each]).swapaxes(0, 1)
    )
    _, found = means_over_seeds([measured["base"][3]["base"]], lambda record: record.positions)
    assert (names, wanted) == ([*"abcde"], found)
    for kept, documents in ((records, [*"aabcddd"]), (records[1:], pieces)):
        unchanged = {"base": {3: {"base": kept}}}
        assert runs._united(unchanged, documents) == (unchanged, documents)


RECALL = ("RunConfig.data=@RecallConfig()", "RecallConfig.num_slots=3")
RECALL += ("RecallConfig.num_keys=3", "RecallConfig.num_values=3")


def test_recipes_on_rows_that_are_drawn_are_compared_seed_by_seed(tmp_path):
    lines = [f"include '{x}'" for x in (METHODS["other"][0], "train/adamw_short.gin")]
    (tmp_path / "own.gin").write_text("\n".join([*lines, *DRAWN]))
    tasks = Evidence(max_rows=9), Controls(max_rows=9)
    options = {"seeds": (3, 5), "evaluations": tasks}
    start, own = f"{tmp_path}/own.gin", ("own", f"{tmp_path}/own.gin", "STEPS=2")
    wide, other = (("more", start, *x) for x in (["EvidenceConfig.num_between=48"], RECALL))
    assert _texts(StudyConfig(recipes=(own, wide), **options), tmp_path) == {"evidence": None}
    refused("have one data", _texts, StudyConfig(recipes=(own, other), **options), tmp_path)
    study = StudyConfig(recipes=(own,), start=(start, "ScheduleConfig.peak=1e-3"), **options)
    recipes, texts, trained = _compute(study, tmp_path)
    assert (texts, trained) == ({"evidence": None}, 4)
    for seed in study.seeds:
        for name, steps, peak, before in (("start", 1, 1e-3, None), ("own", 2, 1e-2, "start")):
            run = RunDirectory(tmp_path / f"{name}-{seed}").read_config()
            assert (run["steps"], run["optimizer"]["schedule"]["peak"]) == (steps, peak)
            assert run["start_from"] == (before and f"{tmp_path}/{before}-{seed}")
    assert not (tmp_path / "start-3" / "eval").exists()
    sections = write_study(study, recipes, texts, tmp_path)
    write_records(study, recipes, sections, tmp_path, tmp_path / "records.jsonl", "COMMAND")
    head = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    assert [x[2:] for x in head["recipes"].values()] == [["STEPS=2"], ["ScheduleConfig.peak=1e-3"]]
    assert _compute(study, tmp_path)[-1] == 0
    tables = (tmp_path / "tables.txt").read_text()
    table = tables.split("Evidence: accuracy by distance (evidence): every seed\n")[1]
    rows = dict(re.findall(r"^own, (\S.*?/\S+(?: \d+)?)  +(.*)$", table, re.MULTILINE))
    files = [f"own-{seed}/eval/evidence.own-evidence/results.json" for seed in study.seeds]
    found = [json.loads((tmp_path / file).read_text())["series"] for file in files]
    for label in ("fast weights on", "off (eta = 0)"):
        for records in zip(*(series[f"own, evidence, {label}"] for series in found), strict=True):
            cells = [x["accuracy"] for x in records]
            values = [float(x) for x in rows.pop(f"{label}/{records[0]['distance']}").split()]
            wanted = [*cells, np.mean(cells), np.std(cells, ddof=1)]
            assert values == pytest.approx(wanted, rel=1e-3, abs=1e-9)
    assert not rows
    both = study.replace(recipes=(own, wide), seeds=(3,))
    table = write_study(both, *_compute(both, tmp_path)[:2], tmp_path)[1].table
    names = ("own, fast weights on", "more, fast weights on")
    found = [{x["distance"] for x in table if x.get(y) is not None} for y in names]
    assert found[0] & found[1] == {"1-7", "beyond 7"}
    assert len(found[0] ^ found[1]) == 6


def test_results_of_other_pieces_and_settings_are_not_shown_again(path, folder, monkeypatch):
    evaluated, done = [], mock.Mock(returncode=0)
    monkeypatch.setattr(runs, "subprocess", mock.Mock(**{"run.return_value": done}))
    monkeypatch.setattr(runs, "evaluate", lambda task, *_: evaluated.append(task.name) or done)
    for params, names in (((), []), (["StudyConfig.max_pieces=4"], ["position", "recurrence"])):
        config = _study(folder, *params)
        texts = _texts(config, path)
        assert len([*texts["corpus"][0].iterdir()]) == config.max_pieces
        runs.compute(config, "base", 3, config.runs()["base"], texts, path)
        assert evaluated == names
    changed = config, "base", 3, config.runs(["RunConfig.steps=2"])["base"], {}, path
    refused("of another configuration: steps: 1 -> 2; choose", runs.compute, *changed)


def test_seeds_whose_results_have_other_names_are_refused(path, tmp_path):
    """As those that an earlier version evaluated may have."""
    file = path / "other-5" / "eval" / "position.other-corpus" / "results.json"
    for run in ("other-3", "other-5"):
        shutil.copytree(path / run / "eval", tmp_path / run / "eval")
    other = tmp_path / file.relative_to(path)
    other.write_text(file.read_text().replace(", fast weights on", ""))
    task = _study(path.parent).evaluations[0]
    chosen = [("other", 3), ("other", 5)]
    assert runs._measured(chosen, task, "corpus", path)["other"].keys() == {3, 5}
    words = "other, fast weights on|from other-3, other-5"
    refused(words, runs._measured, chosen, task, "corpus", tmp_path)


def test_mistakes_are_refused(folder, tmp_path):
    names, study = "base, other, third", _study(folder)
    refused(f"--only=x is not one of the study's {names}", study.chosen, study.runs(), ["x"])
    for kind, param in (
        ("recipes", "once=('x/base',)"),
        ("recipes", "once=(('base', 'x.gin'),)"),
        ("recipes", "once=(('start', 'x.gin'),)"),
        ("evaluations", "evaluations=(@Needle(), @Needle())"),
    ):
        refused(f"two {kind} of |have one name: ", _study, folder, f"StudyConfig.{param}")
    refused("must each be a name and a file", _study, folder, "StudyConfig.recipes=(('x',),)")
    text = (folder / "base.gin").read_text()
    (folder / "longer.gin").write_text(text.replace("seq_len=32", "seq_len=64"))
    for words, param in (
        ("lower StudyConfig", "piece_bytes=999"),
        ("one data configuration", f"once=('{folder}/longer.gin',)"),
        ("task recall has no option text: leave it out", "evaluations=(@Recall(),)"),
    ):
        refused(words, _texts, _study(folder, f"StudyConfig.{param}"), tmp_path)
    # Before the recipe is trained.
    asked = _study(folder, "StudyConfig.evaluations=(@Controls(),)")
    swa = asked.replace(recipes=asked.recipes[:1])
    refused("'swa' has no in-place memory", _compute, swa, tmp_path / "asked")
    assert not (tmp_path / "asked/base-3").exists()
    recipes, texts, trained = _compute(asked, tmp_path / "asked")
    assert trained == 2
    assert {x.parent.name for x in (tmp_path / "asked").glob("*/eval")} == {"other-3", "other-5"}
    table = write_study(asked, recipes, texts, tmp_path / "asked")[2].table
    assert [{*x} > {"memory off", "shuffled keys", "no gap"} for x in table] == [True]


def test_controls_of_a_recipe_are_its_own_run_with_one_change(folder):
    """No gap, eta 0, SWA for as many FLOPs, a gated delta rule; none of a recipe without a memory,
    and equal ones once."""
    kinds = ("no_gap", "eta0", "swa", "swa_flops", "gated_delta")
    study = _study(folder, f"StudyConfig.controls={kinds}")
    found = study.runs(["RunConfig.steps=50"])
    # SWA is the base itself.
    names = ["other_no_gap", "other_eta0", "other_swa_flops", "other_gated_delta"]
    assert [*found] == ["base", "other", *names, "third"]
    base, other, no_gap, eta0, flops, gated = (x.config for x in [*found.values()][:-1])
    assert other.model.student_window < 8
    assert no_gap == other.replace(model=other.model.replace(student_window=8))
    silent = other.model.replace(memory=other.model.memory.replace(eta=0.0))
    assert eta0 == other.replace(model=silent)
    assert flops == base.replace(steps=flops.steps)
    cost = training_flops_per_token
    ratio = cost(other.model, 32) / cost(base.model, 32)
    assert flops.steps == round(50 * ratio) > 55
    assert (gated.model.method, gated.model.fast_layers) == ("gated_deltanet_hybrid", (0,))
    assert gated.model.memory.conv_init == "previous"
    assert gated.steps == 50
    full = other.replace(model=other.model.replace(window=None))
    (binding,) = runs.control("no_gap", full)  # also in rows longer than those of training
    assert int(binding.removeprefix("TransformerConfig.student_window=")) > 65_536
    own = "(('layers/0/mlp/rate', 0.0), ('layers/0/mixer/*', 0.5))"
    found = study.runs([f"OptimizerConfig.rates={own}", "RunConfig.memory_warmup=3"])
    for name, recipe in found.items():  # what names parameters of a memory is of those that have it
        keeps = name in ("base", "other", "other_no_gap", "other_eta0", "third")
        run, rates = recipe.config, recipe.config.optimizer.rates
        assert (len(rates), run.memory_warmup) == ((2, 3) if keeps else (1, 0)), name
    assert study.chosen(found, ["other_eta0"]) == [("other_eta0", 3), ("other_eta0", 5)]
    (longer,) = {
        study.runs(["ScheduleConfig.steps=40"])["other_swa_flops"].config.optimizer.schedule
    }
    assert longer.steps == round(40 * ratio)
    once = study.replace(
        recipes=study.recipes[1:], once=study.recipes[:1], controls=("swa",)
    ).runs()
    assert [once[x].is_once for x in ("other", "base")] == [False, False]  # the control of a recipe
    (folder / "other_eta0.gin").write_text((folder / "base.gin").read_text())
    again = study.replace(once=(f"{folder}/other_eta0.gin",))
    refused("other_eta0.gin is not the control eta0: rename it", again.runs)
