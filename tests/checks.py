"""Tolerances by dtype, comparisons of trees, and the equations of a jaxpr, for many tests."""

import contextlib
import functools
import resource
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn

from ttcd_jax.errors import UserError
from ttcd_jax.precision import Precision


@functools.lru_cache(4096)
def typechecked(function: Callable) -> Callable:
    """beartype, except on constructors: a configuration checks its own fields."""
    return function if function.__name__ == "__init__" else beartype(function)


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
    """Every leaf of two trees agrees, by default at the tolerance of its dtype."""
    theirs_flat, structure = jax.tree.flatten(theirs)
    paths = jax.tree_util.tree_flatten_with_path(ours)[0]
    assert jax.tree.structure(ours) == structure
    for (path, leaf), expected in zip(paths, theirs_flat, strict=True):
        allowed = TOLERANCE[str(jnp.asarray(leaf).dtype)] if tolerance is None else tolerance
        error = distance(leaf, expected)
        assert error <= allowed, f"{jax.tree_util.keystr(path)}: {error:.1e} > {allowed:.1e}"


def assert_same(ours, theirs, **options) -> None:
    """Every leaf of two trees agrees to the last bit; if `strict`, in its dtype too."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, **options), ours, theirs)


def bits(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple]:
    """What two checkpoints must share to be the same to the last bit."""
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


def influence(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> np.ndarray:
    """[B, T_out, B, T_in]: the largest |derivative| of a random projection of an output token with
    respect to an input token. `run` maps [B, T_in, D] to [B, T_out, E]."""

    def projected(x):
        y = run(x)
        return y @ draw(99, (y.shape[-1],), dtype=y.dtype)[0]

    return np.abs(np.asarray(jax.jit(jax.jacrev(projected))(x))).max(-1)


# Two rows: one document, and several (at any position, one of a single token).
TWO_ROWS = np.stack([np.zeros(14, np.int32), np.repeat([5, 2, 9, 1], [2, 1, 8, 3])])


def may_see(ids: np.ndarray, window: int | None = None) -> np.ndarray:
    """[B, T, B, T]: whether a token may depend on one: of its row and document, in the window."""
    B, T = ids.shape
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    near = (distance >= 0) & (distance < (window or T))
    visible = np.zeros((B, T, B, T), bool)
    for row in range(B):
        visible[row, :, row] = near & (ids[row][:, None] == ids[row][None, :])
    return visible


def after_chunk(length: int, size: int) -> np.ndarray:
    """[T, 1, T]: whether a token's chunk comes after another's, of chunks of `size` tokens."""
    chunk = np.arange(length) // size
    return chunk[:, None, None] > chunk


def refused(words: str, call: Callable, *args, error: type = UserError, **options) -> str:
    """The error that `call` raises: one line that has all words (divided by |)."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words.split("|")), message
    return message


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limits the size of the files that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
    """Peak bytes of the compiled function without its arguments and results."""
    return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes


def randomize(build: Callable, *args, std: float = 0.5, **options):
    """The result of `build(*args, **options, rngs=...)`, every parameter drawn from N(0, std^2), so
    that none is zero or one. Its initialization is only traced: computing it takes seconds."""
    module = nnx.eval_shape(lambda: build(*args, **options, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    state = nnx.state(module, nnx.Param)
    nnx.update(
        module,
        jax.tree.map(lambda x: jnp.asarray(std * rng.standard_normal(x.shape), x.dtype), state),
    )
    return module


logits_of = nnx.jit(lambda model, tokens: model(tokens))  # a model op by op is far slower


def with_gradients(run: Callable, *args):
    """(`run(*args)`, gradients of a weighted sum of all its arrays with respect to each of `args`),
    compiled as one."""

    def weights(x):
        return jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)

    @jax.jit
    def evaluate(*args):
        value, pull = jax.vjp(run, *args)
        return value, pull(jax.tree.map(weights, value))

    return evaluate(*args)


def value_and_gradients(module: nnx.Module, run: Callable, *args):
    """`with_gradients` of `run(module, *args)`: (value, gradients of the parameters, of `args`)."""
    graph, params = nnx.split(module)
    value, (d_params, *d_args) = with_gradients(
        lambda params, *args: run(nnx.merge(graph, params), *args), params, *args
    )
    return value, nnx.to_pure_dict(d_params), d_args


def dot_operand_types(eqns: list[JaxprEqn]) -> set[str]:
    """The dtypes of all operands of all matrix products."""
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert products
    return {str(x.aval.dtype) for eqn in products for x in eqn.invars}


def assert_narrow(
    build: Callable[[Precision], nnx.Module], run: Callable, *shapes: tuple[int, ...], bound: float
) -> None:
    """`run(module, *inputs)` in bfloat16, with inputs of these shapes: all matrix products of value
    and gradients have bfloat16 operands, and the results are those of float32 within `bound`."""
    narrow, wide = (build(Precision(compute=compute)) for compute in ("bfloat16", "float32"))
    inputs = draw(1, *shapes, dtype=jnp.bfloat16)
    graph, params = nnx.split(narrow)

    def loss(params, *inputs):
        return run(nnx.merge(graph, params), *inputs).astype(jnp.float32).sum()

    gradient = jax.grad(loss, argnums=range(1 + len(inputs)))
    assert dot_operand_types(traced(gradient, params, *inputs)) == {"bfloat16"}
    ours = value_and_gradients(narrow, run, *inputs)
    assert ours[0].dtype == jnp.bfloat16
    wide_inputs = (x.astype(jnp.float32) for x in inputs)
    assert_close(ours, value_and_gradients(wide, run, *wide_inputs), bound)
