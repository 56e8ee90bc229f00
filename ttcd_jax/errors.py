"""Errors that a user can correct, each with the exit status of commands.

A command prints one as a line and exits with `exit_code`; every other exception is a defect of ours
and keeps its traceback.
"""


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
    """The loss or the gradient is no longer finite; the last good state was kept."""

    exit_code = 5
