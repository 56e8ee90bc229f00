"""Proposition 1 through our own layer: its premises, its bound, how it fails; the command."""

import functools
import json

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, distance

from experiments.studies import proposition
from experiments.studies.proposition import FIRST, SAID, Measured, build_block, read
from ttcd_jax.methods.ideal import IdealMemoryConfig
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.row import Row

CONFIG, FILLERS = IdealMemoryConfig(chunk_size=4, eta=0.3), 16
SECOND = FIRST + 1 + FILLERS
DRAWS = 24


def _draw(fillers=FILLERS, overlap=0.0):
    rng = np.random.default_rng(0)
    return proposition.draw_weights(rng), proposition.draw_sequence(fillers, rng, overlap)


def _measure(config, *drawn):
    """`measure` of one draw, numpy scalars."""
    one = jax.tree.map(lambda x: x[None], drawn)
    return Measured(*(x[0] for x in jax.device_get(proposition.measure_all(config, *one))))


@functools.partial(jax.jit, static_argnums=0)
def _views(config, weights, row):
    """(features, y) [T, X] of teacher and of student, all through the weight of q1's chunk."""
    block = build_block(config, weights)
    x, t = block.inputs("mlp", row, Row.of(row))
    chunk = FIRST // config.chunk_size
    return [(block.mlp.features(h)[0], read(block.mlp, x, t, chunk, h[0])) for h in (x, t)]


def _numpy_sides(config, weights, row):
    """(left, right, right through W_base) from the features by the equations as written."""
    (z_teacher, _), (z_student, _) = _views(config, weights, row)
    z_teacher, z_student = np.asarray(z_teacher), np.asarray(z_student)
    size, first, second = config.chunk_size, FIRST, row.shape[1] - 1
    running = [weights["down"]]
    for start in range(0, second // size * size, size):
        t, s = z_teacher[start : start + size], z_student[start : start + size]
        delta = config.eta * s.T @ (t @ running[-1] - s @ running[-1]) / size
        running.append(running[-1] + delta)
    before, after = running[first // size], running[second // size]
    rights = []
    for weight in (before, running[0]):
        taught, seen = z_teacher[first] @ weight, z_student[first] @ weight
        alignment = z_student[first] @ z_student[second]
        rights.append(config.eta / size * taught @ (taught - seen) * alignment)
    left = z_teacher[first] @ before @ (z_student[second] @ (after - before))
    return left, *rights


def test_the_span_is_seen_by_the_teacher_of_q1_alone(float64):
    weights, row = _draw()
    (_, taught), (_, seen) = _views(CONFIG, weights, row)
    queries = np.array([FIRST, SECOND])
    for position in range(proposition.SPAN.stop):
        other = row.copy()
        other[:, position, SAID] = np.random.default_rng(1).standard_normal(8)
        (_, teacher), (_, student) = _views(CONFIG, weights, other)
        assert distance(teacher[FIRST], taught[FIRST]) > 0.1
        assert_same(student[queries], seen[queries])


def test_a_read_is_what_the_block_does(float64):
    @jax.jit
    def both(weights, row):
        block = build_block(CONFIG, weights)
        x, t = block.inputs("mlp", row, Row.of(row))
        ours = [
            read(block.mlp, x, t, position // CONFIG.chunk_size, x[:, position])[0]
            for position in (FIRST, SECOND)
        ]
        normed = rms_norm(row, block.mixer_norm[...], block.config.mixer.dims.norm_eps)
        return jnp.stack(ours), (block(row) - row - block.mixer(normed)[0])[0]

    ours, outputs = both(*_draw())
    assert_close(ours, outputs[np.array([FIRST, SECOND])])


@pytest.mark.parametrize(
    ("changes", "overlap"),
    [({}, 0.0), ({}, 0.7), ({"chunk_size": 1}, 0.0), ({"chunk_size": 8, "eta": 0.1}, 0.3)],
)
def test_both_sides_follow_their_equations(changes, overlap, float64):
    """The gap is that of the running weight. With chunks of one token three updates precede q1, of
    tokens after the span, which hear it in part: a gap through W_base is another bound."""
    config, drawn = CONFIG.replace(**changes), _draw(overlap=overlap)
    measured = _measure(config, *drawn)
    left, right, base = _numpy_sides(config, *drawn)
    assert_close(measured.left, jnp.asarray(left), 1e-10)
    assert_close(measured.right, jnp.asarray(right), 1e-10)
    assert (abs(base / right - 1) > 1e-3) == (config.chunk_size == 1)


def test_one_contradicting_key_breaks_the_bound(float64):
    """A filler whose key is q2's, and whose teacher alone hears the opposite of the fact."""
    weights, row = _draw()
    yes, no = np.split(np.arange(*proposition.GROUPS[-1][1].indices(100)), 2)
    for name in ("gate", "up"):
        weights[name][proposition.HEARD, no] = -weights[name][proposition.HEARD, yes]
    weights["down"][no] = -weights["down"][yes]  # to hear -fact is to say the opposite
    rogue = FIRST + 13
    row[:, FIRST + 1 : SECOND, SAID] = 0
    row[:, rogue - 7 : rogue - 3, SAID] = -row[:, :1, SAID]
    quiet = _measure(CONFIG, weights, row)
    assert quiet.left == pytest.approx(quiet.right, rel=1e-10)
    row[:, rogue, proposition.QUERY] = row[:, SECOND, proposition.QUERY]
    row[:, rogue, proposition.FILLER] = 0
    broken = _measure(CONFIG, weights, row)
    assert broken.gap > 0
    assert broken.right == pytest.approx(quiet.right, rel=1e-10)
    assert broken.left < 0.5 * broken.right


@pytest.mark.parametrize(("tolerance", "status"), [(1e-10, 0), (-1.0, 1)])
def test_the_command_writes_its_numbers_and_a_bound_that_fails_is_exit_status_1(
    tolerance, status, tmp_path
):
    """Asked for twice the right side, no equality will do."""
    program, file = tmp_path / "program.py", tmp_path / "new" / "x.jsonl"
    program.write_text(
        "from ttcd_jax.commands import cli\n"
        "from experiments.studies import proposition\n"
        "proposition.CHUNK_SIZES, proposition.NUM_FILLERS = (4, 1), (8,)\n"
        f"proposition.TOLERANCE = {tolerance}\n"
        "cli.run(proposition.main)\n"
    )
    result = commands.run(program, "--num_draws=6", f"--records={file}")
    assert (result.returncode, result.stderr) == (status, "")
    verdict = ("held in every", "FAILED in an")[status]
    assert f"the bound {verdict} orthogonal case" in result.stdout
    head, calm, *disturbed, single = map(json.loads, file.read_text().splitlines())
    assert (head["seeds"], head["on"]) == ([0], "6 draws a setting, float64")
    for row, size in ((calm, 4), (single, 1)):
        assert row["row"] == f"chunks of {size}, 8 between, overlap 0.0"
        assert (row["rate"], row["draws"]) == (0.3 / size, 6)
        assert (row["overlap"], row["key_cosine"], row["below_bound"]) == (0, 0, status)
        assert row["max_|ratio-1|"] < 1e-10
    cosines = [row["key_cosine"] for row in disturbed]
    assert 0 < cosines[0] < cosines[2] == sorted(cosines)[2]
    assert min(row["below_bound"] for row in disturbed[2:]) > 0.1
