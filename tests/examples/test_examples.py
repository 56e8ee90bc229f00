"""The examples, as their readers run them, and what they may get wrong; the trained model."""

import io
import re
import runpy
import shutil
from pathlib import Path

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import refused
from small_models import RECALL, byte_model
from tiny_run import save_text_model

from ttcd_jax import RunConfig, load_run, train_run
from ttcd_jax.errors import DataError
from ttcd_jax.files import read_json
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.train.loop import MetricCallback

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def run():
    """Runs an example: `run(name, *arguments)` gives its variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))

        def run(name, *arguments):
            path = str(EXAMPLES / f"{name}.py")
            patch.setattr("sys.argv", [path, *map(str, arguments)])
            return runpy.run_path(path, run_name="__main__")

        yield run


@pytest.fixture(scope="module")
def counting(run, tmp_path_factory):
    """The run directory of the first example, and its names."""
    run_dir = tmp_path_factory.mktemp("runs") / "counting"
    return run_dir, run("train_on_your_iterator", run_dir)


def test_a_run_learns_from_the_callers_iterator_and_goes_on_with_another_method(
    counting, run, tmp_path, capsys
):
    source, _ = counting
    losses = [record["loss"] for record in read_metrics(source / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    assert load_run(source).step == 30
    assert not (source / "config.gin").exists()
    names = run("continue_from_checkpoint", source, tmp_path / "grown")
    assert f"starts from step 30 of {source}" in capsys.readouterr().out
    assert load_run(tmp_path / "grown").config.method == "ipttcd"
    config = RunConfig.from_dict(RunDirectory(source).read_config())
    narrow = config.model.replace(precision=config.model.precision.replace(param="bfloat16"))
    train_run(config.replace(model=narrow, steps=1), tmp_path / "narrow", counting[1]["batches"])
    grown = names["grown"](str(tmp_path / "narrow"))
    assert grown.model.precision.param == "float32"
    models = load_run(tmp_path / "grown", 0).model, load_run(source).model
    ours, theirs = (jax.jit(model)(jnp.arange(20)[None] % 32) for model in models)
    np.testing.assert_array_equal(ours, theirs)


def test_a_run_that_is_resumed_asks_for_the_batches_that_are_left(counting, tmp_path):
    config, batches = counting[1]["CONFIG"], counting[1]["batches"]
    config = config.replace(log_every=1, checkpoint_every=3, steps=5)
    losses, asked = {}, []

    def make(first_step):
        asked.append(first_step)
        yield from (batch for batch, _ in zip(batches(first_step), range(4), strict=False))

    note = MetricCallback(1, lambda step, metrics: losses.update({step: float(metrics["loss"])}))
    with pytest.raises(DataError, match="the batches end before step 5 of 5"):
        train_run(config, tmp_path, make, on_metrics=[note])
    before = dict(losses)
    assert train_run(config, tmp_path, make, on_metrics=[note]) == (5, None)
    assert asked == [0, 3]
    assert before == {step: losses[step] for step in before}
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [*range(1, 6)]


def test_batches_that_do_not_fit_their_configuration_are_named(counting, tmp_path):
    config, batches = counting[1]["CONFIG"], counting[1]["batches"]
    for words, batch in (
        ("the batch of step 1 is int64 (8, 24), not integers (8, 25)", np.zeros((8, 24), int)),
        ("is float64", np.zeros((8, 25))),
        ("token 32 at position 0, 0 is outside the vocabulary of 32", np.full((8, 25), 32)),
    ):
        refused(words, train_run, config, tmp_path, lambda _, x=batch: [x], error=DataError)
    for none in (None, [np.zeros((8, 25), int)]):
        refused("pass a function of the first step to", train_run, config, tmp_path / "a", none)
    refused("is a RunConfig, not {'steps': 3}", train_run, {"steps": 3}, tmp_path / "a")
    other = config.replace(data=RECALL)
    refused("set BatchesConfig to pass them", train_run, other, tmp_path / "b", batches)


@pytest.mark.parametrize("name", ["block_in_nnx", "block_in_linen", "fast_mlp_on_your_attention"])
def test_a_foreign_model_learns_with_our_layer(run, name):
    losses = run(name)["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_added_parameters_learn_and_the_base_stays(run, capsys):
    found = run("train_added_parameters")
    assert "at first: True\nthe base is unchanged: True\n" in capsys.readouterr().out
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    added = {path[-1] for path in found["paths"](found["model"]) - found["old"]}
    assert added == {"proj", "rate", "teacher_conv", "student_conv"}


def test_an_own_loop_decodes_as_one_pass(run):
    found = run("your_decode_loop")
    np.testing.assert_array_equal(found["found"], found["whole"])
    assert len({*np.asarray(found["found"]).ravel().tolist()}) > 4, "a constant would pass"


def test_a_book_is_read_once_and_two_are_asked_together(run, tmp_path, capsys, monkeypatch):
    save_text_model(run_dir := tmp_path / "run", byte_model())
    kept = [tmp_path / name for name in ("one", "two")]
    (book := tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 4)
    for folder in kept:
        run("book_memory", run_dir, folder, book)
    assert re.search(r"memory [\d,]+ bytes, state [\d,]+ bytes", capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who may copy it?\n"))
    run("book_memory", run_dir, *kept)
    assert "256 tokens remembered in" in capsys.readouterr().out


def test_kernels_alone(run):
    found = run("kernels_alone")
    whole, decoded = found["both"](*found["operands"]()), found["last_token"](*found["operands"]())
    for one, other in zip(whole, decoded, strict=True):
        np.testing.assert_allclose(one[:, -1], other, atol=1e-5)
    assert all(float(jnp.abs(x).max()) > 0 for x in found["gradients"])


def test_an_example_fits_a_page():
    lengths = {path.stem: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_wrong_inputs_are_refused_with_both_numbers():
    assert int(commands.output(Path(__file__).with_name("wrong_inputs.py"))) == 32


MODEL = ROOT / "examples" / "model"


def test_the_memory_helps_on_the_code_of_this_project(tmp_path):
    run_dir, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(MODEL, run_dir, ignore=shutil.ignore_patterns("eval"))
    text.mkdir()
    shutil.copyfile(ROOT / "ttcd_jax" / "memory" / "prefix.py", text / "prefix.txt")
    flags = f"--run_dir={run_dir}", f"--text={text}", "--seq_len=4096", "--max_rows=4"
    commands.output("evaluate", "--task=ppl", *flags)
    series = read_json(run_dir / "eval" / "ppl" / "results.json")["series"].values()
    on, off = ({x["context"]: x["bits_per_byte"] for x in records} for records in series)
    assert on["2048-4095"] < off["2048-4095"] - 0.3
    assert on["all"] < off["all"] - 0.3


def test_it_generates_text_and_is_small():
    prompt = ROOT / "ttcd_jax" / "errors.py"
    line = ("generate", f"--run_dir={MODEL}", f"--prompt_file={prompt}", "--max_new_tokens=20")
    assert commands.output(*line, "--temperature=0")
    files = [path for path in MODEL.rglob("*") if "eval" not in path.parts]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 12_000_000
