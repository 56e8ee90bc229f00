"""Methods on meshes of fake devices: loss, statistics, distances to a teacher, every gradient."""

import functools
import math

import jax
import numpy as np
from checks import distance, randomize
from flax import nnx
from small_models import CHUNK, config_of, outside_method

from ttcd_jax import MemoryConfig, Transformer, TransformerConfig
from ttcd_jax.methods.registry import register
from ttcd_jax.models.config import layers_with_teacher
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh
from ttcd_jax.sharding.rules import Placement
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.state import params_shardings, with_params

B, T, V = 8, 64, 32
register(outside_method())


def config(method: str, **changes) -> TransformerConfig:
    """A window of 21 tokens: longer than the part of a row on one of four devices. "corrected" is
    IP-TTCD by the delta rule."""
    if method == "corrected":
        memory = MemoryConfig(chunk_size=CHUNK, num_taps=3, corrects_errors=True)
        return config("ipttcd", memory=memory)
    # Scanned: one pair of a fast and a plain block, or fast blocks alone.
    layers = {"ipttcd": (4, (0, 2)), "ipttcd_stream": (5, (3,))}
    num_layers, fast_layers = layers.get(method, (2, (0, 1)))
    fields = {"vocab_size": V, "dim": 16, "num_layers": num_layers, "mlp_dim": 32}
    fields |= {"num_heads": 4, "num_kv_heads": 4 if method == "lact" else 2, "student_window": 6}
    fields |= {"window": None if method == "full" else 21, "fast_layers": fast_layers}
    return config_of(method, **fields | changes)


def mesh_of(name: str) -> jax.sharding.Mesh:
    """Of "1x2x2x2": data x fsdp x seq x tensor."""
    sizes = [int(size) for size in name.split("x")]
    devices = jax.devices()[: math.prod(sizes)]
    return build_mesh(MeshConfig(**dict(zip(AXES, sizes, strict=True))), devices)


def batch() -> dict[str, np.ndarray]:
    """Several documents in a row, at any position, also at the edge of a device's shard."""
    rng = np.random.default_rng(0)
    segment_ids = np.sort(rng.integers(0, 4, (B, T)), axis=1)
    segment_ids[0] = np.arange(T) // (T // 4)
    fields = {name: rng.integers(0, V, (B, T)) for name in ("tokens", "targets")}
    fields |= {"segment_ids": segment_ids, "positions": np.broadcast_to(np.arange(T), (B, T))}
    fields = {name: field.astype(np.int32) for name, field in fields.items()}
    return fields | {"loss_mask": rng.random((B, T)) < 0.9}


def loss(model_config, params, row):
    model = with_params(model_config, params)
    hidden, stats = model.forward(row["tokens"], row["segment_ids"], row["positions"])
    total = summed_loss(hidden, model.head_weight(), row["targets"], row["loss_mask"], 16)
    found = None
    if layers_with_teacher(model_config):
        found = model.distillation(row["tokens"], row["segment_ids"])
    return total, (stats, found)


@functools.cache
def drawn_params(model_config):
    """Parameters, none of them zero or one."""
    model = randomize(Transformer, model_config, std=0.2)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def placed_params(model_config, mesh):
    return jax.device_put(drawn_params(model_config), params_shardings(model_config, mesh))


def results(model_config, mesh=None):
    run = jax.jit(jax.value_and_grad(functools.partial(loss, model_config), has_aux=True))
    if mesh is None:
        return jax.device_get(run(drawn_params(model_config), batch()))
    rows = Placement(mesh, batch_size=B, length=T)(batch())
    with jax.set_mesh(mesh):
        return jax.device_get(run(placed_params(model_config, mesh), rows))


def worst_distance(found, expected) -> float:
    return max(map(distance, jax.tree.leaves(found), jax.tree.leaves(expected)))
