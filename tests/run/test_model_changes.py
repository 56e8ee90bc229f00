"""A trained model under another window or with YaRN: its logits, its folder, what is refused."""

import json

import commands
import numpy as np
import pytest
from checks import assert_close, assert_same, logits_of, refused
from small_models import byte_model, config_of
from tiny_run import save_text_model

from ttcd_jax import MemoryConfig, Precision
from ttcd_jax.nn.rope import RopeConfig, YarnConfig
from ttcd_jax.run.directory import RunDirectory, load_params, load_run
from ttcd_jax.run.model_changes import changed_model, describe
from ttcd_jax.train.state import with_params

# The settings of its memory are defaults: None in config.json.
MODEL = byte_model(memory=None, init_std=0.5)
STUDENT, YARN = MemoryConfig(output="student"), YarnConfig(factor=8, original_length=16)
SCALED = RopeConfig(yarn=YARN)
SET_YARN = ("RopeConfig.yarn=@YarnConfig()", "YarnConfig:\n  factor=8\n  original_length = 16")
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    save_text_model(run_dir, MODEL)
    (run_dir.parent / "book.txt").write_text("It was a dark and stormy night. " * 8)
    return run_dir


def test_the_model_is_the_one_configured_so_with_the_same_parameters(run_dir):
    params = load_params(run_dir)[0]
    before = np.asarray(logits_of(with_params(MODEL, params), TOKENS))
    for changes, expected, num_equal in [
        (["TransformerConfig.window=None"], MODEL.replace(window=None), 8),
        (["TransformerConfig.window=16"], MODEL.replace(window=16), 8),
        (["MemoryConfig.output='student'"], MODEL.replace(memory=STUDENT), 0),
        ([*SET_YARN, " TransformerConfig.window = 12 "], MODEL.replace(rope=SCALED, window=12), 1),
    ]:
        run = load_run(run_dir, changes=changes)
        logits = np.asarray(logits_of(run.model, TOKENS))
        assert_same(logits, logits_of(with_params(expected, params), TOKENS))
        assert_close(logits[:, :num_equal], before[:, :num_equal])
        assert np.abs(logits - before).max() > 1e-3
        assert run.config.memory == expected.settings
    length = RunDirectory(run_dir).read_part("data")["seq_len"]
    for change, reach in ("sink_tokens=2", length), ("sink_reach=99", 99):
        changes = ["TransformerConfig.sink_tokens=2", f"TransformerConfig.{change}"]
        assert load_run(run_dir, changes=dict.fromkeys(changes)).config.sink_reach == reach


def test_arguments_of_another_type_are_refused(run_dir):
    for path, step, words in (
        (None, None, "a run directory is a path, not None"),
        (b"runs/x", None, "a run directory is a path, not b'runs/x'"),
        ("", None, "the run directory is empty"),
        (run_dir, "7", "step '7' is not a number"),
        (run_dir, True, "step True is not a number"),
    ):
        refused(words, load_run, path, step)


def test_changes_are_bindings_as_in_a_file(tmp_path, monkeypatch):
    changes = [*SET_YARN, "WAY='xla'", "TransformerConfig.attention_implementation=%WAY"]
    changed = changed_model(MODEL, changes)
    assert (changed.rope.yarn, changed.attention_implementation) == (YARN, "xla")
    assert changed_model(changed, ["YarnConfig.factor=2"]).rope.yarn == YARN.replace(factor=2)
    assert changed_model(MODEL, ()) is MODEL
    words = "yarn, factor 8, original_length 16, WAY xla, attention_implementation"
    assert describe(changes) == words
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yarn.gin").write_text("\n".join(SET_YARN))
    assert changed_model(MODEL, ["include 'yarn.gin'"]).rope.yarn == YARN


def test_a_window_or_none_makes_the_other_plain_transformer():
    full, swa = (config_of(name, precision=Precision()) for name in ("full", "swa"))
    assert changed_model(full, ["TransformerConfig.window=4"]) == swa
    assert changed_model(swa, ["TransformerConfig.window=None"]) == full
    assert changed_model(swa, ["TransformerConfig.window=9"]).method == "swa"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("window=8", "--param window=8: macro window is never used"),
        ("TransformerConfig.window=" + "[" * 5000, "TransformerConfig.window"),
        ("TransformerConfig.window=2", "student_window 4 is wider than the teacher's window 2"),
        ("RopeConfig.yarn={'factor': 8}", "RopeConfig.yarn must be YarnConfig"),
        ("RopeConfig.yarn=@YarnConfig()", "bind YarnConfig.factor = <float>, YarnConfig.original"),
        ("TransformerConfig.dim=16", "dim=16 changes shapes"),
        ("TransformerConfig.window=9|MemoryConfig.num_taps=9", "num_taps=9 changes shapes"),
        ("TransformerConfig.window=8", "window=8 changes nothing that this model computes"),
        ("TransformerConfig.remat='block'", "remat='block' changes nothing"),
        ("TransformerConfig.window=9|RopeConfig.yarn=None", "RopeConfig.yarn=None changes nothing"),
        ("TransformerConfig.init_std=1.0", "init_std=1.0 is for parameters that are drawn"),
    ],
)
def test_what_changes_parameters_or_nothing_is_refused(changes, words):
    refused(words, changed_model, MODEL, changes.split("|"))


def test_a_changed_model_has_its_own_results(run_dir, tmp_path):
    place, book = f"--run_dir={run_dir}", f"--text={run_dir.parent / 'book.txt'}"
    base = ("evaluate", place, "--task=ppl", "--max_rows=4", book)
    window = "--param=TransformerConfig.window=16"
    commands.output(*base)
    output = commands.output(*base, window)
    assert "IP-TTCD, window 16, fast weights on" in output
    commands.output(*base, window, "--label=wide  open")
    result = json.loads((run_dir / "eval" / "ppl.window-16" / "results.json").read_text())
    assert (result["changes"], result["label"]) == ("window 16", "IP-TTCD, window 16")
    whole = json.loads((run_dir / "eval" / "ppl" / "results.json").read_text())
    assert result["series"] != whole["series"]
    message = commands.refused(*base, "--label=wide  open")
    assert "is of changes 'window 16', not ''" in message
    page = commands.output("report", place, f"--output={tmp_path / 'page'}")
    for name in ("IP-TTCD, fast weights on", "IP-TTCD, window 16, off", "wide  open, off"):
        assert name in page


def test_text_is_generated_by_a_changed_model(run_dir, tmp_path):
    book = run_dir.parent / "book.txt"
    base = ("generate", f"--run_dir={run_dir}", f"--prompt_file={book}", "--max_new_tokens=8")
    for name, arguments in [("own", ()), ("full", ("--param=TransformerConfig.window=None",))]:
        commands.output(*base, "--temperature=1", *arguments, f"--output={tmp_path / name}")
    own, full = (json.loads((tmp_path / name).read_text()) for name in ("own", "full"))
    assert own["texts"] != full["texts"]
    assert ("changes" in own, full["changes"]) == (False, ["TransformerConfig.window=None"])
