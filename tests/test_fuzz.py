"""Files of a run with changed values, and .gin files with changed words: read, or refused in one
line. A seed draws thousands of changes; nothing else may be raised."""

import hashlib
import json
import zipfile
from pathlib import Path

import corpora
import numpy as np
import pytest
from checks import randomize
from damage import fuzz
from safetensors.numpy import save
from small_models import byte_model, config_of

from experiments import cli
from ttcd_jax.data.records import MANIFEST, sealed, verify_records
from ttcd_jax.data.sources import text_records
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import parse_json, read_arrays
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.saved_state import load_state, save_state
from ttcd_jax.inference.state import start_state
from ttcd_jax.interop.reference_config import reference_config, transformer_config
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.results import read_all_results, task_sections
from ttcd_jax.measure.selection import read_manifest
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory, model_config, run_tokenizer
from ttcd_jax.train import digest


def test_configuration_of_a_run(tmp_path):
    directory = RunDirectory(tmp_path)
    corpus = {"type": "CorpusConfig", "kind": "text", "path": str(tmp_path), "glob": "**/*.txt"}
    corpus |= {"field": "text", "validation_percent": 5}
    tokenizer = {"type": "TokenizerConfig", "kind": "byte", "path": None}
    data = {"type": "TextConfig", "corpus": corpus, "tokenizer": tokenizer, "seq_len": 32}
    (tmp_path / "a.txt").write_text("a text of some words\n" * 9)
    (tmp_path / "b.txt").write_text("another text\n" * 9)
    config = {"format": 2, "model": byte_model().to_dict(), "data": data}

    def read(value):
        (tmp_path / "config.json").write_text(json.dumps(value))
        model_config(directory)
        stored = directory.read_part("data")
        tokenizer = run_tokenizer(directory)
        if stored.get("corpus") == corpus:
            text_records(tmp_path, stored, tokenizer, None)

    fuzz(config, read, 1000)


def test_configuration_of_a_reference_checkpoint():
    def read(value):
        transformer_config(value if isinstance(value, dict) else {})

    for method in ("ipttcd", "ipttt", "lact", "deltanet", "swa"):
        fuzz(reference_config(config_of(method, student_window=4)), read, 300)


def test_digests(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 10)
    digest.seal(tmp_path)
    source = json.loads((tmp_path / digest.DIGEST).read_text())

    def read(value):
        (tmp_path / digest.DIGEST).write_text(json.dumps(value))
        if problems := digest.verify(tmp_path):
            raise UserError(str(problems))

    fuzz(source, read, 500)


def test_saved_states(tmp_path):
    model = inference_model(randomize(Transformer, config_of("ipttcd", num_layers=1), std=0.5))
    save_state(tmp_path / "state", model, start_state(model, 2))
    folder = tmp_path / "state"
    source = json.loads((folder / "state.json").read_text())

    def read(value):
        (folder / "state.json").write_text(json.dumps(value))
        digest.seal(folder)
        load_state(folder, model)

    fuzz(source, read, 300)
    (folder / "state.json").write_text(json.dumps(source))
    arrays = (folder / "state.safetensors").read_bytes()

    def damaged(data, draw):
        data = bytearray(data)
        for _ in range(3):
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
        return bytes(data)

    def read_arrays(data):
        (folder / "state.safetensors").write_bytes(data)
        digest.seal(folder)
        load_state(folder, model)

    fuzz(arrays, read_arrays, 200, write=damaged)


ON_AND_OFF = ("on, fast weights on", "on, off (eta = 0)")
WHOLE = {"start": 0, "stop": 32, "tokens": 5, "perplexity": 2.0, "bits_per_byte": 1.0}
ONE = {"slice": "n = 2, new", "n": 2, "start": 0, "stop": 16, "context": 8, "tokens": 5, "nll": 2.5}
BY_DOCUMENT = [ONE | {"document": 0}, ONE | {"document": 1, "context": 16}]


@pytest.mark.parametrize(
    ("task", "count", "records", "labels"),
    [
        ("ppl", 60, [WHOLE | {"context": name} for name in ("0-31", "all")], ("on", "off")),
        ("final_block", 12, BY_DOCUMENT, ON_AND_OFF),
        ("recurrence", 12, BY_DOCUMENT, ON_AND_OFF),
        ("position", 12, [x | {"positions": "1-2"} for x in BY_DOCUMENT], ("on",)),
    ],
)
def test_results(tmp_path, task, count, records, labels):
    source = {"task": task, "label": "on", "chance": None, "series": dict.fromkeys(labels, records)}
    if task != "ppl":
        source |= {"options": {"a": 1}, "facts": {"documents": "x"}}
    path = tmp_path / "eval" / "task" / "results.json"
    path.parent.mkdir(parents=True)

    def read(value):
        path.write_text(json.dumps(value))
        task_sections(read_all_results([tmp_path]), tmp_path / "page")

    fuzz(source, read, count)


def test_manifests_of_records(tmp_path):
    corpus = corpora.text_folder(tmp_path / "text", ["one text", "another"], validation_percent=0)
    folder = tmp_path / "records"
    source = corpora.records(corpus, folder)
    del source["sha256"]
    facts = source["splits"]["train"]
    for change in (
        *({"bos_id": 10**9}, {"stop_ids": [-1]}, {"stop_ids": ["x"]}),
        *({"splits": {"train": facts | {x: 10**18}}} for x in ("num_tokens", "num_documents")),
        {"splits": {"train": facts | {"shards": ["a\0b"]}}},
    ):
        (folder / MANIFEST).write_text(json.dumps(sealed(source | change)))
        with pytest.raises(DataError, match="describes no files of its folder"):
            verify_records(folder)


def test_npz_files(tmp_path):
    """The size and checksum of each array fit; its header is another."""
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }"
    source = header.ljust(127) + b"\n" + np.arange(3, dtype=np.int32).tobytes()
    path = tmp_path / "a.npz"

    def write(source, draw):
        data = bytearray(source)
        for _ in range(draw.choice((1, 2, 4))):
            data[draw.randrange(len(header))] = draw.choice(b"\0(){}[]'\",:#\\\n \xff<09zO")
        return bytes(data[: len(data) - draw.choice((0, 0, 4, 60))])

    def read(data):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(draw_name(data), data)
        arrays = read_arrays(path)
        assert all(isinstance(x, np.ndarray) for x in arrays.values())
        read_manifest(path, "")

    def draw_name(data):
        return "flat_tokens" if data[-1] % 3 == 0 else "flat_tokens.npy"

    fuzz(source, read, 1000, write=write)


def test_journals(tmp_path):
    """Forged ones, with a digest that fits: ignored, or read."""
    source = {"0/sizes": [2, 1], "0/0": [1, 2, 3], "0/1": [3, 4, 5]}

    def read(value):
        arrays = {}
        for name, x in value.items() if isinstance(value, dict) else ():
            if isinstance(x, list) and all(type(n) is int and abs(n) < 2**31 for n in x):
                arrays[name.encode(errors="replace").decode()] = np.array(x, np.int64)
        content = save(arrays)
        digest = hashlib.sha256(b"key" + content).digest()
        (tmp_path / "key.0").write_bytes(digest + content)
        if not Journal(tmp_path, None).read("key"):
            raise UserError("nothing")

    fuzz(source, read, 500)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "\\udcff"}',
        b'{"a": ' + b"9" * 400 + b"}",
        b'{"a": 1e999}',
        b"[" + b"{}," * 10**7 + b"{}]",
        b'{"a": 1, "a": 2}',
    ],
    ids=["surrogate", "digits", "infinity", "values", "twice"],
)
def test_json_that_no_reader_could_use_is_refused(data):
    with pytest.raises(DataError, match=r"x is not JSON"):
        parse_json(data, Path("x"))
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83e\\uddee"}', Path("x")) == {"a": "🧮"}


def test_gin_files(tmp_path):
    lines = [
        *("include 'text.gin'", "TEXT = 'README.md'", "RunConfig.steps = 3"),
        *("RunConfig.seed = 1", "TransformerConfig.fast_layers = (0, 1)"),
        *("MemoryConfig.chunk_size = 32", "OptimizerConfig.beta1 = 0.9"),
    ]
    words = (
        *("0", "-1", "10**9", "''", "'x'", "None", "(", ")", "[1, 2]", "{}", "@x()", "%X", "@"),
        *("import os", "include '../x'", "\x00", "é", "=", ".", "/", "'''", "#", "\\", "\t"),
        *("RunConfig", "MemoryConfig.eta", "a/b.c", "(" * 300, "9" * 500, "lambda: 0", "\n  3"),
        "1e999",
    )

    def write(source, draw):
        tokens = [line.split(" ") for line in source]
        for _ in range(draw.choice((1, 2, 4))):
            line = draw.choice(tokens)
            line[draw.randrange(len(line))] = draw.choice(words)
        return "\n".join(map(" ".join, tokens))

    def read(text):
        (tmp_path / "x.gin").write_text(text)
        load_config(RunConfig, str(tmp_path / "x.gin"), config_dir=cli.CONFIG_DIR)

    fuzz(lines, read, 2000, write=write)
