"""What the devices of a mesh send each other in one run of a program, from the compiler's text.

Bytes that leave one device, on a ring of n:

    all-gather       (n - 1)/n of the gathered array
    reduce-scatter   (n - 1)/n of the operand
    all-reduce       2 (n - 1)/n of the array
    all-to-all       (n - 1)/n of the operand
    collective-permute   the operand

A form of the text that is not known is an error, never a zero.
"""

import contextlib
import itertools
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from ttcd_jax.sharding import hlo

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_UNKNOWN_KINDS = ("collective-broadcast", "ragged-all-to-all", "send", "recv")
# Passes all of a value on, in whatever order or width.
_TRANSPARENT = ("bitcast", "convert", "copy", "reshape", "transpose")


class Collective(NamedTuple):
    """One collective operation of a program. `num_bytes`: what one device sends per execution;
    `axes`: the mesh axes its groups run along, in the mesh's order; `count`: executions per run of
    the program."""

    kind: str
    num_bytes: int
    group_size: int
    axes: tuple[str, ...]
    count: int


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of a partitioned program: of the text of `compile_partitioned`, or of
    `compiled.as_text()`. `mesh` is `Mesh.shape`, devices numbered along `mesh.devices.flat`. Groups
    of one device send nothing and are left out.

    An all-reduce of which only slices of 1/n are read is a reduce-scatter: the compilers of
    accelerators make it one. Raises `ValueError` for a form it does not know.
    """
    module = hlo.parse(text)
    num_devices = math.prod(mesh.values())
    if module.num_devices != num_devices:
        raise ValueError(f"a program of {module.num_devices} devices, a mesh of {num_devices}")
    found = [
        _collective(module, computation, instruction, kind, mesh)
        for computation, instructions in module.computations.items()
        for instruction in instructions.values()
        if (kind := _kind(instruction)) is not None
    ]
    return [collective for collective in found if collective.group_size > 1]


def compile_partitioned(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """(the compiled program, its text straight after partitioning). Later passes of a CPU's
    compiler widen bfloat16 and fuse slices away; an accelerator does neither. The text is empty
    for one device."""
    with tempfile.TemporaryDirectory() as folder, _without_cache():
        compiled = lowered.compile(
            {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "^spmd-partitioning$"}
        )
        texts = [path.read_text() for path in Path(folder).glob("*.after_spmd-partitioning.*.txt")]
    assert len(texts) <= 1, f"{len(texts)} texts of one program"
    return compiled, texts[0] if texts else ""


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """A program from the persistent cache goes through no pass and leaves no text."""
    is_on = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is on
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", is_on)
        compilation_cache.reset_cache()


def _kind(instruction: hlo.Instruction) -> str | None:
    """The kind of a collective, None for other instructions and for the end of an asynchronous
    one."""
    base = instruction.opcode.removesuffix("-start")
    if base in _UNKNOWN_KINDS:
        raise ValueError(f"{instruction.opcode} of {instruction.name} is not accounted for")
    return base if base in _KINDS else None


def _collective(
    module: hlo.Module,
    computation: str,
    instruction: hlo.Instruction,
    kind: str,
    mesh: Mapping[str, int],
) -> Collective:
    groups = _pairs(instruction) if kind == "collective-permute" else _groups(instruction, mesh)
    axes = _axes(groups, mesh)
    group_size = groups.shape[1]
    if kind == "collective-permute":
        group_size = math.prod(mesh[name] for name in axes)
    size = sum(hlo.num_bytes(array) for array in _results(instruction, kind))
    is_sum = kind == "all-reduce" and group_size > 1
    if is_sum and _is_scattered(module, computation, instruction, group_size):
        kind, size = "reduce-scatter", size // group_size
    sent = _sent(kind, size, group_size)
    return Collective(kind, sent, group_size, axes, module.executions(computation))


def _sent(kind: str, size: int, n: int) -> int:
    """Bytes a device sends, by those of its result."""
    match kind:
        case "all-gather" | "all-to-all":
            return size * (n - 1) // n
        case "all-reduce":
            return 2 * size * (n - 1) // n
        case "reduce-scatter":
            return size * (n - 1)
    return size


def _results(instruction: hlo.Instruction, kind: str) -> list[str]:
    """The arrays that come out. The start of an asynchronous collective also carries its operands
    in front and its context behind; that of an all-reduce does not."""
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        shape = hlo.elements(shape)[1]
    return hlo.elements(shape)


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ; groups [groups, devices]."""
    coordinates = np.unravel_index(groups, tuple(mesh.values()))
    differs = ((along != along[:, :1]).any() for along in coordinates)
    return tuple(name for name, is_along in zip(mesh, differs, strict=True) if is_along)


def _is_scattered(
    module: hlo.Module, computation: str, instruction: hlo.Instruction, group_size: int
) -> bool:
    """Whether of an all-reduce only slices of 1/n are read."""
    if instruction.shape.startswith("("):
        return False
    read = {group_size * size for size in _reads(module, computation, instruction)}
    return read == {hlo.num_elements(instruction.shape)}


def _reads(module: hlo.Module, computation: str, value: hlo.Instruction) -> Iterator[int]:
    """Of everything that reads a value: how many elements it takes."""
    if value.is_root:
        yield hlo.num_elements(value.shape)
    for user in module.users.get((computation, value.name), []):
        if user.opcode in _TRANSPARENT:
            yield from _reads(module, computation, user)
        elif user.opcode == "dynamic-slice" and user.operands[0] == value.name:
            yield hlo.num_elements(user.shape)
        else:
            yield hlo.num_elements(value.shape)


def _groups(instruction: hlo.Instruction, mesh: Mapping[str, int]) -> np.ndarray:
    """Device numbers [groups, devices of a group], from any of the ways to write them:
    {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0), mesh['a'=2,'b'=2] {'b'}."""
    text = instruction.attributes.partition("replica_groups=")[2]
    if text.startswith("{}"):
        return np.arange(math.prod(mesh.values()))[None]
    if match := re.match(r"\{(\{\d+(?:[\d,]|\},\{)*\})\}", text):
        rows = re.findall(r"\{([\d,]+)\}", match[1])
        return np.array([[int(device) for device in row.split(",")] for row in rows])
    if match := re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(size) for size in match[3].split(",")]
        devices = np.arange(math.prod(shape)).reshape(shape)
        if match[4]:
            devices = devices.transpose([int(axis) for axis in match[4].split(",")])
        return devices.reshape(int(match[1]), int(match[2]))
    if match := re.match(r"mesh\[([^\]]*)\] \{([^}]*)\}", text):
        return _named_groups(match[1], match[2])
    raise ValueError(f"unknown replica groups of {instruction.name}: {text[:80]!r}")


def _named_groups(mesh: str, axes: str) -> np.ndarray:
    """Groups along axes of the compiler's own mesh: of 'a'=2,'b'=8 for instance along 'b', or along
    'b':(2)4, the part of size 4 of b = 2 x 4, in front of which 2 stands."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        spans = [
            (int(low or 1), int(low or 1) * int(n or size)) for p, low, n in parts if p == name
        ]
        cuts = sorted({1, size, *(cut for span in spans for cut in span)})
        for low, high in itertools.pairwise(cuts):
            if any(start <= low and high <= stop for start, stop in spans):
                inside.append(len(shape))
            shape.append(high // low)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    devices = np.arange(math.prod(shape)).reshape(shape).transpose(outside + inside)
    return devices.reshape(-1, math.prod(shape[axis] for axis in inside))


def _pairs(instruction: hlo.Instruction) -> np.ndarray:
    """(source, target) of a permutation, [pairs, 2]."""
    match = re.search(r"source_target_pairs=\{([\d,{}]*)\}", instruction.attributes)
    if match is None:
        raise ValueError(f"unknown source and target pairs of {instruction.name}")
    devices = [int(device) for device in re.findall(r"\d+", match[1])]
    return np.array(devices, int).reshape(-1, 2)
