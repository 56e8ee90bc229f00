"""Sizes, counts, times and names as commands print them; bytes and tokens in binary units."""

import re
from collections.abc import Collection

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
OF_OUTPUT = ("\n", "\t")
_SCALES = (("G", 2**30), ("M", 2**20), ("K", 2**10))


def size(num_bytes: float) -> str:
    """A number of bytes: 72.12 GiB, 3.81 MiB, 1.50 KiB, 12 bytes."""
    for letter, scale in _SCALES:
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {letter}iB"
    return f"{num_bytes:.0f} bytes"


def count(tokens: int) -> str:
    """A number of tokens: 1M, 4K, 512, and 1,600 where it is no multiple of 1K."""
    for letter, scale in _SCALES:
        if tokens >= scale and not tokens % scale:
            return f"{tokens // scale}{letter}"
    return f"{tokens:,}"


def printable(text: str, kept: Collection[str] = ()) -> str:
    """`text` with control characters escaped but for those in `kept`, by default on one line: a
    file name may hold terminal commands, marks of direction, and bytes that are no text."""
    return _CONTROLS.sub(
        lambda found: found[0] if found[0] in kept else found[0].encode("unicode_escape").decode(),
        text,
    )


def clock(seconds: float) -> str:
    """A duration in minutes and seconds, from an hour on with hours: 1:15, 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
