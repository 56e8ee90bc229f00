"""Commands end to end: a reference checkpoint is imported, evaluated, trained on and exported."""

import contextlib
import json
import shutil
import signal
import subprocess

import commands
import numpy as np
import pytest
import tiny_run
from flax import nnx
from small_models import byte_model

from ttcd_jax import MemoryConfig, Transformer
from ttcd_jax.data.records import sealed
from ttcd_jax.data.tokenizer import build_tokenizer, tokenizer_of, train_tokenizer
from ttcd_jax.interop.reference_config import export_reference
from ttcd_jax.interop.weight_files import SINGLE, open_weights, write_safetensors
from ttcd_jax.run.directory import RunDirectory, load_params, load_run
from ttcd_jax.train.checkpoint import Checkpoints

MEMORY = MemoryConfig(chunk_size=4, student_conv_init="normal", output="teacher_raw")
MODEL = byte_model(num_layers=2, fast_layers=(1,), memory=MEMORY)
SMALL = ("TextConfig.seq_len=16", "RunConfig.batch_size=2", "ScheduleConfig.warmup=1")
IMPORT = ("convert", "import", "--format=reference")
EXPORT = ("convert", "export", "--format=reference")
EVALUATE = ("evaluate", "--task=ppl", "--seq_len=32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small model as the reference would store it, in bfloat16."""
    folder = tmp_path_factory.mktemp("reference")
    params = nnx.to_pure_dict(nnx.state(Transformer(MODEL, rngs=nnx.Rngs(0)), nnx.Param))
    tensors, text = export_reference(params, MODEL, dtype="bfloat16")
    write_safetensors(folder, tensors)
    (folder / "config.json").write_text(text + "\n\n")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return folder


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "imported"
    line = (*IMPORT, checkpoint, run_dir, "--tokenizer=byte")
    return run_dir, commands.output(*line, is_forked=False)


def _launch(run_dir, *bindings):
    flags = tiny_run.params(*SMALL, *bindings)
    return commands.output("launch", "--gin=continue.gin", f"--run_dir={run_dir}", *flags)


def test_import_reports_and_fills_a_run_directory(imported, checkpoint):
    run_dir, output = imported
    count = sum(np.prod(tensor.shape) for tensor in open_weights(checkpoint).stored.values())
    assert f"ipttcdv9: {count:,} parameters, bfloat16" in output
    assert f"{len(open_weights(checkpoint))} tensors mapped, 0 dropped" in output
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"config.json", "environment.json", "import.json", "checkpoints"}
    assert (run_dir / "checkpoints" / "0" / "DIGEST.json").is_file()
    facts = json.loads((run_dir / "import.json").read_text())
    assert facts["files"][SINGLE]["bytes"] == (checkpoint / SINGLE).stat().st_size
    assert list(run_dir.parent.iterdir()) == [run_dir]


def test_an_imported_run_is_evaluated_and_exported_as_it_was(imported, checkpoint, text, tmp_path):
    output = commands.output(*EVALUATE, f"--run_dir={imported[0]}", f"--text={text}")
    assert "(step 0, " in output
    assert "fast weights on" in output
    folder = tmp_path / "out"
    commands.output(*EXPORT, imported[0], folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", SINGLE]
    assert (folder / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    theirs = dict(open_weights(checkpoint))
    for name, value in open_weights(folder).items():
        assert value.dtype == theirs[name].dtype
        assert value.tobytes() == theirs.pop(name).tobytes()
    assert not theirs


def test_training_continues_from_an_imported_run_and_is_exported(imported, text, tmp_path):
    start, run_dir = tmp_path / "start", tmp_path / "run"
    shutil.copytree(imported[0], start)
    bindings = (f"START='{start}'", f"TEXT='{text}'", "STEPS=2", "TransformerConfig.remat='block'")
    assert f"starts from step 0 of {start}" in _launch(run_dir, *bindings)
    model = json.loads((run_dir / "config.json").read_text())["model"]
    theirs = json.loads((start / "config.json").read_text())["model"]
    assert model == theirs | {"remat": "block"}
    (first, *_), (trained, config, step) = load_params(run_dir, 0), load_params(run_dir)
    np.testing.assert_array_equal(first["embedding"], load_params(start)[0]["embedding"])
    assert step == 2
    assert np.abs(trained["embedding"] - first["embedding"]).max() > 0
    start.rename(tmp_path / "gone")  # the run no longer needs it
    assert "complete at step 2" in _launch(run_dir, *bindings)
    commands.output(*EXPORT, run_dir, tmp_path / "out", "--dtype=float16")
    head = open_weights(tmp_path / "out")["model.embeddings.weight"]
    np.testing.assert_array_equal(head, np.asarray(trained["embedding"], np.float16))
    alone = RunDirectory(run_dir).checkpoints
    shutil.rmtree(alone)
    with contextlib.closing(Checkpoints(alone, model=config)) as checkpoints:
        checkpoints.save(2, {"params": trained})
    more = tiny_run.params(*SMALL, *bindings, "STEPS=4")
    line = ("launch", "--gin=continue.gin", f"--run_dir={run_dir}", "--change=RunConfig.steps")
    assert "start_from" in commands.refused(*line, *more, status=4)


def test_a_tokenizer_is_copied_and_a_text_of_other_tokens_refused(checkpoint, text, tmp_path):
    shutil.copytree(checkpoint, folder := tmp_path / "in")
    tokenizer = json.loads(train_tokenizer(["the dog"], MODEL.vocab_size))
    pad = {"id": MODEL.vocab_size, "content": "<pad>"}
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | pad)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    expected = build_tokenizer(tokenizer_of(folder / "tokenizer.json")).encode("the dog")
    found = commands.output(*IMPORT, folder, tmp_path / "run")
    assert f"the model {MODEL.vocab_size}: a text with one of the others is refused" in found
    (folder / "tokenizer.json").unlink()
    run_dir = (tmp_path / "run").rename(tmp_path / "moved")
    np.testing.assert_array_equal(load_run(run_dir).tokenizer.encode("the dog"), expected)
    config = json.loads((run_dir / "config.json").read_text())
    del config["data"]["tokenizer"], config["sha256"]
    (run_dir / "config.json").write_text(json.dumps(sealed(config)))
    line = (*EVALUATE, f"--run_dir={run_dir}", f"--text={text}")
    assert "--tokenizer" in commands.refused(*line)


def test_what_is_refused_leaves_nothing(imported, checkpoint, text, tmp_path):
    for name in ("short", "infinite", "full"):
        shutil.copytree(checkpoint, tmp_path / name)
    with (tmp_path / "short" / SINGLE).open("r+b") as stream:
        stream.truncate(5000)
    tensors = dict(open_weights(checkpoint))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.nan
    write_safetensors(tmp_path / "infinite", tensors)
    out, run_dir = tmp_path / "out", imported[0]
    launch = ("launch", "--gin=text.gin", f"--run_dir={out}", f"--param=TEXT='{text}'")
    rows = [
        ((*IMPORT, tmp_path / "short", out), 3, SINGLE),
        ((*IMPORT, tmp_path / "infinite", out), 3, "error: tensor 'model.norm.weight' of"),
        ((*IMPORT, checkpoint, tmp_path / "full"), 2, "not an empty folder"),
        ((*EXPORT, run_dir, tmp_path / "full"), 2, "not an empty folder"),
        ((*IMPORT, checkpoint, out, "--dtype=float16"), 2, "--dtype is no option of import"),
        ((*launch, f"--param=RunConfig.start_from='{run_dir}'"), 4, "(258, 8) not (258, 128)"),
        ((*launch, f"--param=RunConfig.start_from='{tmp_path}'"), 2, "config.json"),
        (("evaluate", f"--run_dir={run_dir}", "--task=ppl"), 2, "--text=PATH"),
    ]
    commands.refuse(rows)
    assert not out.exists()


def test_a_stopped_import_leaves_nothing(checkpoint, tmp_path):
    pause = (
        "import time; from ttcd_jax.train import digest; "
        "digest.seal = lambda path: (print('sealing', flush=True), time.sleep(1)); "
        "from ttcd_jax.commands import cli, convert; cli.run(convert.main, ('a', 'b', 'c'))"
    )
    program = tmp_path / "program.py"
    program.write_text(pause)
    line = (program, *IMPORT[1:], checkpoint, tmp_path / "run")
    with commands.start(*line, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "sealing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert list(tmp_path.iterdir()) == [program]
