"""Random in-place layers against their definition, values and gradients, compiled as users compile
them: a program, since the suite's processes compile at optimization level 0. Prints a line of JSON
for every seed: the case, and its largest error by array."""

import json
import sys
from pathlib import Path
from typing import Any

import definitions
import jax
import jax.numpy as jnp
import numpy as np
from checks import distance, randomize
from flax import nnx

from ttcd_jax.methods.ip_ttt import IPTTTMLP, IPTTTConfig, TargetMemoryConfig
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.precision import Precision

D, F = 4, 6


def settings_of(rng: np.random.Generator) -> MemoryConfig | TargetMemoryConfig:
    """Settings that go together, drawn."""

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    kind = one("forms", "forms", "forms", "corrects", "renorm", "folds")
    fields = {
        "chunk_size": int(one(1, 1, 2, 3, 5)),
        "num_taps": int(rng.integers(1, 5)),
        "block_chunks": int(one(1, 2, 4)),
        "is_conv_causal": one(True, False),
        "resets_at_document": kind != "folds" and one(True, True, False),
        "has_proj": one(True, False),
        "form": one("auto", "blocked", "associative", "attention") if kind == "forms" else "auto",
        "corrects_errors": kind == "corrects",
        "folds_state": kind == "folds",
        "eta": abs(float(rng.normal())),
    }
    if kind in ("forms", "corrects"):
        fields["half_lives"] = one((), (2.0,), (1.5, 40.0))
        fields["decay"] = (
            one("constant", "learned", "gated") if fields["half_lives"] else "constant"
        )
    if kind != "renorm" and one(True, False, False):
        fields |= {"target": "hidden", "has_activation_conv": one(True, False)}
        return TargetMemoryConfig(**fields, has_target_conv=one(True, False))
    for name in ("has_teacher_conv", "has_student_conv", "has_token_rate", "normalizes_errors"):
        fields[name] = one(True, False)
    outputs = ("teacher", "student", *["teacher_raw"] * fields["has_teacher_conv"])
    return MemoryConfig(
        **fields,
        output=one(*outputs),
        normalizes_keys=kind == "corrects" or one(True, False),
        renorm_chunks=int(one(1, 2, 3)) if kind == "renorm" else None,
    )


def errors_of(seed: int, dtype: str) -> dict[str, Any]:
    """The case of a seed, and the largest relative errors of value and gradients."""
    rng = np.random.default_rng(seed)
    settings, length = settings_of(rng), int(rng.integers(1, 15))
    cuts = np.sort(rng.integers(1, length + 1, rng.integers(3)))
    ids = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
    precision = Precision(param=dtype, compute=dtype, state=dtype)
    mlp = MLPConfig(dim=D, hidden_dim=F, precision=precision)
    is_target = isinstance(settings, TargetMemoryConfig)
    layer, config = (IPTTTMLP, IPTTTConfig) if is_target else (IPTTCDMLP, IPTTCDConfig)
    module = randomize(layer, config(mlp=mlp, memory=settings))
    graph, params = nnx.split(module)
    x, t, dy = (rng.standard_normal((length, D)) for _ in range(3))

    def run(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x[None], t[None], jnp.asarray(ids[None]))[0]

    def define(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        return definitions.in_place(settings, params, x, t, ids)

    @jax.jit
    def ours(params: Any, *inputs: jax.Array) -> Any:
        y, pull = jax.vjp(run, params, *inputs)
        return y, pull(jnp.asarray(dy, dtype))

    found, d_found = ours(params, *(jnp.asarray(a, dtype) for a in (x, t)))
    wide = jax.tree.map(lambda a: a.astype(float), nnx.to_pure_dict(params))
    y, pull = jax.vjp(define, wide, jnp.asarray(x), jnp.asarray(t))
    wanted = pull(jnp.asarray(dy))
    # Where a gradient is mere rounding it is compared with that of x.
    largest = float(jnp.abs(wanted[1]).max()) or 1.0
    error = distance(found, y)
    for a, b in zip(
        jax.tree.leaves((nnx.to_pure_dict(d_found[0]), d_found[1:])),
        jax.tree.leaves((wanted[0], wanted[1:])),
        strict=True,
    ):
        size = max(float(jnp.abs(b).max()), 1e-3 * largest)
        error = max(error, float(np.abs(np.asarray(a, float) - np.asarray(b)).max()) / size)
    case = {"seed": seed, "dtype": dtype, "ids": ids.tolist(), "settings": repr(settings)}
    return case | {"error": error}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    sys.path.append(str(Path(__file__).parents[1] / "inference"))
    from test_any_split import test_any_way_to_read_rows_gives_what_one_pass_gives as check_pieces

    for name in sys.argv[1:]:
        if name.isdecimal():
            case = errors_of(int(name), ("float64", "float32")[int(name) % 3 == 2])
        else:  # a method, whose rows are read in pieces; raises where they differ from one pass
            check_pieces(name)
            case = {"method": name, "dtype": "float64", "error": 0.0}
        print(json.dumps(case), flush=True)
