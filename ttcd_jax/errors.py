"""Errors that a user can correct, each with the exit status of commands.

A command prints such an error as one line and exits with `exit_code`; every other exception is a
bug and keeps its traceback.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """Wrong usage or configuration. The message names the values and the remedy."""

    exit_code = 2


class DataError(UserError):
    """A corpus, a token or a prompt that cannot be used."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""

    exit_code = 4


class NonFiniteError(UserError):
    """A loss, gradient or measure is not finite; a run keeps its last good state."""

    exit_code = 5


class ResourceError(UserError):
    """Not enough room on a disk or in memory. The message names the bytes needed and free."""

    exit_code = 6


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first `most` of `names`, and how many more there are, for an error message."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
