"""Three steps of Muon, the batch in two parts, on one device and on data x fsdp x seq x tensor. A
script: `python steps_on_devices.py METHOD FILE MESH` writes what differs as JSON."""

import json
import math
import sys
from pathlib import Path

import jax
from equal_on_devices import B, T, batch, config, difference

from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh
from ttcd_jax.train.optimizer import OptimizerConfig, build_optimizer
from ttcd_jax.train.schedule import ScheduleConfig, learning_rate
from ttcd_jax.train.state import init_state, logical_axes, state_shardings
from ttcd_jax.train.step import make_train_step


def trained(method: str, sizes: tuple[int, ...], parts: int):
    """(state after three steps, their losses, programs compiled)."""
    model, schedule = config(method), ScheduleConfig(peak=1e-2, warmup=1, steps=10)
    muon = OptimizerConfig(kind="muon", orthogonalization="float64", schedule=schedule)
    optimizer = build_optimizer(muon, logical_axes(model))
    devices = jax.devices()[: math.prod(sizes)]
    mesh = build_mesh(MeshConfig(**dict(zip(AXES, sizes, strict=True))), devices)
    places = state_shardings(model, optimizer, mesh)
    row = Placement(mesh, batch_size=B, length=T)(batch())
    step = make_train_step(
        model, optimizer, learning_rate(schedule), accumulation_steps=parts, loss_rows=16
    )
    run = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(mesh)))
    losses = []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(model, optimizer, 0), out_shardings=places)()
        for _ in range(3):
            state, metrics = run(state, row)
            losses.append(metrics["loss"])
    return jax.device_get((state, losses)), run._cache_size()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    method, output, mesh = sys.argv[1:]
    expected, _ = trained(method, (1, 1, 1, 1), 1)
    found, num_programs = trained(method, tuple(map(int, mesh.split("x"))), 2)
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    worst = max(difference(*pair) for pair in pairs)
    Path(output).write_text(json.dumps({"worst": worst, "programs": num_programs}))
