"""Methods on meshes of eight fake devices: loss, statistics and every gradient against those of one
device. A script: `python equal_on_devices.py '{"METHOD": ["MESH", ...], ...}' FILE`, a mesh as
1x2x2x2 (data x fsdp x seq x tensor); writes the largest relative differences as JSON."""

import functools
import json
import math
import sys
from pathlib import Path

import jax
import numpy as np
import toy_method
from flax import nnx

from ttcd_jax.methods import METHODS
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.methods.registry import register
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.precision import Precision
from ttcd_jax.sharding.batch import Placement
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.state import params_shardings, with_params

B, T, L, V = 8, 64, 4, 32
register(toy_method.METHOD)


def config(method: str) -> TransformerConfig:
    """A window of 21 tokens: longer than the part of a row on one of four devices."""
    starts = {"proj_init": "normal", "chunk_size": L, "block_chunks": 2}
    delta = DeltaRuleConfig(chunk_size=L, num_taps=3)
    settings = {
        "ipttcd": MemoryConfig(teacher_conv_init="normal", form="blocked", **starts),
        "ipttt": TargetMemoryConfig(conv_init="normal", **starts),
        "ipttcd_ideal": IdealMemoryConfig(chunk_size=L),
        "lact": LaCTMemoryConfig(chunk_size=L, low_rank=2),
        "toy": toy_method.ToySettings(chunk_size=L),
        **dict.fromkeys(("deltanet", "gated_deltanet", "deltanet_hybrid"), delta),
    }
    # Scanned: one pair of a fast and a plain block, or fast blocks alone.
    num_layers, fast_layers = (4, (0, 2)) if method == "ipttcd" else (2, (0, 1))
    return TransformerConfig(
        vocab_size=V,
        dim=16,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=4 if method == "lact" else 2,
        mlp_dim=32,
        method=method,
        window=None if method == "full" else 21,
        student_window=6,
        fast_layers=fast_layers if METHODS[method].layers == "fast" else (),
        memory=settings.get(method),
        init_std=0.2,
        precision=Precision(param="float64", compute="float64", state="float64"),
    )


def batch() -> dict[str, np.ndarray]:
    """Several documents in a row, at any position, also at the edge of a device's shard."""
    rng = np.random.default_rng(0)
    segment_ids = np.sort(rng.integers(0, 4, (B, T)), axis=1)
    segment_ids[0] = np.arange(T) // (T // 4)
    fields = {
        "tokens": rng.integers(0, V, (B, T)),
        "targets": rng.integers(0, V, (B, T)),
        "segment_ids": segment_ids,
        "positions": np.broadcast_to(np.arange(T), (B, T)),
    }
    fields = {name: field.astype(np.int32) for name, field in fields.items()}
    return fields | {"loss_mask": rng.random((B, T)) < 0.9}


def loss(model_config, params, row):
    model = with_params(model_config, params)
    hidden, stats = model.forward(row["tokens"], row["segment_ids"], row["positions"])
    total = summed_loss(hidden, model.head_weight(), row["targets"], row["loss_mask"], 16)
    return total, stats


@functools.cache
def start(model_config):
    """Parameters, none of them zero or one, drawn without a program to compile."""
    rng = np.random.default_rng(0)
    shapes = nnx.eval_shape(lambda: Transformer(model_config, rngs=nnx.Rngs(0)))
    return jax.tree.map(
        lambda x: 0.2 * rng.standard_normal(x.shape), nnx.to_pure_dict(nnx.state(shapes, nnx.Param))
    )


def results(model_config, mesh):
    params = start(model_config)
    run = jax.jit(jax.value_and_grad(functools.partial(loss, model_config), has_aux=True))
    if mesh is None:
        return jax.device_get(run(params, batch()))
    place = Placement(mesh, batch_size=B, length=T)
    rows = {name: field[list(place.rows)] for name, field in batch().items()}
    params = jax.device_put(params, params_shardings(model_config, mesh))
    with jax.set_mesh(mesh):
        return jax.device_get(run(params, place(rows)))


def difference(expected: np.ndarray, found: np.ndarray) -> float:
    size = np.abs(expected).max()
    return float(np.abs(expected - found).max() / (size or 1))


def differences(method: str, meshes: list[str]) -> dict[str, float]:
    model_config = config(method)
    expected = jax.tree.leaves(results(model_config, None))
    worst = {}
    for name in meshes:
        sizes = [int(size) for size in name.split("x")]
        devices = jax.devices()[: math.prod(sizes)]
        mesh = build_mesh(MeshConfig(**dict(zip(AXES, sizes, strict=True))), devices)
        found = jax.tree.leaves(results(model_config, mesh))
        worst[name] = max(map(difference, expected, found))
    return worst


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    cases, output = sys.argv[1:]
    found = {method: differences(method, meshes) for method, meshes in json.loads(cases).items()}
    Path(output).write_text(json.dumps(found))
