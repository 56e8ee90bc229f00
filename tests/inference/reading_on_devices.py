"""Prompts read and continued on a mesh of eight fake devices and on one. A script:
`python reading_on_devices.py METHODS FILE MESH`, methods as ipttcd,lact, a mesh as 2x2x1x2 (data x
fsdp x seq x tensor); writes, of each method, the largest relative difference of logits and states,
and the share of the state that one device holds."""

import json
import math
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "sharding"))
from equal_on_devices import B, L, V, config, difference, start

from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh
from ttcd_jax.train.state import params_shardings, with_params

LENGTHS = np.array([3, 9, 11, 8, 5, 12, 4, 7])
STEPS = L + 1


def read(model_config, params):
    """(logits of the prompts and of every step after them, the state)."""
    tokens = np.random.default_rng(0).integers(0, V, (B, LENGTHS.max() + STEPS))
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


def main(methods: str, output: str, name: str) -> None:
    sizes = [int(size) for size in name.split("x")]
    devices = jax.devices()[: math.prod(sizes)]
    mesh = build_mesh(MeshConfig(**dict(zip(AXES, sizes, strict=True))), devices)
    results = {}
    for method in methods.split(","):
        model_config = config(method)
        params = start(model_config)
        expected = jax.tree.leaves(jax.device_get(read(model_config, params)))
        params = jax.device_put(params, params_shardings(model_config, mesh))
        with jax.set_mesh(mesh):
            found, state = read(model_config, params)
        both = zip(expected, jax.tree.leaves(jax.device_get((found, state))), strict=True)
        worst = max(difference(a, b) for a, b in both)
        results[method] = {"worst": worst, "share": share_of_a_device(state)}
    Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(*sys.argv[1:])
