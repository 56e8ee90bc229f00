"""The command end to end: pairs of ways on a small run, what it writes, limits, mistakes."""

import contextlib
import functools
import json

import commands
import pytest
from checks import randomize
from flax import nnx
from small_models import byte_model

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.train.checkpoint import Checkpoints

MODEL = byte_model(memory=MemoryConfig(chunk_size=8))
ALL = "--levels=kernel,distribution"
REFERENCE = "xla,blocked"  # one for all pairs, compiled once
PAIRS = {
    "form": ("xla,attention", ALL),
    "precision": ("xla,blocked,bfloat16", ALL, "--max_kl=1e-9", "--max_flip_share=1"),
    "decoded": ("xla,blocked,decoded", "--levels=distribution", "--max_kl=1e-9"),
    "streamed": (
        *("xla,blocked,streamed:16", "--niah_lengths=1024", "--niah_samples=2"),
        "--niah_tasks=niah_single_1",
    ),
}
MISTAKES = {
    "same": ((REFERENCE,), 2, "are the same way"),
    "cannot run": (("triton",), 2, "implementation 'triton': "),
    "pieces": (("streamed:8,mosaic", ALL), 2, "implementation 'mosaic': "),
    "level": (("bfloat16", "--levels=all"), 2, "--levels: 'all' is not one of kernel"),
    "limit": (("bfloat16", "--levels=task", "--max_kl=1"), 2, "name it in --levels"),
    "lengths": (("bfloat16", "--niah_lengths=4K"), 2, "--niah_lengths: '4K' is not a number"),
    "task": (("bfloat16", "--niah_tasks=qa"), 2, "--niah_tasks: 'qa' is not one of niah_single_1"),
    "short cell": (("bfloat16", "--levels=task", "--niah_lengths=64"), 2, "niah_single_1 takes"),
    "long row": (("bfloat16", "--seq_len=5000", ALL), 3, "no document fills a row: the longest"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run on text, at step 3."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"Sentence {i} of a text. And another one.\n" for i in range(500)))
    data = TextConfig(
        corpus=CorpusConfig(kind="text", path=str(text)), tokenizer=TokenizerConfig(), seq_len=40
    )
    directory = RunDirectory(tmp_path_factory.mktemp("run") / "run")
    model = randomize(Transformer, MODEL, std=0.5)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with contextlib.closing(Checkpoints(directory.checkpoints, model=MODEL)) as checkpoints:
        checkpoints.save(3, {"params": params})
    directory.write_import({"model": MODEL.to_dict(), "data": data.to_dict()}, {})
    return directory.path


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def run(run_dir, output):
    """Runs a pair or a mistake by its name, once."""

    @functools.cache
    def run(name):
        candidate, *flags = PAIRS[name] if name in PAIRS else MISTAKES[name][0]
        small = "--max_rows=3", "--batch_size=2", f"--output={output / name}"
        ways = f"--reference={REFERENCE}", f"--candidate={candidate}"
        return commands.run("equivalence", f"--run_dir={run_dir}", *ways, *small, *flags)

    return run


@pytest.fixture
def report(run, output):
    def report(name, status=0):
        result = run(name)
        assert result.returncode == status, result.stderr
        assert f"written to {output / name}" in result.stdout
        found = json.loads((output / name / "equivalence.json").read_text())
        pictures = list((output / name).glob("*.png"))
        assert {path.stem for path in pictures} == found.keys() & {"kernel", "distribution", "task"}
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
        return found

    return report


def test_forms_and_paths_agree(report):
    for name in ("form", "decoded", "streamed"):
        found = report(name)
        assert (found["step"], found["seq_len"]) == (3, 40)
        assert found["environment"]["device"] == "cpu"
        assert found["reference"] != found["candidate"]
        distribution = found["distribution"]
        assert (distribution["rows"], distribution["tokens"]) == (3, 120)
        assert distribution["kl"]["max"] < 1e-9
        assert distribution["flip_share"] == 0
        assert abs(distribution["reference_nll"] - distribution["candidate_nll"]) < 1e-6
    assert report("form")["distribution"]["kl"]["max"] > 0
    outputs = [row["outputs of"] for row in report("form")["kernel"]["outputs"]]
    assert outputs == ["layer 0", "whole model"]
    streamed = report("streamed")["kernel"]
    (whole,) = streamed["outputs"]
    assert streamed["tokens"] == 80
    assert whole["max_relative_error"] < 1e-5
    assert "kernel" not in report("decoded")


def test_precision_shows_at_every_level_and_a_limit_stops(run, report):
    found = report("precision", status=1)
    assert 0 < found["distribution"]["kl"]["50%"] < 1e-2
    assert 0 < found["kernel"]["outputs"][-1]["equal_share"] < 1
    mean = found["distribution"]["kl"]["mean"]
    assert run("precision").stderr == f"KL mean {mean:.3g} is above --max_kl 1e-09\n"
    assert "layer 0" in run("precision").stdout
    assert "KL (nats)" in run("precision").stdout


def test_needles_are_answered_both_ways(run, report):
    (cell,) = report("streamed")["task"]["cells"]
    assert (cell["task"], cell["length"], cell["samples"]) == ("niah_single_1", 1024, 2)
    assert cell["identical_share"] == 1
    assert cell["reference_score"] == cell["candidate_score"]
    assert "niah_single_1" in run("streamed").stdout


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_computed(run, output, name):
    _, status, message = MISTAKES[name]
    assert run(name).stdout == ""
    assert message in commands.mistake(run(name), status)
    report = output / name / "equivalence.json"
    if name == "short cell":  # what was measured before it is kept
        assert json.loads(report.read_text())["step"] == 3
    else:
        assert not report.parent.exists()
