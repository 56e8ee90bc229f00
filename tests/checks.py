"""What many tests need: tolerances by dtype, comparison of trees, a look into a jaxpr."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

# Largest max |a - b| / max |b| per array between two ways to compute one thing.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}


def draw(seed: int, *shapes: tuple[int, ...], dtype=None) -> list[jax.Array]:
    """Standard normal arrays, in the default dtype (float64 inside the `float64` fixture)."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype or float) for shape in shapes]


def distance(ours, theirs) -> float:
    """max |a - b| / max |b|; against zeros the plain difference."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    if not theirs.size:
        return 0.0
    error = float(np.abs(ours - theirs).max() / (np.abs(theirs).max() or 1.0))
    return error if np.isfinite(error) else np.inf


def assert_close(ours, theirs, tolerance: float | None = None) -> None:
    """Every leaf of two trees agrees, at the tolerance of its dtype unless told."""
    theirs_flat, structure = jax.tree.flatten(theirs)
    paths = jax.tree_util.tree_flatten_with_path(ours)[0]
    assert jax.tree.structure(ours) == structure
    for (path, leaf), expected in zip(paths, theirs_flat, strict=True):
        allowed = TOLERANCE[str(jnp.asarray(leaf).dtype)] if tolerance is None else tolerance
        error = distance(leaf, expected)
        assert error <= allowed, f"{jax.tree_util.keystr(path)}: {error:.1e} > {allowed:.1e}"


def assert_same(ours, theirs) -> None:
    """Every leaf of two trees agrees to the last bit."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def influence(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> np.ndarray:
    """[T_out, T_in]: the largest |derivative| of a random projection of output row p with respect
    to input row q. `run` maps [1, T_in, D] to [1, T_out, E]."""

    def projected(x):
        y = run(x)
        return y[0] @ draw(99, (y.shape[-1],), dtype=y.dtype)[0]

    return np.abs(np.asarray(jax.jit(jax.jacrev(projected))(x)[:, 0])).max(-1)


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a jaxpr, those of scans, branches and custom rules included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def traced(run: Callable, *args) -> list[JaxprEqn]:
    """All equations of `run(*args)`; nothing is compiled."""
    return list(equations(jax.make_jaxpr(run)(*args).jaxpr))


def largest_array(eqns: list[JaxprEqn]) -> int:
    """Elements of the largest intermediate."""
    return max(var.aval.size for eqn in eqns for var in eqn.outvars)


def temporary_bytes(run: Callable, *args) -> int:
    """Peak memory of the compiled function beside its arguments and results."""
    return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes
