"""The collectives between devices that share a row do not grow with the row."""

import collections
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from devices import elsewhere
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ttcd_jax.precision import Precision
from ttcd_jax.sharding.batch import replicated
from ttcd_jax.sharding.rules import spec
from ttcd_jax.train.state import init_params, placed_as, state_of, state_shardings
from ttcd_jax.train.step import make_train_step

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(r" = (.*?) ((?:all-|collective-|ragged-|reduce-sc|send|recv)[\w-]*)\(%")
_CALLEES = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def sent(text):
    """How often a program runs each collective by "kind of shape", from `compiled.as_text()`: every
    branch of a conditional, a loop as often as the compiler notes. Raises `ValueError` for a loop
    with collectives whose length is not known."""
    computations, entry, lines = {}, "", []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            lines.append(re.sub(r"/\*.*?\*/|\{[\d,]*\}", "", line))
    return _sent(computations, entry)


def _sent(computations, name):
    total = collections.Counter()
    for line in computations[name]:
        if (match := _COLLECTIVE.search(line)) and not _is_alone(line):
            total[f"{match[2]} of {match[1]}"] += 1
        for callee in re.findall(r"%([\w.\-]+)", " ".join(_CALLEES.findall(line))):
            inside = _sent(computations, callee)
            if inside and " while(" in line:
                if (trips := _TRIPS.search(line)) is None:
                    raise ValueError(f"a loop of unknown length: {line.strip()[:80]}")
                inside = collections.Counter({k: int(trips[1]) * n for k, n in inside.items()})
            total += inside
    return total


def _is_alone(line):
    """Whether groups along named axes have one device: mesh['data'=1,'seq'=4] {'data'}."""
    sizes, names = (re.findall(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line) or [("", "")])[0]
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", sizes))
    return bool(names) and all(sizes[name] == "1" for name in re.findall(r"'(\w+)'", names))


def nested():
    """Of loops and branches on eight devices."""
    lax, mesh = jax.lax, jax.make_mesh((4, 2, 1), ("fsdp", "seq", "one"))

    def shift(x):
        return lax.ppermute(x, "seq", [(0, 1)]) * 2

    def repeated(function, rounds):
        return lambda x: lax.scan(lambda c, _: (function(c), None), x, None, length=rounds)[0]

    def run(x):
        x = repeated(lambda x: lax.psum(repeated(shift, 3)(x), "fsdp") / 2, 5)(lax.psum(x, "one"))
        return lax.cond(x[0, 0] > 0, shift, lambda x: lax.psum_scatter(x, "seq") * x, x)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return sent(jax.jit(mapped).lower(jnp.ones((2, 3))).compile().as_text())


def test_collectives_of_loops_and_branches_are_counted():
    counts = {"all-reduce of f32[2,3]": 5, "collective-permute of f32[2,3]": 16}
    assert elsewhere(nested) == counts | {"reduce-scatter of f32[1,3]": 1}
    text = """%body (b: f32[4]) -> f32[4] {
  ROOT %r = f32[4] all-reduce(%b)
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %y = f32[4] while(%x), body=%body
}"""
    with pytest.raises(ValueError, match="a loop of unknown length"):
        sent(text)


def traffic(method):
    """Of a training step on eight devices along `seq`, at two lengths."""
    from tests.sharding.equal_on_devices import B, config, mesh_of

    model, mesh, optimizer = config(method, precision=Precision()), mesh_of("1x1x8x1"), optax.sgd(1)
    places = state_shardings(model, optimizer, mesh)
    state = placed_as(jax.eval_shape(lambda: state_of(optimizer, init_params(model, 0))), places)
    place = NamedSharding(mesh, spec(("batch", "length"), mesh))
    kinds = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), "int32")
    step = make_train_step(model, optimizer, lambda _: jnp.asarray(1e-3), loss_rows=16)
    run = jax.jit(step, donate_argnums=0, out_shardings=(places, replicated(mesh)))
    found = []
    for length in (256, 512):
        fields = {name: ((B, length), kind) for name, kind in (kinds | {"loss_mask": bool}).items()}
        batch = {x: jax.ShapeDtypeStruct(*y, sharding=place) for x, y in fields.items()}
        with jax.set_mesh(mesh):
            found.append(sent(run.lower(state, batch).compile().as_text()))
    return found


@pytest.mark.parametrize("method", ["ipttcd", "full"])
def test_a_longer_row_sends_no_more_but_to_full_attention(method):
    short, long = elsewhere(traffic, method)
    assert any("collective-permute" in name for name in short)
    assert (long == short) == (method == "ipttcd")
