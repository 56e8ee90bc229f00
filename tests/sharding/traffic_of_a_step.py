"""Bytes a training step on eight fake devices sends along `seq`, at two lengths. A script:
`python traffic_of_a_step.py METHOD` prints [{kind: bytes per step}, ...] as JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import optax
from equal_on_devices import B, config, mesh_of
from jax.sharding import NamedSharding
from sent_bytes import sent_bytes

from ttcd_jax.precision import Precision
from ttcd_jax.sharding.batch import replicated
from ttcd_jax.sharding.rules import spec
from ttcd_jax.train.state import init_params, placed_as, state_of, state_shardings
from ttcd_jax.train.step import make_train_step

LENGTHS = (256, 512)


def traffic(method: str, length: int) -> dict[str, int]:
    model = config(method, precision=Precision())
    mesh = mesh_of("1x1x8x1")
    optimizer = optax.adam(1e-3)
    places = state_shardings(model, optimizer, mesh)
    state = placed_as(jax.eval_shape(lambda: state_of(optimizer, init_params(model, 0))), places)
    place = NamedSharding(mesh, spec(("batch", "length"), mesh))
    kinds = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), "int32")
    batch = {
        name: jax.ShapeDtypeStruct((B, length), kind, sharding=place)
        for name, kind in (kinds | {"loss_mask": "bool"}).items()
    }
    step = make_train_step(model, optimizer, lambda _: jnp.asarray(1e-3), loss_rows=16)
    run = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(mesh)))
    with jax.set_mesh(mesh):
        return sent_bytes(str(run.lower(state, batch).compile().as_text()))


if __name__ == "__main__":
    print(json.dumps([traffic(sys.argv[1], length) for length in LENGTHS]))
