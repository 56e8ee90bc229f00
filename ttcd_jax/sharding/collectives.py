"""The collectives of a compiled step: how many bytes a device sends, along which mesh axes and over
which links, read from the compiler's text.

Devices are counted in the order of the mesh, of which every `node_size` share a node. What a device
sends is, of n devices of which g share a node,

    all-gather, reduce-scatter   S (n - 1) / n of the whole array S, around a ring
    all-reduce                   2 S (n - 1) / n, around a ring
    all-to-all                   S (n - 1) / n of its own S, to each of the others
    collective-permute           S, to one other

A ring leaves a node at one of g hops, and NCCL lays one through each of a node's network cards:
1 / g of its bytes cross the network, (n - g) / (n - 1) of those to each of the others, on average.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"(?ms)^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}")
_KIND = r" ((?:all-|collective-|ragged-|reduce-scatter|send|recv)[\w-]*)\("
_COLLECTIVE = re.compile(r"%?([\w.\-]+) = (.*?)" + _KIND + r"[^%)]*%([\w.\-]+)")
_CALLEES = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_MESH = re.compile(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}(?=,|$)")
_AXIS = r"'(\w+)'(?::\((\d+)\)(\d+))?"  # or a part of it: (parts before)size
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(?=,|$)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_PRODUCT = re.compile(r" (?:fusion|custom-call|dot|convolution|while|conditional|call)\(")
_RING = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


class Collective(NamedTuple):
    kind: str  # as in all-gather
    axes: str  # along which its devices differ, as in "fsdp x seq"
    array: str  # that a device has afterwards
    devices: int  # of a group
    nodes: int  # over which a group is spread
    sent: float  # bytes, by one device
    crossing: float  # the share of them that leaves the node
    is_beside_work: bool  # something is computed between its start and its end, as scheduled
    times: int = 1


def collectives(text: str, mesh: Mapping[str, int], node_size: int) -> list[Collective]:
    """The collectives of a step on a mesh of these sizes, from `compiled.as_text()`: every branch
    of a conditional, a loop as often as the compiler notes. Raises `ValueError` for what it cannot
    count: a loop of unknown length, devices that are written in another way, another kind."""
    found = _COMPUTATION.findall(text)
    computations = {name: lines.splitlines() for _, name, lines in found}

    @functools.cache
    def counted(name: str) -> Counter[Collective]:
        if name not in computations:
            raise ValueError(f"a program without its computation {name!r}")
        total = Counter(_in_order(computations[name], mesh, node_size))
        for line in computations[name]:
            trips = _TRIPS.search(line)
            for callee in re.findall(r"%([\w.\-]+)", " ".join(_CALLEES.findall(line))):
                if counted(callee) and " while(" in line and trips is None:
                    raise ValueError(f"a loop of unknown length: {line.strip()[:80]}")
                for one, count in counted(callee).items():
                    total[one] += count * int(trips[1] if trips else 1)
        return total

    entry = next((name for is_entry, name, _ in found if is_entry), "")
    return [one._replace(times=count) for one, count in counted(entry).items()]


def _in_order(lines: list[str], mesh: Mapping[str, int], node_size: int) -> list[Collective]:
    """The collectives of a computation; groups of one device send nothing."""
    found, started = [], {}
    for number, line in enumerate(lines):
        line = line.partition(", metadata=")[0]
        if (match := _COLLECTIVE.search(line)) is None:
            if re.search(_KIND, line):
                raise ValueError(f"a collective {line.strip()[:80]}")
            continue
        name, result, kind, operand = match.groups()
        if kind.endswith("-start"):
            started[name] = number, _groups(line)
            continue
        if kind.endswith("-done") and operand not in started:  # in another computation
            raise ValueError(f"a collective {line.strip()[:80]}")
        begin, groups = started[operand] if kind.endswith("-done") else (number, _groups(line))
        is_beside_work = any(_PRODUCT.search(x) for x in lines[begin + 1 : number])
        one = _collective(kind.removesuffix("-done"), result, groups, mesh, node_size)
        if one.devices > 1:
            found.append(one._replace(is_beside_work=is_beside_work))
    return found


def _groups(line: str) -> np.ndarray:
    """The devices of each group, [groups, devices], by their place in the mesh."""
    if match := _MESH.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        if re.sub(r"'\w+'(=\d+)?|, ?", "", match[1]) or re.sub(_AXIS, "", match[2]).strip(", "):
            raise ValueError(f"devices of {line.strip()[:80]}")
        ids = np.arange(math.prod(sizes.values()))
        places = dict(zip(sizes, np.unravel_index(ids, [*sizes.values()]), strict=True))
        count, of_group = 1, np.zeros_like(ids)
        for name, parts, number in re.findall(_AXIS, match[2]):
            length = int(number or sizes[name])
            below = sizes[name] // (int(parts or 1) * length)
            place = places[name] // below % length
            places[name] = places[name] - place * below
            count, of_group = count * length, of_group * length + place
        first = np.ravel_multi_index([*places.values()], [*sizes.values()])
        return np.lexsort((of_group, first)).reshape(-1, count)
    if match := _IOTA.search(line):
        dims, order = (
            [int(x) for x in (text or "").split(",") if x] for text in match.groups()[2:]
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        return ids.transpose(order or range(len(dims))).reshape(int(match[1]), int(match[2]))
    if match := _LISTED.search(line):
        listed = re.findall(r"\{([\d,]+)\}", match[1])
        if listed and len({x.count(",") for x in listed}) == 1:
            return np.array([[int(x) for x in ids.split(",")] for ids in listed])
    raise ValueError(f"devices of {line.strip()[:80]}")


def _collective(
    kind: str, result: str, groups: np.ndarray, mesh: Mapping[str, int], node_size: int
) -> Collective:
    size, count = _bytes(result), groups.shape[1]
    where, places = groups // node_size, np.unravel_index(groups, [*mesh.values()])
    nodes = max(len({*x}) for x in where.tolist())
    axes = " x ".join(n for n, x in zip(mesh, places, strict=True) if (x != x[:, :1]).any())
    if kind in _RING:
        whole = size * count if kind == "reduce-scatter" else size
        sent, crossing = _RING[kind] * whole * (count - 1) / count, (nodes > 1) * nodes / count
    elif kind == "all-to-all":
        sent = size * (count - 1) / count
        crossing = np.mean(where[..., None] != where[:, None]) * count / max(count - 1, 1)
    elif kind == "collective-permute":
        sent, crossing = size, nodes > 1
    else:
        raise ValueError(f"a collective of the kind {kind}")
    array = ", ".join(f"{x}[{y}]" for x, y in _ARRAY.findall(result))
    return Collective(kind, axes, array, count, nodes, float(sent), float(crossing), False)


def _bytes(result: str) -> int:
    bits = 0
    for kind, dims in _ARRAY.findall(result):
        width = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
        bits += width * math.prod(int(x) for x in dims.split(",") if x)
    return bits // 8
