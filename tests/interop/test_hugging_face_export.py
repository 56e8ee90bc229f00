"""Exports to Hugging Face transformers: computed there as here, imported again bit for bit, and
right in every version that they name (tests/hugging_face/properties.py)."""

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

import commands
import fake_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from checks import assert_same, distance, logits_of, refused
from hugging_face.make import STORED, TOKENS
from hugging_face.own import MODELS, params_of, write
from small_models import config_of, run_config
from tiny_run import flags

from ttcd_jax.commands import cli
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import CheckpointError, DataError
from ttcd_jax.files import write_json, write_whole
from ttcd_jax.inference.generate import Generation, Request
from ttcd_jax.inference.model import inference_model
from ttcd_jax.interop import hugging_face as interop
from ttcd_jax.methods import METHODS
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.precision import Precision
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.build import Program
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import load_params
from ttcd_jax.run.export import exported_run
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.run.start import started_state
from ttcd_jax.train.layers_on_disk import by_name, unstacked
from ttcd_jax.train.state import with_params

ROOT = Path(__file__).parents[2]
EXPORT = ("convert", "export", "--format=huggingface")
IMPORT = ("convert", "import", "--format=huggingface")


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_our_logits(name):
    found = logits_of(with_params(MODELS[name], params_of(MODELS[name])), TOKENS)
    assert distance(found, STORED[f"{name}.logits"]) < 2e-5


def test_the_code_of_exports_is_the_one_that_was_run():
    digest = hashlib.sha256(interop.MODELING.read_bytes()).hexdigest()
    assert str(STORED["code"]) == digest, "run tests/hugging_face/make.py again"


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_imported_bit_for_bit(name, tmp_path):
    config = MODELS[name]
    is_own = bool(config.fast_layers or config.sink_tokens)
    leaves, again, _ = interop.open_hugging_face(write(name, tmp_path / name))
    assert (tmp_path / name / interop.MODELING.name).exists() == is_own
    read = {path: leaf.read() for path, leaf in by_name(leaves).items()}
    assert_same(read, unstacked(config, by_name(params_of(config))))
    if is_own:
        assert again == config
    else:
        unseen = {"student_window": 1, "memory": None}
        assert again.replace(**unseen) == config.replace(**unseen)


EXPORTED = ("ipttcd", "ipttt", "swa", "full")


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("full", {"has_qk_norm": True, "qk_norm_eps": 1e-5}, "norm_eps 1e-06|eps 1e-05"),
        ("full", {"has_qk_norm": True, "has_qkv_bias": True}, "has_qkv_bias True"),
        ("ipttcd", {"memory": MemoryConfig(renorm_chunks=2)}, "renorm_chunks="),
        ("ipttcd", {"memory": MemoryConfig(orthogonalizes_updates=True)}, "orthogonalizes_"),
        ("ipttcd", {"memory": MemoryConfig(error="teacher")}, "error='teacher'"),
        ("ipttcd", {"memory": MemoryConfig(gate="teacher")}, "gate='teacher'"),
        ("ipttcd", {"memory": MemoryConfig(is_conv_causal=False)}, "reads features of later"),
        *((method, {}, f"'{method}'|--form") for method in METHODS if method not in EXPORTED),
    ],
)
def test_what_transformers_cannot_express_is_refused(method, changes, words):
    config = config_of(method, precision=Precision(), **changes)
    refused(words, interop.export_hugging_face, params_of(config), config)


@pytest.mark.parametrize(
    ("top", "model", "error", "words"),
    [
        ({"model": None}, {}, DataError, "model is no configuration of a model"),
        ({"model": {"type": "TransformerConfig"}}, {}, DataError, "TransformerConfig lacks dim"),
        ({}, {"num_layers": 9_999}, CheckpointError, "9999 layers"),
        ({}, {"method": "made_up"}, DataError, "made_up"),
    ],
)
def test_a_damaged_export_is_refused(top, model, error, words, tmp_path):
    folder = write("published", tmp_path / "x")
    source = json.loads((folder / "config.json").read_text())
    source["model"] |= model
    (folder / "config.json").write_text(json.dumps(source | top))
    refused(words, interop.open_hugging_face, folder, error=error)


def test_bytes_are_tokens_of_transformers_too():
    files = interop.text_files(ByteTokenizer(), {})
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    text = "".join(map(chr, range(400))) + "\u20ac \U0001f600</s>"
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-1]) == (ByteTokenizer.bos_id, ByteTokenizer.eos_id)
    assert ids[1:-1] == ByteTokenizer().encode(text.removesuffix("</s>")).tolist()
    assert tokenizer.decode(ids) == text.removesuffix("</s>")
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
    assert json.loads(files["generation_config.json"]) == ids
    own = interop.text_files(ByteTokenizer(), {"generation_config.json": "{}"})
    assert own["generation_config.json"] == "{}"
    for stored, pad in (({"pad_token": None, "eos_token": "e"}, "e"), ({"pad_token": "p"}, "p")):
        files = interop.text_files(ByteTokenizer(), {"tokenizer_config.json": json.dumps(stored)})
        assert json.loads(files["tokenizer_config.json"]) == stored | {"pad_token": pad}


def test_a_run_is_exported_with_its_card_and_an_import_of_it_as_it_was(tmp_path):
    base, again = tmp_path / "base", tmp_path / "again"
    folder = write("full", tmp_path / "theirs")
    commands.output(*IMPORT, folder, base, "--tokenizer=none")
    commands.output(*EXPORT, base, again)
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert (again / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert "| imported from |" in (again / "README.md").read_text()
    assert "no tokenizer" not in (again / "README.md").read_text()
    write_json(base / "eval/ppl/results.json", {"task": "ppl", "step": 0, "table": [1]})
    options = base, "huggingface", None, None
    refused("results.json is damaged |measure it again", exported_run, *options, error=DataError)


# Llama with scaled positions, Mistral, Qwen2 with its biases, Qwen3 with norms and YaRN.
GROWN = (("full", "ipttcd"), ("swa", "ipttt"), ("swa_bias", "ipttcd"), ("swa_norm", "ipttt"))
GROWN = (*GROWN, ("yarn", "ipttcd"))


@pytest.mark.parametrize(("name", "method"), GROWN)
def test_an_import_that_gets_a_memory_starts_at_its_base(name, method, tmp_path):
    """With the settings of the recipes of continued training (tests/run/test_start.py has other
    layers); on a CPU bit for bit, where rows are whole chunks (XLA rounds products of other numbers
    of rows otherwise)."""
    run_dir, checkpoint = tmp_path / "run", write(name, tmp_path / "checkpoint")
    commands.output(*IMPORT, checkpoint, run_dir, "--tokenizer=none")
    params, base, _ = load_params(run_dir)

    def logits(model, params):
        return jax.jit(lambda x: with_params(model, x)(jnp.asarray(TOKENS)))(params)

    def grown(gin, *bindings):
        recipe = load_config(RunConfig, gin, bindings, config_dir=cli.CONFIG_DIR)
        memory = recipe.model.settings.replace(chunk_size=8)
        fields = {"method": method, "fast_layers": (0, 2), "memory": memory, "student_window": 5}
        model = base.replace(**fields)
        config = run_config(model, start_from=str(run_dir), steps=1, batch_size=1)
        with jax.set_mesh(mesh := run_mesh(config)):
            return model, started_state(Program(config, mesh))[-1]["params"]

    expected = logits(base, params)
    model, params = grown(f"cpt/{method}_qwen3_0_6b.gin")
    np.testing.assert_array_equal(logits(model, params), expected)
    moved = jax.tree.map(lambda x: x + 0.1, params)  # the memory is there
    off = model.replace(memory=model.memory.switched_off(40))
    assert not np.array_equal(logits(model, moved), logits(off, moved))
    if name == "full":  # the delta rule computes its chunks in turn
        corrected = grown("continued/ipttcd_delta.gin", "BOOKS='books'")
        assert distance(logits(*corrected), expected) < 1e-5


def test_a_trained_run_is_exported_with_tokenizer_and_evaluation(tmp_path):
    run_dir, folder = tmp_path / "run", tmp_path / "out"
    for split in ("train", "validation"):
        (tmp_path / "text" / split).mkdir(parents=True)
        (tmp_path / "text" / split / "a.txt").write_text(f"{split} text to learn from. " * 40)
    small = flags("text.gin", "STEPS=2", "TextConfig.seq_len=64", f"TEXT='{tmp_path}/text'")
    commands.output("launch", f"--run_dir={run_dir}", *small)
    commands.output("evaluate", f"--run_dir={run_dir}", "--task=ppl", "--seq_len=64")
    output = commands.output(*EXPORT, run_dir, folder, "--dtype=bfloat16")
    assert "of step 2 in" in output
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("modeling_ttcd.py", "tokenizer.json", "tokenizer_config.json"),
    }
    card = (folder / "README.md").read_text()
    rule = "IP-TTCD + delta rule"
    for text in ("trust_remote_code=True", f"# {rule}, ", f"## ppl: {rule}", "| context |"):
        assert text in card
    for text in ("| tokens in a row | 64 |", "| steps | 2 |", *interop.TRIED):
        assert text in card
    again = tmp_path / "again"
    commands.output(*IMPORT, folder, again)
    ours, config, _ = load_params(run_dir)
    read, found, _ = load_params(again)
    assert found == config.replace(precision=config.precision.replace(param="bfloat16"))
    assert_same(by_name(read), {name: x.astype("bfloat16") for name, x in by_name(ours).items()})
    commands.output(*EXPORT, again, tmp_path / "third")
    assert (
        tmp_path / "third" / interop.MODELING.name
    ).read_bytes() == interop.MODELING.read_bytes()
    assert "not an empty folder" in commands.refused(*EXPORT, run_dir, folder)


def test_the_page_names_the_versions_that_exports_were_tried_with():
    page = " ".join((ROOT / "docs/checkpoints.md").read_text().split())
    assert f"with transformers {', '.join(interop.TRIED[:-1])} and {interop.TRIED[-1]}" in page


def test_a_model_of_the_hub_is_imported_through_its_cache(tmp_path):
    environment = commands.cpu_environment(HF_HOME=str(tmp_path / "home"), NO_PROXY="127.0.0.1")
    environment.pop("HF_HUB_OFFLINE", None)

    def imported(name, **variables):
        run_dir = Path(tempfile.mkdtemp(dir=tmp_path))
        commands.output(*IMPORT, name, run_dir, env=environment | variables)
        assert_same(load_params(run_dir)[0], params_of(MODELS["swa_norm"]))

    def assert_refused(words, name, **variables):
        options = {"env": environment | variables, "status": 3}
        assert words in commands.refused(*IMPORT, name, tmp_path / "no", **options)
        assert not (tmp_path / "no").exists()

    folder = write("swa_norm", tmp_path / "x", max_bytes=8_000)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = fake_hub.Hub("lab/model", files | {"README.md": b"x", "model.bin": b"x"})
    with fake_hub.serve(hub) as address:
        imported("lab/model@main", HF_ENDPOINT=address)
        assert_refused("lab/none is not there, or private", "lab/none", HF_ENDPOINT=address)
    asked = {path.rpartition("/")[2] for _, path in hub.asked if "/resolve/" in path}
    assert asked == {*files}
    imported("lab/model", HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert_refused("no checkpoint", "nowhere")


ENVIRONMENTS = ROOT / ".venv/transformers"
# The published sum, the delta rule with a gated decay, full attention, IP-TTT, sinks.
NAMES = ("published", "corrected", "continued", "embeddings", "sinks")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Exports with prompts of other lengths and our greedy tokens after them."""
    place = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        folder = write(name, place / name, vocab_size=ByteTokenizer.vocab_size)
        for file, text in interop.text_files(ByteTokenizer(), {}).items():
            write_whole(folder / file, text)
        config = MODELS[name].replace(vocab_size=ByteTokenizer.vocab_size)
        rng = np.random.default_rng(3)
        prompts = [np.array([ByteTokenizer.bos_id, *rng.integers(0, 256, n)]) for n in (22, 8, 16)]
        requests = [Request(tokens=x, max_new_tokens=11, stop_tokens=()) for x in prompts]
        model, tokens = inference_model(with_params(config, params_of(config))), [[], [], []]
        for event in Generation(model, ByteTokenizer(), requests):
            tokens[event.row].append(event.token)
        named = {f"prompt{i}": prompt for i, prompt in enumerate(prompts)}
        np.savez(folder / "expected.npz", tokens=tokens, **named)
    return place


@pytest.mark.parametrize("version", interop.TRIED)
def test_an_export_is_right_or_refuses(version, folders, tmp_path):
    """In the oldest and the newest version all, in those between two."""
    if not (ENVIRONMENTS / version).is_dir():
        pytest.skip(f"no transformers {version}: run make transformers")
    places = {"PYTHONPATH": str(ENVIRONMENTS / version), "HF_HOME": str(tmp_path)}
    names = NAMES if version in (interop.TRIED[0], interop.TRIED[-1]) else NAMES[1::2]
    line = [ENVIRONMENTS / "torch/bin/python", ROOT / "tests/hugging_face/properties.py"]
    line += [folders / name for name in names]
    environment = os.environ | places | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
