"""The logits of an imported checkpoint, compared with those of transformers."""

import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.errors import UserError
from ttcd_jax.precision import Precision
from ttcd_jax.run.directory import load_params
from ttcd_jax.train.state import with_params

_NUM_TOKENS = 64
_TOLERANCE = 1e-4  # of the largest logit, float32
_THEIRS = """
import sys

import numpy
import torch
import transformers

folder, tokens, logits = sys.argv[1:]
options = {"dtype": torch.float32, "trust_remote_code": True}
model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
with torch.no_grad():
    found = model(torch.tensor(numpy.load(tokens))).logits
numpy.save(logits, found.numpy())
print(transformers.__version__)
"""


def check_logits(checkpoint: Path, run_dir: Path, python: str) -> bool:
    """Whether the logits of both models for random tokens agree in float32; prints their distance.
    Raises `UserError` if the program `python` cannot run the checkpoint with transformers."""
    params, config, _ = load_params(run_dir)
    config = config.replace(precision=Precision())
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, _NUM_TOKENS))
    ours = with_params(config, params)(jnp.asarray(tokens, jnp.int32))
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("tokens.npy", "logits.npy")]
        np.save(files[0], tokens)
        line = [python, "-c", _THEIRS, str(checkpoint), *files]
        try:
            found = subprocess.run(line, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", "") or str(error)
            raise UserError(
                f"{python} cannot run {checkpoint} with transformers "
                f"({output.strip().splitlines()[-1][:200]}): name a Python with torch and "
                "transformers by --python"
            ) from error
        theirs = np.load(files[1])
    distance = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    version = found.stdout.split()[-1]
    print(
        f"logits of {_NUM_TOKENS} tokens: {distance:.1e} of the largest from those of transformers "
        f"{version}, allowed {_TOLERANCE:.0e}"
    )
    return distance <= _TOLERANCE
