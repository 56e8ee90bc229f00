"""Sizes, counts, times and names as commands print them. Bytes and token counts have binary
units."""

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


def printable(text: str) -> str:
    """`text` on one line, control characters escaped: a file name may hold terminal commands."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def clock(seconds: float) -> str:
    """A duration in minutes and seconds, from an hour on with hours: 1:15, 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
