"""The command end to end: pairs of variants on a small run, what it writes, limits, mistakes."""

import functools
import json

import commands
import pytest
import tiny_run
from small_models import byte_model

from ttcd_jax.methods.ipttcd import MemoryConfig

MEMORY = MemoryConfig(chunk_size=8, teacher_conv_init="identity")  # not zero at the start
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
    "same": ((f"{REFERENCE},float32",), 2, "are the same variant, xla, blocked, float32, forward"),
    "cannot run": (("triton",), 2, "implementation 'triton': "),
    "pieces": (("streamed:8,mosaic", ALL), 2, "implementation 'mosaic': "),
    "level": (("bfloat16", "--levels=all"), 2, "--levels: 'all' is not one of kernel"),
    "limit": (("bfloat16", "--levels=task", "--max_kl=1"), 2, "name it in --levels"),
    "option": (("bfloat16", "--lengths=64"), 2, "no option '--lengths=64': it takes batch_size="),
    "short cell": (("bfloat16", "--levels=task", "--niah_lengths=64"), 2, "niah_single_1 takes"),
    "long row": (("bfloat16", "--seq_len=50000", ALL), 3, "no document fills a row: the longest"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run at step 7, beside a text."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    text = "".join(f"Sentence {i} of a text. And another one.\n" for i in range(500))
    run_dir.with_name("text.txt").write_text(text)
    tiny_run.save_text_model(run_dir, byte_model(memory=MEMORY, init_std=0.5))
    return run_dir


@pytest.fixture(scope="module")
def run(run_dir, tmp_path_factory):
    """Runs a pair or a mistake by its name, once; `form` and `streamed` into the run."""
    output = tmp_path_factory.mktemp("output")

    @functools.cache
    def run(name):
        candidate, *flags = PAIRS[name] if name in PAIRS else MISTAKES[name][0]
        folder = run_dir / "eval" if name in ("form", "streamed") else output / name
        flags += [f"--output={folder}"] if folder.parent == output else []
        variants = f"--reference={REFERENCE}", f"--candidate={candidate}"
        sizes = "--max_rows=3", "--batch_size=2", f"--text={run_dir.with_name('text.txt')}"
        return commands.run(
            "equivalence", f"--run_dir={run_dir}", *variants, *sizes, *flags
        ), folder

    return run


@pytest.fixture
def tables(run):
    """The rows of every level by their first column."""

    def tables(name, status=0):
        result, folder = run(name)
        assert result.returncode == status, result.stderr
        found = {}
        for line in result.stdout.splitlines():
            if (path := line.removeprefix(f"written to {folder}/")) == line:
                continue
            stored = json.loads((folder / path / "results.json").read_text())
            assert (stored["step"], stored["facts"]["environment"]["device"]) == (7, "cpu")
            assert stored["options"]["reference"] == REFERENCE
            task = stored["task"]
            assert (folder / path / f"{task}.png").read_bytes().startswith(b"\x89PNG")
            assert (folder / path / "results.csv").exists()
            key, *_ = stored["table"][0]
            rows = {row.pop(key): row for row in stored["table"]}
            found[task.removeprefix("equivalence_")] = rows
        return found

    return tables


def test_forms_and_paths_agree(tables):
    for name in ("form", "decoded", "streamed"):
        distribution = tables(name)["distribution"]
        assert distribution["KL (nats)"]["max"] < 1e-9
        assert distribution["flips of the likeliest token"]["mean"] == 0
        assert abs(distribution["the candidate's loss less it"]["mean"]) < 1e-6
    assert tables("form")["distribution"]["KL (nats)"]["max"] > 0
    assert [*tables("form")["kernel"]] == ["layer 0", "whole model"]
    streamed = tables("streamed")["kernel"]
    assert [*streamed] == ["whole model"]
    assert streamed["whole model"]["max_relative_error"] < 1e-5
    assert [*tables("decoded")] == ["distribution"]


def test_precision_shows_at_every_level_and_a_limit_stops(run, tables):
    found = tables("precision", status=1)
    kl = found["distribution"]["KL (nats)"]
    assert 0 < kl["50%"] < 1e-2
    assert 0 < found["kernel"]["whole model"]["equal_share"] < 1
    result, _ = run("precision")
    assert result.stderr == f"KL mean {kl['mean']:.3g} is above --max_kl 1e-09\n"
    assert "layer 0" in result.stdout
    assert "KL (nats)" in result.stdout


def test_needles_are_answered_by_both(tables):
    found = tables("streamed")["task"]["niah_single_1, 1,024"]
    assert (found["samples"], found["identical_share"]) == (2, 1)
    assert found["reference_score"] == found["candidate_score"]


def test_the_report_shows_every_pair_under_its_run(run, tables, run_dir, tmp_path):
    for name in ("form", "streamed"):
        tables(name)
    old = run_dir / "eval" / "equivalence"  # of an earlier version
    old.mkdir()
    (old / "equivalence.json").write_text("{}")
    printed = commands.output("report", f"--run_dir={run_dir}", f"--output={tmp_path}")
    assert printed.count("IP-TTCD, xla, attention, forward against xla, blocked, forward") == 2 + 6
    for title in ("Units in the last place", "Next tokens", "Needles in a haystack"):
        assert f"\n{title}" in printed
    assert (tmp_path / "equivalence_kernel.png").exists()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_computed(run, name):
    _, status, message = MISTAKES[name]
    result, folder = run(name)
    assert result.stdout == ""
    assert message in commands.mistake(result, status)
    assert not folder.exists()
