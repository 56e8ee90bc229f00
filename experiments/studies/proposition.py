"""Proposition 1: how a fact that only the teacher saw affects a later query.

    python -m experiments.proposition [--records=FILE] [--num_draws=200] [--seed=0]

A span is inside the teacher's and outside the student's window of a query q1 (chunk i1). A later
query q2 (chunk i2) has a key like q1's. With features z(T), z(S) of teacher and student, y = z W_i1
for q1 and delta_y_q2(S) = z_q2(S) (W_i2 - W_i1), the paper proves: if every other key between is
orthogonal to z_q2(S), y_q1(T) . (y_q1(T) - y_q1(S)) >= c_gap and z_q1(S) . z_q2(S) >= c_align > 0,

    y_q1(T) . delta_y_q2(S) >= rate * c_gap * c_align,    rate = eta / L,

since the update is eta times the mean over a chunk of L tokens; at the realised gap and alignment
it is an equality. Random blocks with the ideal memory read random rows in float64, with orthogonal
keys and, in chunks of one token, others. Exit status 1 if an orthogonal case breaks it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from ttcd_kernels.table import format_table

from ttcd_jax import Block, Precision
from ttcd_jax.commands import cli
from ttcd_jax.errors import UserError
from ttcd_jax.measure.page import Section
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.row import Row
from ttcd_jax.run.page import write_records

FLAGS = flags.FLAGS
flags.DEFINE_string("records", None, "Write a JSON line per row, for the tables of pages.")
flags.DEFINE_integer("seed", 0, "Of blocks and sequences.", lower_bound=0)
flags.DEFINE_integer("num_draws", 200, "Blocks and sequences per setting.", lower_bound=1)

CHUNK_SIZES, NUM_FILLERS, ETA = (1, 4, 16), (16, 64, 256), 0.3

# The hidden state is four subspaces: a query's direction, a filler's, a token's value for attention
# (said), and attention's output (heard). Three groups of features read one subspace each:
# (subspace, features, size of their outputs). HEARD weighs more, so that the gap is positive.
SIZE, DIM, NUM_HEADS = 8, 32, 2
QUERY, FILLER, SAID, HEARD = (slice(i, i + SIZE) for i in range(0, DIM, SIZE))
GROUPS = ((QUERY, slice(0, 8), 0.2), (FILLER, slice(8, 16), 0.2), (HEARD, slice(16, 24), 1.0))
WINDOW, STUDENT_WINDOW, SPAN = 8, 4, slice(0, 4)  # which ends where q1's student window begins
FIRST = WINDOW - 1  # q1, the last token whose teacher window holds the whole span; q2 ends the row
OVERLAPS, TOLERANCE = (0.0, 0.1, 0.3, 0.5, 0.75, 1.0), 1e-10  # of the bound in float64, relative


class Measured(NamedTuple):
    """Both sides of the proposition and their factors: jax scalars, or numpy arrays [draws]."""

    gap: Any  # through the running weight W_i1
    alignment: Any
    left: Any
    right: Any  # rate * gap * alignment
    overlap: Any  # mean |cosine| of q2's key with the other keys of chunks i1 .. i2 - 1


def read(mlp: Any, x: jax.Array, t: jax.Array, chunk: int, probes: jax.Array) -> jax.Array:
    """features(probe) W_chunk [P, D], computed by the layer for a row x, t [1, T, D]: each probe
    follows the row's first `chunk` chunks, as the first token of the next."""
    past = (len(probes), chunk * mlp.settings.chunk_size, DIM)
    rows = (jnp.broadcast_to(h[:, : past[1]], past) for h in (x, t))
    return mlp(*(jnp.concatenate([row, probes[:, None]], axis=1) for row in rows))[:, -1]


def measure(block: Any, h: jax.Array) -> Measured:
    """Both sides for the queries q1 and q2 of a row [1, T, D]."""
    mlp, size, second = block.mlp, block.mlp.settings.chunk_size, h.shape[1] - 1
    start, end = FIRST // size, second // size
    x, t = block.inputs("mlp", h, Row.of(h))
    probes = jnp.stack([x[0, FIRST], t[0, FIRST], t[0, second]])
    teacher, student, before = read(mlp, x, t, start, probes)
    (after,) = read(mlp, x, t, end, t[:, second])
    keys = mlp.features(t)[0]
    gap, alignment = teacher @ (teacher - student), keys[FIRST] @ keys[second]
    between = np.setdiff1d(np.arange(start * size, end * size), FIRST)
    unit = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
    overlap = jnp.abs(unit[between] @ unit[second]).sum() / max(len(between), 1)
    right = mlp.settings.eta / size * gap * alignment
    return Measured(gap, alignment, teacher @ (after - before), right, overlap)


def draw_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inside the subspaces and zero between them; values copy SAID to HEARD. Gate and up are
    equal, so that features u^2 sigmoid(u) are never negative, and zero in a group whose subspace is
    empty: keys of different subspaces are orthogonal."""
    value, out = np.zeros((DIM, SIZE)), np.zeros((NUM_HEADS * SIZE, DIM))
    gate, down = np.zeros((DIM, 24)), np.zeros((24, DIM))
    draws = (rng.standard_normal((SIZE, SIZE)) for _ in range(1 + NUM_HEADS))
    value[SAID], *rotations = (np.linalg.qr(x)[0] for x in draws)
    out[:, HEARD] = np.concatenate(rotations)
    for subspace, features, size in GROUPS:
        gate[subspace, features] = 0.35 * _unit(rng.standard_normal((SIZE, 8)), axis=0)
        down[features] = size * _unit(rng.standard_normal((8, DIM)))
    query, key = (0.1 * rng.standard_normal((DIM, heads * SIZE)) for heads in (NUM_HEADS, 1))
    attention = {"query": query, "key": key, "value": value, "out": out}
    return attention | {"gate": gate, "up": gate, "down": down}


def build_block(memory: IdealMemoryConfig, weights: dict[str, Any]) -> Block:
    """A block with this memory and the weights of `draw_weights`; its norms stay at one."""
    model: Any = {"vocab_size": 1, "dim": DIM, "num_layers": 1, "mlp_dim": 24, "head_dim": SIZE}
    model |= {"num_heads": NUM_HEADS, "num_kv_heads": 1, "memory": memory, "fast_layers": (0,)}
    model |= {"method": "ipttcd_ideal", "window": WINDOW, "student_window": STUDENT_WINDOW}
    model |= {"precision": Precision(param="float64", compute="float64", state="float64")}
    block = Block(block_configs(TransformerConfig(**model))[0], rngs=nnx.Rngs(0))
    for name, value in weights.items():
        owner = block.mixer if hasattr(block.mixer, name) else block.mlp
        getattr(owner, name)[...] = jnp.asarray(value)
    return block


def draw_sequence(num_fillers: int, rng: np.random.Generator, overlap: float = 0.0) -> np.ndarray:
    """A row [1, T, D]: one fact in the span, q1 and q2 of similar directions, and between them
    fillers with random values, but for those in q2's student window, which cause their errors.
    `overlap` is the part of a filler's direction along q2's; at 0 its key is orthogonal to q2's."""
    second = FIRST + 1 + num_fillers
    asked, other, fact = _unit(rng.standard_normal((3, SIZE)))
    angle = rng.uniform(0, np.pi / 3)
    again = np.cos(angle) * asked + np.sin(angle) * _unit(other - other @ asked * asked)
    talking = slice(FIRST + 1, max(FIRST + 1, second - STUDENT_WINDOW + 1))
    tokens = np.zeros((second + 1, DIM))
    tokens[:, FILLER] = _unit(rng.standard_normal((second + 1, SIZE)))
    tokens[FIRST:, FILLER] *= np.sqrt(1 - overlap**2)
    tokens[FIRST:, QUERY] = overlap * again
    tokens[SPAN, SAID] = fact
    tokens[talking, SAID] = _unit(rng.standard_normal((second + 1, SIZE)))[talking]
    tokens[[FIRST, second]] = 0.0
    tokens[FIRST, QUERY], tokens[second, QUERY] = asked, again
    return tokens[None]


def _unit(x: np.ndarray, axis: int = -1) -> np.ndarray:
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


def draw(memory: IdealMemoryConfig, fillers: int, overlap: float, seed: int, n: int) -> Measured:
    """`measure` of those of n random blocks and rows with a gap and alignment above 0, in x64."""
    rngs = [np.random.default_rng([seed, number]) for number in range(n)]
    drawn = [(draw_weights(rng), draw_sequence(fillers, rng, overlap)) for rng in rngs]
    found = jax.device_get(measure_all(memory, *jax.tree.map(lambda *x: np.stack(x), *drawn)))
    is_met = (found.gap > 0) & (found.alignment > 0)
    if not is_met.any():
        raise UserError(f"no draw of {n} has a gap and alignment above 0: use more draws")
    return Measured(*(values[is_met] for values in found))


@jax.jit(static_argnums=0)
def measure_all(memory: IdealMemoryConfig, weights: dict[str, Any], rows: jax.Array) -> Measured:
    """`measure` of blocks (weights stacked) and rows [N, 1, T, D], compiled once by shape."""
    return jax.vmap(lambda each, row: measure(build_block(memory, each), row))(weights, rows)


def summary(measured: Measured) -> dict[str, Any]:
    """Quantiles of the ratio left / right over the draws, and the shares of draws below the bound
    (1, up to rounding) and below 0 (moved away from the teacher)."""
    ratio = measured.left / measured.right
    is_below = measured.left < measured.right - TOLERANCE * np.abs(measured.right)
    found = {"min_gap": measured.gap.min(), "min_alignment": measured.alignment.min()}
    found |= {"key_cosine": measured.overlap.mean(), "max_|ratio-1|": np.abs(ratio - 1).max()}
    found |= {f"ratio_{share}%": np.percentile(ratio, share) for share in (5, 50, 95)}
    found |= {"below_bound": is_below.mean(), "below_0": (ratio < 0).mean()}
    return {"draws": len(ratio)} | {name: float(value) for name, value in found.items()}


def main(argv: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    rows, (size, *others) = [], CHUNK_SIZES
    cases = [(size, n, overlap) for n in NUM_FILLERS for overlap in OVERLAPS]
    for size, n, overlap in [*cases, *((size, NUM_FILLERS[0], 0.0) for size in others)]:
        memory = IdealMemoryConfig(chunk_size=size, eta=ETA)
        row = {"setting": f"chunks of {size}, {n} between, overlap {overlap}"}
        row |= {"rate": memory.eta / size, "overlap": overlap}
        rows.append(row | summary(draw(memory, n, overlap, FLAGS.seed, FLAGS.num_draws)))
    print(format_table(rows))
    is_held = not any(row["below_bound"] for row in rows if not row["overlap"])
    verdict = "held in every" if is_held else "FAILED in an"
    print(f"\nthe bound {verdict} orthogonal case")
    if FLAGS.records is not None:
        command, on = cli.command_line("proposition"), f"{FLAGS.num_draws} draws a setting, float64"
        sections, facts = [Section("Proposition 1", rows)], {"seeds": [FLAGS.seed], "on": on}
        write_records(FLAGS.records, sections, (), command, **facts)
    raise SystemExit(int(not is_held))


if __name__ == "__main__":
    cli.run(main)
