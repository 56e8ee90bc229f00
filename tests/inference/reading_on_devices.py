"""Prompts read and continued on a mesh of eight fake devices and on one. A script:
`python reading_on_devices.py METHODS MESH`, methods as ipttcd,lact, a mesh as 2x2x1x2 (data x fsdp
x seq x tensor); prints, of each method, the largest relative difference of logits and states, and
the share of the state that one device holds."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from small_models import CHUNK

sys.path.append(str(Path(__file__).parents[1] / "sharding"))
from equal_on_devices import B, V, config, mesh_of, placed_params, worst_distance

from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.train.state import with_params

LENGTHS = np.array([3, 9, 11, 8, 5, 12, 4, 7])
STEPS = CHUNK + 1


def read(method: str, mesh_name: str):
    """(logits of the prompts and of every step after them, the state)."""
    model_config, mesh = config(method, num_layers=2, fast_layers=(0,)), mesh_of(mesh_name)
    tokens = np.random.default_rng(0).integers(0, V, (B, LENGTHS.max() + STEPS))
    params = placed_params(model_config, mesh)
    with jax.set_mesh(mesh):
        model = inference_model(with_params(model_config, params))
        state = start_state(model, B, max_length=tokens.shape[1])
        logits, state = prefill(model, state, tokens, LENGTHS)
        found = [logits]
        for time in range(STEPS):
            logits, state = decode(model, state, tokens[np.arange(B), LENGTHS + time])
            found.append(logits)
    return found, state


def share_of_a_device(state) -> float:
    leaves = jax.tree.leaves(state)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)


def compared(method: str, mesh_name: str) -> dict[str, float]:
    expected, found = read(method, "1x1x1x1"), read(method, mesh_name)
    return {"worst": worst_distance(found, expected), "share": share_of_a_device(found[1])}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    methods, mesh = sys.argv[1:]
    print(json.dumps({method: compared(method, mesh) for method in methods.split(",")}))
