"""A compiler's text of a program as computations of instructions, and how often each of them
runs."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

_NAME = r"%?([\w.\-]+)"
_COMPUTATION = re.compile(rf"(ENTRY )?{_NAME} .*\{{$")
_ASSIGNMENT = re.compile(rf"\s+(ROOT )?{_NAME} = ")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_ONE_CALLEE = re.compile(
    rf"(?:calls|to_apply|body|condition|true_computation|false_computation)={_NAME}"
)
_CALLEES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_LOOP = re.compile(rf"(condition|body)={_NAME}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Instruction(NamedTuple):
    """`operands`: names of instructions, `name#1` for a part of a tuple; of a parameter its number,
    of a constant its value."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def callees(self) -> list[str]:
        """The computations it runs."""
        names = _ONE_CALLEE.findall(self.attributes)
        for listed in _CALLEES.findall(self.attributes):
            names += re.findall(_NAME, listed)
        return names


@dataclasses.dataclass(frozen=True)
class Module:
    """A program for one of `num_devices` devices: instructions by name, by computation."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    num_devices: int

    @functools.cached_property
    def users(self) -> dict[tuple[str, str], list[Instruction]]:
        """The instructions that read a value, by (computation, name)."""
        users: dict[tuple[str, str], list[Instruction]] = {}
        for computation, instructions in self.computations.items():
            for instruction in instructions.values():
                for operand in {operand.partition("#")[0] for operand in instruction.operands}:
                    users.setdefault((computation, operand), []).append(instruction)
        return users

    @functools.cached_property
    def _callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """The instructions that run a computation, and where they stand."""
        callers = {name: [] for name in self.computations}
        for caller, instructions in self.computations.items():
            for instruction in instructions.values():
                for callee in instruction.callees():
                    callers[callee].append((caller, instruction))
        return callers

    def executions(self, computation: str) -> int:
        """How often a computation runs per run of the program, every branch of a conditional taken.
        Raises `ValueError` inside a loop of unknown length."""
        if computation == self.entry:
            return 1
        return sum(
            self._trips(caller, instruction) * self.executions(caller)
            for caller, instruction in self._callers[computation]
        )

    def _trips(self, caller: str, instruction: Instruction) -> int:
        """How often an instruction runs what it calls: a loop as often as the compiler noted, or n
        times if it counts from 0 by 1 while below n."""
        if instruction.opcode != "while":
            return 1
        if noted := _TRIP_COUNT.search(instruction.attributes):
            return int(noted[1])
        parts = dict(_LOOP.findall(instruction.attributes))
        condition, body = (self.computations[parts[part]] for part in ("condition", "body"))
        rounds = _rounds(self.computations[caller], instruction, condition, body)
        if rounds is None:
            raise ValueError(f"the loop {instruction.name} in {caller} has no known length")
        return rounds


type _Computation = dict[str, Instruction]


def _rounds(
    caller: _Computation, loop: Instruction, condition: _Computation, body: _Computation
) -> int | None:
    """n of a loop that counts from 0 by 1 while it is below n; None of any other."""
    start, test, after = caller[loop.operands[0]], _root(condition), _root(body)
    counter = re.match(r"[^#]+#(\d+)", test.operands[0])
    is_count = test.opcode == "compare" and "direction=LT" in test.attributes
    if not is_count or counter is None or not start.opcode == after.opcode == "tuple":
        return None
    index = int(counter[1])
    step = body.get(after.operands[index])
    if step is None or step.opcode != "add" or _value(body.get(step.operands[1])) != 1:
        return None
    if _value(caller.get(start.operands[index])) != 0:
        return None
    return _value(condition.get(test.operands[1]))


def _root(computation: _Computation) -> Instruction:
    return next(line for line in computation.values() if line.is_root)


def _value(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.operands[0])


def parse(text: str) -> Module:
    """The program of a text. Raises `ValueError` for a line it cannot read."""
    header = re.match(r"HloModule .*", text)
    if header is None:
        raise ValueError("not the text of a compiled program: it starts with no HloModule")
    devices = re.search(r"num_partitions=(\d+)", header[0])
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if match := _COMPUTATION.match(line):
                current = computations.setdefault(match[2], {})
                entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            current[instruction.name] = instruction
    return Module(computations, entry, int(devices[1]) if devices else 1)


def elements(shape: str) -> list[str]:
    """The parts of a tuple's shape, or the shape itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def num_elements(shape: str) -> int:
    return _array(shape)[1]


def num_bytes(shape: str) -> int:
    bits, size = _array(shape)
    return bits * size // 8


def _array(shape: str) -> tuple[int, int]:
    """(bits of an element, number of elements)."""
    match = _ARRAY.match(shape)
    if match is None or not (match[2] or match[1] == "pred"):
        raise ValueError(f"unknown shape {shape!r}")
    return int(match[2] or 8), math.prod(int(size) for size in match[3].split(",") if size)


def _instruction(line: str) -> Instruction:
    match = _ASSIGNMENT.match(line)
    if match is None:
        raise ValueError(f"unknown instruction {line.strip()[:80]!r}")
    rest = re.sub(r"/\*.*?\*/", "", line[match.end() :])
    width = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:width], rest[width:].lstrip()
    opcode = rest[: rest.index("(")]
    end = len(opcode) + _closing(rest[len(opcode) :])
    inside = rest[len(opcode) + 1 : end - 1]
    is_literal = opcode in ("parameter", "constant")
    operands = (inside,) if is_literal else tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", inside))
    return Instruction(match[2], shape, opcode, operands, rest[end:], match[1] is not None)


def _closing(text: str) -> int:
    """Where the parenthesis that opens `text` has closed."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
