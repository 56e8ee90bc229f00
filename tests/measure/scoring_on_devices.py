"""Losses and likelihoods on a mesh of eight fake devices and on one. A script:
`python scoring_on_devices.py MESH ...`, meshes as 2x2x1x2 (data x fsdp x seq x tensor); prints, of
each mesh, the largest difference of rows that are streamed or read in one pass, and of
likelihoods."""

import json
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "sharding"))
from equal_on_devices import V, config, mesh_of, placed_params

from ttcd_jax.measure import scorer as module
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.train.state import with_params

LENGTHS = (13, 5, 17, 2, 9, 16, 3, 11, 7)


def measured(mesh_name: str) -> dict[str, np.ndarray]:
    model_config, mesh = config("ipttcd", num_layers=2, fast_layers=(0,)), mesh_of(mesh_name)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, V, length) for length in LENGTHS]
    pairs = [(rows[i % 3], row) for i, row in enumerate(rows)]
    params, found = placed_params(model_config, mesh), {}
    with jax.set_mesh(mesh):
        scorer = Scorer(with_params(model_config, params), batch_size=8)
        for name, one_pass in (("streamed", 1), ("one pass", 2048)):
            module.ONE_PASS = one_pass
            found[name] = np.concatenate([x.losses for x in scorer.losses(rows)])
            likelihoods = scorer.loglikelihoods(pairs)
            found[f"likelihoods, {name}"] = np.array([x.log_likelihood for x in likelihoods])
    return found


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    expected = measured("1x1x1x1")
    distances = {}
    for mesh in sys.argv[1:]:
        found = measured(mesh)
        distances[mesh] = {x: float(np.abs(found[x] - expected[x]).max()) for x in expected}
    print(json.dumps(distances))
