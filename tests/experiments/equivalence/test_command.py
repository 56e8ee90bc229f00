"""The command end to end: pairs of ways on a small run, what it writes, limits, mistakes."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks import randomize
from flax import nnx

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.train.checkpoint import Checkpoints

ROOT = Path(__file__).parents[3]
MODEL = TransformerConfig(
    vocab_size=ByteTokenizer.vocab_size,
    dim=8,
    num_layers=1,
    num_heads=2,
    mlp_dim=8,
    window=8,
    student_window=4,
    fast_layers=(0,),
    memory=MemoryConfig(chunk_size=8),
)
# Commands one after another in one process, whose start takes longer than they do.
PROGRAM = """
import contextlib, io, json, sys
from absl.testing import flagsaver
from experiments import cli
from experiments import equivalence

results = []
for arguments in json.load(sys.stdin):
    sys.argv = ["equivalence", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run(equivalence.main)
        except SystemExit as error:
            results.append([error.code or 0, out.getvalue(), err.getvalue()])
json.dump(results, sys.stdout)
"""
ALL = "--levels=kernel,distribution"
REFERENCE = "xla,blocked"  # one for all pairs, compiled once
PAIRS = {
    "attention": ("reference,blocked", ALL),
    "form": ("xla,attention", "--levels=distribution"),
    "precision": ("xla,blocked,bfloat16", ALL, "--max_kl=1e-9", "--max_flip_share=1"),
    "decoded": ("xla,blocked,decoded", "--levels=distribution", "--max_kl=1e-9"),
    "streamed": (
        *("xla,blocked,streamed:16", "--niah_lengths=640", "--niah_samples=2"),
        "--niah_tasks=niah_single_1",
    ),
}
MISTAKES = {
    "same": ((REFERENCE,), 2, "are the same way"),
    "unknown": (("cuda",), 2, "'cuda' is no part of a way"),
    "cannot run": (("triton",), 2, "implementation 'triton': "),
    "pieces": (("streamed:8,mosaic", ALL), 2, "implementation 'mosaic': "),
    "level": (("lse", "--levels=all"), 2, "--levels: 'all' is not one of kernel"),
    "limit": (("lse", "--levels=task", "--max_kl=1"), 2, "name it in --levels"),
    "lengths": (("lse", "--niah_lengths=4K"), 2, "--niah_lengths: '4K' is not a number"),
    "task": (("lse", "--niah_tasks=qa"), 2, "NIAHConfig.task must be"),
    "short cell": (("lse", "--levels=task", "--niah_lengths=64"), 2, "niah_single_1 takes"),
    "long row": (("lse", "--seq_len=5000", ALL), 3, "no document fills a row: the longest"),
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
def results(run_dir, tmp_path_factory):
    """(exit status, stdout, stderr) of every pair and mistake, and what the pairs wrote."""
    output = tmp_path_factory.mktemp("output")
    commands = dict(PAIRS)
    commands |= {name: arguments for name, (arguments, *_) in MISTAKES.items()}
    lines = [
        [
            f"--run_dir={run_dir}",
            f"--reference={REFERENCE}",
            f"--candidate={candidate}",
            *("--max_rows=3", "--batch_size=2", f"--output={output / name}"),
            *flags,
        ]
        for name, (candidate, *flags) in commands.items()
    ]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    found = dict(zip(commands, json.loads(result.stdout), strict=True))
    return found, output


def _report(results, name, status=0):
    found, output = results
    assert found[name][0] == status, found[name][2]
    assert (output / name / "equivalence.png").read_bytes().startswith(b"\x89PNG")
    assert f"written to {output / name}" in found[name][1]
    return json.loads((output / name / "equivalence.json").read_text())


def test_attentions_forms_and_paths_agree(results):
    for name in ("attention", "form", "decoded", "streamed"):
        report = _report(results, name)
        assert (report["step"], report["seq_len"]) == (3, 40)
        assert report["environment"]["device"] == "cpu"
        assert report["reference"] != report["candidate"]
        distribution = report["distribution"]
        assert (distribution["rows"], distribution["tokens"]) == (3, 120)
        assert distribution["kl"]["max"] < 1e-9
        assert distribution["flip_share"] == 0
        assert abs(distribution["reference_nll"] - distribution["candidate_nll"]) < 1e-6
    assert _report(results, "form")["distribution"]["kl"]["max"] > 0
    assert len(_report(results, "attention")["kernel"]["attention"]) == 1
    streamed = _report(results, "streamed")["kernel"]
    assert (streamed["tokens"], streamed["layers"]) == (80, None)
    assert streamed["whole_model"]["max_relative_error"] < 1e-5
    assert "kernel" not in _report(results, "decoded")


def test_precision_shows_at_every_level_and_a_limit_stops(results):
    report = _report(results, "precision", status=1)
    assert 0 < report["distribution"]["kl"]["50%"] < 1e-2
    assert 0 < report["kernel"]["whole_model"]["equal_share"] < 1
    _, out, err = results[0]["precision"]
    mean = report["distribution"]["kl"]["mean"]
    assert err == f"kl mean {mean:.3g} is above --max_kl 1e-09\n"
    assert "layer 0" in out
    assert "KL (nats)" in out


def test_needles_are_answered_both_ways(results):
    report = _report(results, "streamed")
    (cell,) = report["task"]["cells"]
    assert (cell["task"], cell["length"], cell["samples"]) == ("niah_single_1", 640, 2)
    assert cell["identical_share"] == 1
    assert cell["reference_score"] == cell["candidate_score"]
    assert "niah_single_1" in results[0]["streamed"][1]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_computed(results, name):
    found, output = results
    _, status, message = MISTAKES[name]
    assert found[name][0] == status
    assert found[name][1] == ""
    assert found[name][2].startswith("error: ")
    assert found[name][2].count("\n") == 1
    assert message in found[name][2]
    report = output / name / "equivalence.json"
    if name == "short cell":  # what was measured before it is kept
        assert json.loads(report.read_text())["step"] == 3
    else:
        assert not report.parent.exists()
