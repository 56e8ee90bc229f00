"""Reference files: their arrays, the errors of our results, and the bounds of these errors."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.kernels import programs
from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json, read_arrays


class Bounds(NamedTuple):
    """Largest allowed error, max |a - b| / max |b| per array (the loss: |a - b|)."""

    output: float
    gradient: float
    loss: float = 0.0


def _for_all(float32: float, float64: float) -> dict[str, Bounds]:
    """One bound for every array of a file."""
    return {"float32": Bounds(float32, float32), "float64": Bounds(float64, float64)}


# Float32 arithmetic: about ten times the error of the reference's own float32 run.
_LAYER = {"float32": Bounds(output=1e-5, gradient=3e-5)}
# With rotary angles: the stored cos and sin are float32 and not all correctly rounded (one ulp off
# at 1 radian, for example).
_ROTARY = _LAYER | {"float64": Bounds(output=1e-6, gradient=2e-6)}
_MODEL = {
    "float32": Bounds(output=3e-5, gradient=1e-4, loss=1e-5),
    "float64": Bounds(output=1e-6, gradient=1e-5, loss=1e-6),
}
_BOUNDS = {
    **dict.fromkeys(("ipttcd_mlp", "ipttt_mlp", "delta_layer"), _LAYER),
    **dict.fromkeys(("ipttcd_block", "lact_layer"), _ROTARY),
    **dict.fromkeys(("ipttcd_model", "ipttt_model", "delta_model", "lact_model"), _MODEL),
    "delta_op": {"float32": Bounds(output=1e-5, gradient=1e-5)},
    **dict.fromkeys(("dual_attn", "dual_attn_inputs", "lr_schedule"), _for_all(1e-5, 1e-12)),
    "optimizer": _for_all(1e-5, 1e-9),
    "mad_metrics": _for_all(1e-5, 1e-6),  # logits are stored in float32
    "mad_instances": _for_all(0.0, 0.0),  # tokens
}
# Float64 bounds where the table has none, by the stored dtype: values in float32 are rounded.
_EXACT = {"float64": 1e-10, "float32": 2e-7}
# Newton-Schulz amplifies rounding; more so in LaCT, where the update dominates the output.
_ORTHOGONAL = {
    "float32": Bounds(output=2e-5, gradient=1e-4),
    "float64": Bounds(output=1e-9, gradient=1e-6),
}
_LACT_ORTHOGONAL = {
    "float32": Bounds(output=5e-5, gradient=1e-3),
    "float64": Bounds(output=1e-5, gradient=1e-5),
}

# Relative L2 distance to the reference with bfloat16 inside Newton-Schulz, whose distance to
# exact arithmetic is about 0.06, in LaCT 0.08 to 0.17.
BFLOAT16_NEWTON_SCHULZ = {"ipttcd_mlp": 0.15, "lact_layer": 0.3}
BFLOAT16_MUON = 0.03  # of the parameter's total change


def bound(golden: "Golden", dtype: str, name: str) -> float:
    """The bound for array `name` of a file, computed in `dtype`."""
    tables = [_BOUNDS[golden.kind]]
    if golden.config.get("use_muon", False):
        tables.append(_LACT_ORTHOGONAL if golden.kind.startswith("lact") else _ORTHOGONAL)
    allowed = [table[dtype] for table in tables if dtype in table]
    if not allowed:
        return _EXACT[str(golden.arrays[name].dtype)]
    part = "output" if name.startswith("out.") else "gradient"
    return max(getattr(each, "loss" if name == "out.loss" else part) for each in allowed)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The error of one array and its bound; `ratio` > 1 is a failure."""

    name: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        if not np.isfinite(self.error) or (self.error and not self.bound):
            return np.inf
        return self.error / self.bound if self.error else 0.0


class Golden:
    """One reference file: `config`, parameters, and arrays by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrays = read_arrays(path)
        text = str(self.arrays.get("config_json", "{}"))
        self.info: dict[str, Any] = parse_json(text.encode(errors="replace"), path)
        self.kind: Any = self.info.get("kind")
        self.config: dict[str, Any] = self.info.get("config", {})
        if not isinstance(self.kind, str) or not isinstance(self.config, dict):
            raise DataError(f"{path} is not a readable reference file: it has no kind or no config")

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays whose names start with `prefix`, by the rest of the name."""
        return {
            name.removeprefix(prefix): value
            for name, value in self.arrays.items()
            if name.startswith(prefix)
        }


def relative_error(ours: Any, theirs: np.ndarray) -> float:
    """max |a - b| / max |b|; against an all-zero array max |a|. Raises `DataError` for
    arrays of different shapes."""
    ours = np.asarray(ours)
    if ours.shape != theirs.shape:
        raise DataError(f"shape {ours.shape} against the reference's {theirs.shape}")
    return programs.relative_error(ours, theirs)


def worst(ours: Mapping[str, Any], golden: Golden, dtype: str) -> Comparison:
    """The comparison with the largest error over its bound. Raises `KeyError` for an array that the
    file lacks, `DataError` for a stored result that is not among ours."""
    results = "out.", "grad.", "grad_in."
    stored = {name for name in golden.arrays if name.startswith(results) and "bf16" not in name}
    if surplus := stored - ours.keys():
        raise DataError(f"nothing computes {', '.join(sorted(surplus))}")
    errors = {name: relative_error(value, golden.arrays[name]) for name, value in ours.items()}
    return worse(*(Comparison(name, x, bound(golden, dtype, name)) for name, x in errors.items()))


def worse(*comparisons: Comparison) -> Comparison:
    if not comparisons:
        raise DataError("nothing is compared")
    return max(comparisons, key=lambda comparison: comparison.ratio)
