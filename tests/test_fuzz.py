"""Files of a run with changed values, and .gin files with changed words: read, or refused in one
line. A seed draws thousands of changes; nothing else may be raised."""

import hashlib
import json
import zipfile
from pathlib import Path

import corpora
import numpy as np
import pytest
from checks import refused
from damage import fuzz, fuzz_file
from safetensors.numpy import save
from small_models import byte_model, config_of, model_of

from ttcd_jax import RunConfig
from ttcd_jax.commands import cli
from ttcd_jax.data.sources import TextConfig, text_records
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import parse_json, read_arrays
from ttcd_jax.inference import inference_model, start_state
from ttcd_jax.inference.saved_state import load_state, save_state
from ttcd_jax.interop.reference_config import reference_config, transformer_config
from ttcd_jax.measure.by_document import read_manifest
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.results import read_all_results, task_sections
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.directory import RunDirectory, model_config, run_tokenizer
from ttcd_jax.train import digest


def test_configuration_of_a_run(tmp_path):
    directory = RunDirectory(tmp_path)
    texts = ["a text of some words\n" * 9, "another text\n" * 9]
    corpus = corpora.text_folder(tmp_path, texts)
    data = TextConfig(corpus=corpus, tokenizer=TokenizerConfig(), seq_len=32).to_dict()
    config = {"format": 2, "model": byte_model().to_dict(), "data": data}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def read():
        model_config(directory)
        stored = directory.read_part("data")
        tokenizer = run_tokenizer(directory)
        if stored.get("corpus") == data["corpus"]:
            text_records(tmp_path, stored, tokenizer, None)

    fuzz_file(tmp_path / "config.json", read, 500)


def test_configuration_of_a_reference_checkpoint():
    def read(value):
        transformer_config(value if isinstance(value, dict) else {})

    for method in ("ipttcd", "ipttt", "lact", "deltanet", "swa"):
        fuzz(reference_config(config_of(method, student_window=4)), read, 300)


def test_digests(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 10)
    digest.seal(tmp_path)

    def read():
        if problems := digest.verify(tmp_path):
            raise UserError(str(problems))

    fuzz_file(tmp_path / digest.DIGEST, read, 300)


def test_saved_states(tmp_path):
    model = inference_model(model_of("ipttcd", num_layers=1))
    folder = tmp_path / "state"
    save_state(folder, model, start_state(model, 2))
    arrays = folder / "state.safetensors"

    def read():
        digest.seal(folder)
        load_state(folder, model)

    def damaged(data, draw):
        data = bytearray(data)
        for _ in range(3):
            data[draw.randrange(min(len(data), 400))] = draw.randrange(256)
        return bytes(data)

    fuzz_file(folder / "state.json", read, 150)
    source = arrays.read_bytes()
    fuzz(source, lambda data: (arrays.write_bytes(data), read()), 100, write=damaged)


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
    path.write_text(json.dumps(source))
    fuzz_file(path, lambda: task_sections(read_all_results([tmp_path]), tmp_path / "page"), count)


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
            archive.writestr("flat_tokens" + ".npy" * (data[-1] % 3 != 0), data)
        arrays = read_arrays(path)
        assert all(isinstance(x, np.ndarray) for x in arrays.values())
        read_manifest(path, "")

    fuzz(source, read, 500, write=write)


def test_journals(tmp_path):
    """Forged ones, with a digest that fits: ignored, or read."""
    source = {"0/0/0": [1, 2], "0/0/1": [3, 4], "0/1/0": [3], "0/1/1": [5]}

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
    ("words", "data"),
    [
        ("surrogates not allowed", b'{"a": "\\udcff"}'),
        ("an integer of 400 digits is not a JSON number", b'{"a": ' + b"9" * 400 + b"}"),
        ("1e999 is not a JSON number", b'{"a": 1e999}'),
        ("NaN is not a JSON number", b'{"a": NaN}'),
        ("more than 10,000,000 values", b"[" + b"{}," * 10**7 + b"{}]"),
        ("the name 'a' is there twice", b'{"a": 1, "a": 2}'),
    ],
    ids=["surrogate", "digits", "infinity", "nan", "values", "twice"],
)
def test_json_that_no_reader_could_use_is_refused(words, data):
    refused(f"x is not JSON (|{words}", parse_json, data, Path("x"), error=DataError)
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83e\\uddee"}', Path("x")) == {"a": "🧮"}


def test_gin_files(tmp_path):
    lines = ["include 'text.gin'", "TEXT = 'README.md'", "RunConfig.steps = 3"]
    lines += ["RunConfig.seed = 1", "TransformerConfig.fast_layers = (0, 1)"]
    lines += ["MemoryConfig.chunk_size = 32", "OptimizerConfig.beta1 = 0.9"]
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

    fuzz(lines, read, 400, write=write)
