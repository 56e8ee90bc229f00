"""Changes of files at random, and what a reader of them may do: read, or raise a `UserError`."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttcd_jax.errors import UserError

ODD = (
    *(None, True, [], {}, "", "x", "..", "../../etc/passwd", "/dev/zero", "gs://bucket/x"),
    *("a\x00b", "\x1b[2J", "n" * 300, "\ud800", "\udcff", "os.system", 0, -1, 3, 0.5, 1e300),
    *(10**6, 2**31, 2**63, 10**30, [1], [[]], [None], ["x"], {"a": {"b": []}}, {"type": "x"}),
)
PIECES = (b"\0", b"\xff", b"\xff\xff\xff\xff", b'"', b"[" * 2000, b"{", b"\n", b"1e999", rb"\ud8")
NUMBERS = (0, 1, -1, 2**31 - 1, 2**40, 2**63 - 1, -(2**63))


def edited(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value with one to three of its nodes replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2, 3))):
        node = {"": value}
        holder, key = node, ""
        while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.85:
            holder = holder[key]
            key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        action = draw.random()
        if action < 0.7 or holder is node:
            holder[key] = copy.deepcopy(draw.choice(ODD))
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder["added"] = draw.choice(ODD)
        else:
            holder.append(draw.choice(ODD))
        value = node[""]
    return value


def damaged(data: bytes, draw: random.Random) -> bytes:
    """`data` with one to three pieces replaced, removed or repeated, or integers of 4 or 8 bytes
    replaced."""
    is_number = draw.random() < 0.5
    for _ in range(draw.randint(1, 3)):
        if is_number and len(data) >= 8:
            size = draw.choice((4, 8))
            start = draw.randrange(len(data) // size) * size
            number = draw.choice((*NUMBERS, draw.randrange(400))) % 2 ** (8 * size)
            data = data[:start] + number.to_bytes(size, "little") + data[start + size :]
        else:
            start = draw.randrange(len(data) + 1)
            stop = min(len(data), start + draw.choice((0, 1, 1, 4, 40)))
            parts = b"", bytes([draw.randrange(256)]), data[start:stop] * 2, draw.choice(PIECES)
            data = data[:start] + draw.choice(parts) + data[stop:]
    return data


def flip_bit(path: Path, position: int) -> None:
    """Flips the lowest bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def flip(path: Path) -> None:
    """Flips the lowest bit of the byte in its middle."""
    flip_bit(path, path.stat().st_size // 2)


def fuzz(
    source: Any, read: Callable, count: int, *, write: Callable = edited, named: object = ""
) -> None:
    """Calls `read` with `count` changed copies of `source`: it returns, or raises a `UserError`
    that names what is `named`, for more than a fourth."""
    num_refused = 0
    for seed in range(count):
        value, message = write(source, random.Random(seed)), None
        try:
            read(value)
        except UserError as error:
            message = str(error)
            num_refused += 1
        assert message is None or str(named) in message
    assert num_refused > count // 4


def fuzz_file(path: Path, read: Callable[[], Any], count: int, named: object = "") -> None:
    """`fuzz` with changed values in a file of JSON, which is what it was at the end."""
    text = path.read_text()

    def read_changed(value: Any) -> None:
        path.write_text(json.dumps(value))
        read()

    fuzz(json.loads(text), read_changed, count, named=named)
    path.write_text(text)
