"""The steps of the flagship recipes, compiled for described pods: what they exchange, and when."""

import collections
import re

import jax
import pytest
from devices import elsewhere
from small_models import recipe

from ttcd_jax.run.described import compiled_step, described_program, missing_compiler
from ttcd_jax.sharding.collectives import collectives
from ttcd_jax.train.hardware import DEVICES_PER_NODE, HARDWARE
from ttcd_jax.train.state import abstract_params

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
LENGTH = 32_768
# Two units, scanned, of a layer with a memory and one without: all kinds of layers there are.
LAYERS = ("TransformerConfig.num_layers=4", "TransformerConfig.fast_layers=(0, 2)")
# The share of the bytes that are sent while something is computed.
BESIDE_WORK = {"all-gather": 0.85, "reduce-scatter": 0.95, "all-to-all": 0.95}
BESIDE_WORK |= {"collective-permute": 0.7, "all-reduce": 0.7}


def steps(cases):
    """Of each (recipe, number of H100s, length of a row): the shapes of the parameters, sizes of
    the mesh, and the collectives of a step."""
    found = []
    for name, count, length in cases:
        config = recipe(name, *LAYERS, f"RecordsConfig.seq_len={length}")
        program = described_program(config, HARDWARE["H100"], count)
        text, sizes = compiled_step(program).as_text(), dict(program.mesh.shape)
        sent = collectives(text, sizes, min(count, DEVICES_PER_NODE))
        shapes = [x.shape for x in jax.tree.leaves(abstract_params(config.model))]
        found.append((shapes, sizes, sent))
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
    returned = {(x.kind, x.array): x.times for x in sent if any(vocab in y for y in _arrays(x))}
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
