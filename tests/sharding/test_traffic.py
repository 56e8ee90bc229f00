"""The collectives between devices that share a row do not grow with the row."""

import collections
import re

import jax
import pytest
from devices import elsewhere
from small_models import run_config

from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.precision import Precision
from ttcd_jax.run.build import Program

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


def traffic(method):
    """Of a training step on eight devices along `seq`, at two lengths."""
    from tests.sharding.equal_on_devices import B, config, mesh_of

    model = config(method, precision=Precision(), remat="dots", scans_layers=True)
    mesh, found = mesh_of("1x1x8x1"), []
    for length in (256, 512):
        data = TextConfig(corpus=CorpusConfig(), tokenizer=TokenizerConfig(), seq_len=length)
        run = run_config(model, data=data, batch_size=B, loss_rows=16, accumulation_steps=1)
        with jax.set_mesh(mesh):
            found.append(sent(Program(run, mesh).step().compile().as_text()))
    return found


@pytest.mark.parametrize("method", ["ipttcd", "full"])
def test_a_longer_row_sends_no_more_but_to_full_attention(method):
    short, long = elsewhere(traffic, method)
    assert any("collective-permute" in name for name in short)
    assert (long == short) == (method == "ipttcd")
