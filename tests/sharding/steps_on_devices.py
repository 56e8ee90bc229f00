"""Three steps of Muon on rows of one document, the batch in two parts, with parameters that are
frozen or slow and a memory that comes slowly, on one device and on data x fsdp x seq x tensor. A
script: `python steps_on_devices.py METHOD MESH` prints what differs as JSON."""

import json
import sys

import jax
from equal_on_devices import B, T, batch, config, mesh_of, worst_distance

from ttcd_jax.sharding.batch import Placement, replicated
from ttcd_jax.train.groups import preparation, rate_factors
from ttcd_jax.train.optimizer import (
    MuonSettings,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    learning_rate,
)
from ttcd_jax.train.state import init_params, logical_axes, state_of, state_shardings
from ttcd_jax.train.step import make_train_step

RATES = (("layers/0/mixer/*", 0.0), ("final_norm", 0.0), ("layers/*/mlp/down", 0.5))


def trained(method: str, mesh_name: str, parts: int):
    """(state after three steps, their losses, programs compiled)."""
    starts = {"init_std": 0.2, "num_layers": 2, "fast_layers": (0, 1)}
    model, schedule = config(method, **starts), ScheduleConfig(peak=1e-2, warmup=1, steps=10)
    if method == "ipttcd":
        memory = model.settings.replace(proj_init="normal", teacher_conv_init="normal")
        model = model.replace(memory=memory)
    muon = OptimizerConfig(
        kind="muon", settings=MuonSettings(orthogonalization="float64"), schedule=schedule
    )
    rate, mesh = learning_rate(schedule), mesh_of(mesh_name)
    factors = rate_factors(model, RATES)
    optimizer = build_optimizer(muon, rate, logical_axes(model), factors=factors)
    places = state_shardings(model, optimizer, mesh)
    fields = batch()
    del fields["segment_ids"]
    row = Placement(mesh, batch_size=B, length=T)(fields)
    prepare = preparation(model, factors, memory_warmup=2)
    step = make_train_step(
        model, optimizer, rate, accumulation_steps=parts, loss_rows=16, prepare=prepare
    )
    run = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(mesh)))
    losses = []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: state_of(optimizer, init_params(model, 0)), out_shardings=places)()
        for _ in range(3):
            state, metrics = run(state, row)
            losses.append(metrics["loss"])
    return jax.device_get((state, losses)), run._cache_size()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    method, mesh = sys.argv[1:]
    expected, _ = trained(method, "1x1x1x1", 1)
    found, num_programs = trained(method, mesh, 2)
    print(json.dumps({"worst": worst_distance(found, expected), "programs": num_programs}))
