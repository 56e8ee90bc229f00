"""Bytes that collectives put on one device in one run of a compiled program, by kind."""

import collections
import math
import re

_KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r" = (.*?) ((?:all-|collective-|ragged-|reduce-scatter|send|recv)[\w-]*)\(%"
)
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_CALLEES = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def sent_bytes(text: str) -> collections.Counter[str]:
    """Bytes of the results, from the text of `compiled.as_text()`: every branch of a conditional is
    taken, a loop runs as often as the compiler notes; groups of one device send nothing. Raises
    `ValueError` for another collective or form of groups, and for a loop with collectives whose
    length is not known."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        else:
            lines.append(re.sub(r"/\*.*?\*/", "", line))
    return _sent(computations, entry)


def _sent(computations: dict[str, list[str]], name: str) -> collections.Counter[str]:
    total = collections.Counter[str]()
    for line in computations[name]:
        if match := _COLLECTIVE.search(line):
            if match[2] not in _KINDS:
                raise ValueError(f"{match[2]} is not accounted for: {line.strip()[:80]}")
            if match[2] == "collective-permute" or _group_size(line) > 1:
                total[match[2]] += sum(_num_bytes(*array) for array in _ARRAY.findall(match[1]))
        for callee in re.findall(r"%([\w.\-]+)", " ".join(_CALLEES.findall(line))):
            inside = _sent(computations, callee)
            if inside and " while(" in line:
                trips = _TRIPS.search(line)
                if trips is None:
                    raise ValueError(f"a loop of unknown length: {line.strip()[:80]}")
                inside = collections.Counter({k: int(trips[1]) * n for k, n in inside.items()})
            total += inside
    return total


def _group_size(line: str) -> int:
    """The devices of a group along named axes: mesh['data'=2,'seq'=4] {'seq'} has 4."""
    match = _GROUPS.search(line)
    if match is None:
        raise ValueError(f"unknown replica groups: {line.strip()[:200]}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", match[2]))


def _num_bytes(kind: str, bits: str, sizes: str) -> int:
    assert bits or kind == "pred", f"an array of {kind}"
    return int(bits or 8) * math.prod(int(size) for size in sizes.split(",") if size) // 8
