"""Proposition 1 on real sequences: how a fact that only the teacher saw affects a later query.

A context span is inside the teacher's and outside the student's window of a query q1 (chunk i1).
A later query q2 (chunk i2 > i1) has a key like q1's. With z(T), z(S) the features of teacher and
student, y(.) = z(.) W_i1 for q1 and delta_y_q2(S) = z_q2(S) (W_i2 - W_i1), the paper proves: if

    y_q1(T) . (y_q1(T) - y_q1(S)) >= c_gap,    z_q1(S) . z_q2(S) >= c_align > 0,

and every other key written between is orthogonal to z_q2(S), then

    y_q1(T) . delta_y_q2(S) >= rate * c_gap * c_align.

The update is eta times the *mean* over a chunk, so rate = eta / chunk_size; it is the paper's eta
where a chunk is one token. All other terms of the update vanish, so the bound is an equality at the
realised gap and alignment. `measure` takes any block with an ideal memory and any two positions;
`draw_weights` and `draw_sequence` satisfy the conditions by construction.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.config import Config, NonNegative, Positive, PositiveFloat
from ttcd_jax.errors import NonFiniteError, UserError
from ttcd_jax.methods.ideal import IdealMemoryConfig, IdealMLP
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import Block, BlockConfig
from ttcd_jax.nn.row import Row
from ttcd_jax.precision import Precision

# The bound is an equality of real numbers; float32 (and so jax without x64) would blur it.
FLOAT64 = Precision(param="float64", compute="float64", state="float64")

# The hidden state is four subspaces of this size: a query's direction, a filler's, a token's value
# for attention (said), and attention's output (heard).
SUBSPACE = 8
DIM = 4 * SUBSPACE
QUERY, FILLER, SAID, HEARD = (slice(i * SUBSPACE, (i + 1) * SUBSPACE) for i in range(4))
# Features in three groups, each reading one subspace: (subspace, features, size of their outputs).
# HEARD weighs more than QUERY, so that the gap is positive.
GROUP = 8
GROUPS = (
    (QUERY, slice(0, GROUP), 0.2),
    (FILLER, slice(GROUP, 2 * GROUP), 0.2),
    (HEARD, slice(2 * GROUP, 3 * GROUP), 1.0),
)
WINDOW, STUDENT_WINDOW = 8, 4
SPAN = slice(0, WINDOW - STUDENT_WINDOW)  # ends where q1's student window begins
FIRST = WINDOW - 1  # q1, the last token whose teacher window holds the whole span
GATE_SIZE = 0.35
NUM_HEADS = 2
MAX_ANGLE = math.pi / 3  # between the two queries
TOLERANCE = 1e-10  # relative, of the bound in float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PropositionConfig(Config):
    """A row: SPAN, q1 at FIRST, `num_fillers` tokens, q2."""

    chunk_size: Positive = 4
    num_fillers: NonNegative = 16
    eta: PositiveFloat = 0.3

    @property
    def second(self) -> int:
        return FIRST + 1 + self.num_fillers

    @property
    def rate(self) -> float:
        """The factor of one token's error: the update is eta times the mean over the chunk."""
        return self.eta / self.chunk_size

    def block(self) -> BlockConfig:
        model = TransformerConfig(
            vocab_size=1,
            dim=DIM,
            num_layers=1,
            num_heads=NUM_HEADS,
            num_kv_heads=1,
            head_dim=SUBSPACE,
            mlp_dim=len(GROUPS) * GROUP,
            window=WINDOW,
            student_window=STUDENT_WINDOW,
            method="ipttcd_ideal",
            fast_layers=(0,),
            memory=IdealMemoryConfig(chunk_size=self.chunk_size, eta=self.eta),
            precision=FLOAT64,
        )
        return block_configs(model)[0]


class Measured(NamedTuple):
    """Both sides of the proposition and their factors: jax scalars, or numpy arrays [draws]."""

    gap: Any  # y_q1(T) . (y_q1(T) - y_q1(S)), through the running weight W_i1
    alignment: Any  # z_q1(S) . z_q2(S)
    left: Any  # y_q1(T) . delta_y_q2(S)
    right: Any  # rate * gap * alignment
    overlap: Any  # mean |cosine| of q2's key with the other keys of chunks i1 .. i2 - 1


def read(
    mlp: IdealMLP,
    x: Float[Array, "1 T D"],
    t: Float[Array, "1 T D"],
    chunk: int,
    probes: Float[Array, "P D"],
) -> Float[Array, "P D"]:
    """features(probe) W_chunk, computed by the layer: each probe follows the row's first `chunk`
    chunks, as the first token of the next."""
    prefix = chunk * mlp.settings.chunk_size

    def rows(h: jax.Array) -> jax.Array:
        past = jnp.broadcast_to(h[:, :prefix], (len(probes), prefix, h.shape[-1]))
        return jnp.concatenate([past, probes[:, None]], axis=1)

    return mlp(rows(x), rows(t))[:, -1]


def measure(block: Block, h: Float[Array, "1 T D"], first: int, second: int) -> Measured:
    """Both sides for the queries at positions `first` and `second` of one row."""
    mlp: Any = block.mlp
    size = mlp.settings.chunk_size
    start, end = first // size, second // size
    x, t = block.inputs("mlp", h, Row.of(h))
    assert t is not None
    probes = jnp.stack([x[0, first], t[0, first], t[0, second]])
    teacher, student, before = read(mlp, x, t, start, probes)
    (after,) = read(mlp, x, t, end, t[:, second])
    keys = mlp.features(t)[0]
    gap, alignment = teacher @ (teacher - student), keys[first] @ keys[second]
    between = np.setdiff1d(np.arange(start * size, end * size), first)
    unit = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    cosines = jnp.abs(unit[between] @ unit[second])
    return Measured(
        gap=gap,
        alignment=alignment,
        left=teacher @ (after - before),
        right=mlp.settings.eta / size * gap * alignment,
        overlap=cosines.sum() / max(len(between), 1),
    )


def draw_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights for `build_block`, random inside the subspaces and zero between them.

    Attention scores read all subspaces, values copy SAID to HEARD. Gate and up projections are
    equal, so that features u^2 sigmoid(u) are never negative, and exactly zero in a group whose
    subspace is empty: keys of different subspaces are orthogonal.
    """
    value, out = np.zeros((DIM, SUBSPACE)), np.zeros((NUM_HEADS * SUBSPACE, DIM))
    gate, down = np.zeros((DIM, len(GROUPS) * GROUP)), np.zeros((len(GROUPS) * GROUP, DIM))
    value[SAID] = _rotation(rng)
    out[:, HEARD] = np.concatenate([_rotation(rng) for _ in range(NUM_HEADS)])
    for subspace, features, output_size in GROUPS:
        gate[subspace, features] = GATE_SIZE * _unit(rng.standard_normal((SUBSPACE, GROUP)), axis=0)
        down[features] = output_size * _unit(rng.standard_normal((GROUP, DIM)))
    query = 0.1 * rng.standard_normal((DIM, NUM_HEADS * SUBSPACE))
    key = 0.1 * rng.standard_normal((DIM, SUBSPACE))
    attention = {"query": query, "key": key, "value": value, "out": out}
    return attention | {"gate": gate, "up": gate, "down": down}


def build_block(config: PropositionConfig, weights: Mapping[str, Any]) -> Block:
    """The block of `config` with the weights of `draw_weights`; its norms stay at one."""
    block = Block(config.block(), rngs=nnx.Rngs(0))
    for name, value in weights.items():
        owner = block.mixer if hasattr(block.mixer, name) else block.mlp
        getattr(owner, name)[...] = jnp.asarray(value)
    return block


def draw_sequence(
    config: PropositionConfig, rng: np.random.Generator, overlap: float = 0.0
) -> np.ndarray:
    """A row h [1, T, D]: one fact in the span, and queries q1 and q2 of similar directions.

    Fillers between the queries have random directions in SAID, which cause their errors; the last
    STUDENT_WINDOW - 1 have zeros, so that q2's student window reads nothing. `overlap` in [0, 1] is
    the component of a filler's direction along q2's; at 0 every key but q1's is orthogonal to
    q2's.
    """
    first, second = FIRST, config.second
    asked, other, fact = _unit(rng.standard_normal((3, SUBSPACE)))
    other = _unit(other - other @ asked * asked)
    angle = rng.uniform(0, MAX_ANGLE)
    again = np.cos(angle) * asked + np.sin(angle) * other
    between = slice(first + 1, second)
    talking = slice(first + 1, max(first + 1, second - STUDENT_WINDOW + 1))
    tokens = np.zeros((second + 1, DIM))
    tokens[:, FILLER] = _unit(rng.standard_normal((second + 1, SUBSPACE)))
    tokens[between, FILLER] *= np.sqrt(1 - overlap**2)
    tokens[between, QUERY] = overlap * again
    tokens[SPAN, SAID] = fact
    tokens[talking, SAID] = _unit(rng.standard_normal((second + 1, SUBSPACE)))[talking]
    for position, direction in ((first, asked), (second, again)):
        tokens[position] = 0.0
        tokens[position, QUERY] = direction
    return tokens[None]


def _unit(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


def _rotation(rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((SUBSPACE, SUBSPACE)))[0]


def sweep(
    config: PropositionConfig, *, seed: int, num_draws: int, overlap: float = 0.0
) -> Measured:
    """`measure` of the draws, among `num_draws` random blocks and sequences, with the positive gap
    and alignment that the proposition requires; arrays [draws left]. Call it with x64 enabled.

    Raises `UserError` when q2 is in the chunk of q1 or no draw is left, `NonFiniteError` when the
    memory diverges.
    """
    if FIRST // config.chunk_size == config.second // config.chunk_size:
        raise UserError(
            f"q1 at {FIRST} and q2 at {config.second} share a chunk of {config.chunk_size} "
            "tokens: use more fillers or smaller chunks"
        )
    rngs = [np.random.default_rng([seed, draw]) for draw in range(num_draws)]
    draws = [(draw_weights(rng), draw_sequence(config, rng, overlap)) for rng in rngs]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *draws)
    measured = jax.device_get(measure_all(config, *stacked))
    if not np.isfinite(measured).all():
        raise NonFiniteError(
            f"eta {config.eta} with chunks of {config.chunk_size} diverges: lower eta"
        )
    is_met = (measured.gap > 0) & (measured.alignment > 0)
    if not is_met.any():
        raise UserError(
            f"none of {num_draws} draws has a positive gap and alignment: use more draws"
        )
    return Measured(*(values[is_met] for values in measured))


@functools.partial(jax.jit, static_argnums=0)
def measure_all(
    config: PropositionConfig, weights: dict[str, jax.Array], rows: Float[Array, "N 1 T D"]
) -> Measured:
    """`measure` of N blocks (weights stacked) and rows, compiled once per configuration."""

    def one(weights: dict[str, jax.Array], row: jax.Array) -> Measured:
        return measure(build_block(config, weights), row, FIRST, config.second)

    return jax.vmap(one)(weights, rows)


def holds(measured: Measured) -> np.ndarray:
    """Where the left side reaches the right side, up to rounding."""
    return np.asarray(measured.left >= measured.right - TOLERANCE * np.abs(measured.right))


def equality_summary(config: PropositionConfig, measured: Measured) -> dict[str, Any]:
    """The rate, the smallest gap and alignment, and the largest distance of the two sides."""
    return {
        "chunk_size": config.chunk_size,
        "rate": config.rate,
        "draws": len(measured.gap),
        "min_gap": float(measured.gap.min()),
        "min_alignment": float(measured.alignment.min()),
        "max_key_cosine": float(measured.overlap.max()),
        "max_|left/right-1|": float(np.abs(measured.left / measured.right - 1).max()),
        "held": bool(holds(measured).all()),
    }


def ratio_summary(measured: Measured) -> dict[str, Any]:
    """Quantiles of left / right over the draws, and the shares of draws below the bound (1) and
    below 0 (moved away from the teacher)."""
    ratio = measured.left / measured.right
    return {
        "draws": len(ratio),
        "key_cosine": float(measured.overlap.mean()),
        **{f"ratio_{share}%": float(np.percentile(ratio, share)) for share in (5, 50, 95)},
        "below_bound": float(1 - holds(measured).mean()),
        "below_0": float((ratio < 0).mean()),
    }
