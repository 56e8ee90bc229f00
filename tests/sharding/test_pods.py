"""The steps of the flagship recipes, compiled for described pods: what they exchange, and when."""

import collections
import itertools
import re

import jax
import pytest
from devices import elsewhere
from small_models import recipe

from ttcd_jax.commands import plan
from ttcd_jax.run.described import described_devices, missing_compiler
from ttcd_jax.train.hardware import HARDWARE
from ttcd_jax.train.state import abstract_params

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
LENGTH = 32_768
# Two units, scanned, of a layer with a memory and one without: all kinds of layers there are.
LAYERS = ("TransformerConfig.num_layers=4", "TransformerConfig.fast_layers=(0, 2)")
# The share of the bytes that are sent while something is computed, at least, in these programs:
# the 340M recipe on 8 waits for a unit's parameters, the 760M recipe on 64 for the sums of the
# gradients of the layers' matrices among its copies.
BESIDE_WORK = {"all-gather": 0.82, "reduce-scatter": 0.99, "all-to-all": 0.99}
BESIDE_WORK |= {"collective-permute": 0.85, "all-reduce": 0.65}


def steps(cases):
    """Of each (recipe, number of H100s, length of a row): the shapes of the parameters, sizes of
    the mesh, and the collectives of a step."""
    found = []
    for name, count, length in cases:
        config = recipe(name, *LAYERS, f"RecordsConfig.seq_len={length}")
        h100 = HARDWARE["H100"]
        target = plan.Target(h100, described_devices(h100, count))
        # A program that was compiled by an earlier run of the suite is not compiled again.
        config, mesh, (_, sent, _) = plan.plan_of(config, target)
        shapes = [x.shape for x in jax.tree.leaves(abstract_params(config.model))]
        found.append((shapes, dict(mesh.shape), sent))
    return found


def _by_kind(sent, is_counted=lambda one: True):
    total = collections.Counter()
    for one in filter(is_counted, sent):
        total[one.kind] += one.times * one.sent
    return total


def _arrays(one):
    return [
        [int(x) for x in dims.split(",") if x] for dims in re.findall(r"\[([\d,]*)\]", one.array)
    ]


def _check(name, count, length, shapes, sizes, sent):
    tokens = length // sizes["seq"]
    weights = {tuple(sorted(x)) for shape in shapes for x in (shape, shape[1:])}
    vocab, dim = next(shape for shape in shapes if max(shape) == shape[0] > 100_000)
    # The embedding: gathered once in two bytes; what returns of it is float32, once a part.
    gathered = [x for x in sent if x.kind == "all-gather"]
    assert [(x.array, x.times) for x in gathered if [vocab, dim] in _arrays(x)] == [
        (f"bf16[{vocab},{dim}]", 1)
    ]
    parts = recipe(name).batch_size // (sizes["data"] * sizes["fsdp"])
    own = dim // (sizes["fsdp"] * sizes["seq"])
    returned = {(x.kind, x.array): x.times for x in sent if vocab in itertools.chain(*_arrays(x))}
    del returned["all-gather", f"bf16[{vocab},{dim}]"]
    expected = {("reduce-scatter", f"f32[{vocab},{own}]"): parts}
    expected |= {("all-reduce", f"f32[{vocab},{own}]"): parts} if sizes["data"] > 1 else {}
    assert returned == expected
    # What is gathered are parameters, and nothing that is sent has an axis of tokens.
    for one in gathered:
        assert all(tuple(sorted(dims)) in weights for dims in _arrays(one)), one
    for one in sent:
        for dims in _arrays(one):
            assert len(dims) < 2 or not any(size % tokens == 0 for size in dims), one
    total = _by_kind(sent)
    beside = _by_kind(sent, lambda one: one.is_beside_work)
    for kind, least in BESIDE_WORK.items():
        assert beside[kind] >= least * total[kind], (kind, beside[kind] / total[kind])


def test_a_pod_exchanges_parameters_once_and_beside_work():
    cases = [("ipttcd_340m.gin", 64, LENGTH), ("ipttcd_760m.gin", 8, LENGTH)]
    for case, found in zip(cases, elsewhere(steps, cases), strict=True):
        _check(*case, *found)


@pytest.mark.slow
def test_a_longer_row_sends_no_more():
    cases = [("ipttcd_760m.gin", 64, LENGTH), ("ipttcd_760m.gin", 64, 2 * LENGTH)]
    cases.append(("ipttcd_340m.gin", 8, LENGTH))
    found = elsewhere(steps, cases)
    for case, of_case in zip(cases, found, strict=True):
        _check(*case, *of_case)
    short, long = (_by_kind(sent) for _, _, sent in found[:2])
    for kind, size in short.items():
        assert long[kind] <= 1.01 * size, kind
