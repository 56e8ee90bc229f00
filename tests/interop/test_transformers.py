"""Exports in every version of transformers that they name (tests/hugging_face/properties.py)."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hugging_face.own import MODELS, params_of, write

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.files import write_whole
from ttcd_jax.inference.generate import Generation, Request
from ttcd_jax.inference.model import inference_model
from ttcd_jax.interop.hugging_face_export import TRIED, text_files
from ttcd_jax.train.state import with_params

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv/transformers"
# The published sum, the delta rule with a gated decay, full attention, IP-TTT.
NAMES = ("published", "corrected", "continued", "embeddings")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Exports with prompts of other lengths and our greedy tokens after them."""
    place = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        folder = write(name, place / name, vocab_size=ByteTokenizer.vocab_size)
        for file, text in text_files(ByteTokenizer(), {}).items():
            write_whole(folder / file, text)
        config = MODELS[name].replace(vocab_size=ByteTokenizer.vocab_size)
        rng = np.random.default_rng(3)
        prompts = [np.array([ByteTokenizer.bos_id, *rng.integers(0, 256, n)]) for n in (22, 8, 16)]
        requests = [Request(tokens=x, max_new_tokens=15, stop_tokens=()) for x in prompts]
        model, tokens = inference_model(with_params(config, params_of(config))), [[], [], []]
        for event in Generation(model, ByteTokenizer(), requests):
            tokens[event.row].append(event.token)
        named = {f"prompt{i}": prompt for i, prompt in enumerate(prompts)}
        np.savez(folder / "expected.npz", tokens=tokens, **named)
    return place


@pytest.mark.parametrize("version", TRIED)
def test_an_export_is_right_or_refuses(version, folders, tmp_path):
    if not (ENVIRONMENTS / version).is_dir():
        pytest.skip(f"no transformers {version}: run make transformers")
    places = {"PYTHONPATH": str(ENVIRONMENTS / version), "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [ENVIRONMENTS / "torch/bin/python", ROOT / "tests/hugging_face/properties.py", folders],
        env=os.environ | places | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
