import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import traced

from ttcd_jax.inference.sampling import SamplingConfig, batch_sampler, sample

DRAWS = 8192
LOGITS = np.array([1.5, -0.5, 0.0, 2.0, 0.25, -3.0, 1.0, 0.75, -1.25, 0.5])
SEEN = np.isin(np.arange(10), [1, 3, 6])
TIES = np.array([1.0, 2.0, 1.0, 0.0, 2.0, 1.0])


def _sample(logits, configs, seen=False, index=0):
    """A token per configuration: logits [V] for all of them, or [B, V]."""
    shape = len(configs), np.shape(logits)[-1]
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), shape)
    index = jnp.broadcast_to(jnp.asarray(index, jnp.int32), shape[:1])
    seen = jnp.broadcast_to(jnp.asarray(seen), shape)
    return np.asarray(jax.jit(sample)(logits, batch_sampler(configs), seen, index))


def _many(config, seen=False, logits=LOGITS):
    """Draws that differ in their position in the text only."""
    return _sample(logits, [config] * DRAWS, seen, np.arange(DRAWS))


def _probabilities(config, seen, logits=LOGITS):
    """The distribution by definition, token by token, in float64."""
    scores = np.array(logits, np.float64)
    for token in np.flatnonzero(seen):
        r = config.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    mass = np.exp(scores / config.temperature)
    if config.top_k is not None:
        mass[mass < np.sort(mass)[::-1][: config.top_k].min()] = 0
    mass /= mass.sum()
    kept, reached = [], 0.0
    for token in np.argsort(-mass, kind="stable"):
        if reached < config.top_p:
            kept.append(token)
        reached += mass[token]
    mass[np.setdiff1d(np.arange(mass.size), kept)] = 0
    mass[mass < config.min_p * mass.max()] = 0
    return mass / mass.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1, "temperature": 5.0},
        {"top_k": 4},
        {"top_k": 1000, "temperature": 9.0},
        {"top_k": 10},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "temperature": 1.3},
        {"temperature": 1.8, "top_k": 8, "top_p": 0.85, "min_p": 0.2, "repetition_penalty": 1.2},
    ],
)
def test_frequencies_are_those_of_the_definition(fields):
    config = SamplingConfig(**{"temperature": 1.0, "seed": 3} | fields)
    expected = _probabilities(config, SEEN)
    counts = np.bincount(_many(config, SEEN), minlength=expected.size)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    wanted = DRAWS * expected[possible]
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum()
    freedom = possible.sum() - 1
    # Mean and variance of the statistic are its degrees of freedom and twice that.
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


def test_with_every_setting_off_it_is_the_plain_categorical_draw():
    configs = [SamplingConfig(temperature=1.0, seed=seed) for seed in range(64)]
    keys = [jax.random.fold_in(jax.random.key(seed), 5) for seed in range(64)]
    plain = [jax.random.categorical(key, jnp.asarray(LOGITS, jnp.float32)) for key in keys]
    np.testing.assert_array_equal(_sample(LOGITS, configs, index=5), plain)
    # Sorted, since the last row cuts: the others draw the same.
    mixed = [*configs, SamplingConfig(temperature=1.0, top_k=2)]
    np.testing.assert_array_equal(_sample(LOGITS, mixed, index=5)[:-1], plain)


def test_temperature_zero_and_near_zero_take_the_likeliest_token_and_of_equals_the_first():
    cold = [SamplingConfig(), SamplingConfig(top_p=0.5, min_p=0.1, top_k=3)]
    warm = SamplingConfig(temperature=1.0, top_k=3)
    for configs in (cold, [*cold, warm]):
        assert _sample(TIES, configs)[:2].tolist() == [1, 1]
    tepid = [SamplingConfig(temperature=1e-30, top_k=k) for k in (None, 3)]
    for logits in (LOGITS, 1e4 * LOGITS):
        assert _sample(logits, tepid).tolist() == [3, 3]


EVEN = np.where(np.arange(10) % 2, -np.inf, 0.0)


@pytest.mark.parametrize(
    ("logits", "fields", "drawn"),
    [
        (TIES, {"top_k": 3}, {0, 1, 2, 4, 5}),  # those that tie with the last
        (TIES, {"top_p": 0.7}, {0, 1, 4}),  # two likeliest: 0.6, each other: 0.11
        (EVEN, {"temperature": 2.0}, {0, 2, 4, 6, 8}),
        (EVEN, {"temperature": 2.0, "top_k": 9}, {0, 2, 4, 6, 8}),
    ],
)
def test_what_is_drawn_of_ties_and_of_tokens_without_probability(logits, fields, drawn):
    config = SamplingConfig(**{"temperature": 1.0} | fields)
    assert set(_many(config, logits=logits)) == drawn


def test_seed_and_index_make_the_draw_and_a_row_depends_on_its_own_settings_only():
    rng = np.random.default_rng(0)
    logits, ks = rng.standard_normal((6, 40)), (None, 5) * 3
    configs = [
        SamplingConfig(temperature=0.3 * row, seed=7 * row, top_k=k) for row, k in enumerate(ks)
    ]
    together, order = _sample(logits, configs), rng.permutation(6)
    for row, config in enumerate(configs):
        assert _sample(logits[row], [config]) == together[row]
    moved = _sample(logits[order], [configs[row] for row in order])
    np.testing.assert_array_equal(moved, together[order])
    flat = np.zeros(1000)
    configs = [SamplingConfig(temperature=1.0, seed=seed) for seed in (0, 0, 1, 2**32 - 1)]
    tokens = _sample(flat, configs)
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3
    assert (_sample(flat, configs, index=1) != tokens).all()


def test_the_vocabulary_is_sorted_once():
    sampler = batch_sampler([SamplingConfig()])
    eqns = traced(sample, jnp.ones((1, 8)), sampler, jnp.zeros((1, 8), bool), jnp.zeros(1, int))
    assert [eqn.primitive.name for eqn in eqns].count("sort") == 1


def test_half_precision_logits_are_compared_in_float32():
    logits = jnp.ones((1, 2), jnp.bfloat16)
    sampler = batch_sampler([SamplingConfig(repetition_penalty=1.001)])  # 1 in bfloat16
    seen = jnp.array([[True, False]])
    assert jax.jit(sample)(logits, sampler, seen, jnp.zeros(1, jnp.int32)).tolist() == [1]
