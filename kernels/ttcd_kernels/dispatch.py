"""The choice of an implementation: the one a call names, else the first that can run here."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ttcd_kernels import launch, verified

_LOG = logging.getLogger(__name__)


class Unsupported(ValueError):
    """Error of a call by name whose implementation cannot take its operands here."""


class Candidate(NamedTuple):
    """An implementation, and a reason why it cannot take a call's operands here (None: it can)."""

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = lambda *operands: None
    needs_check: bool = False  # "auto" takes it where the kernels have been checked (`verified`)


def choose(
    op: str, implementation: str, candidates: Mapping[str, Candidate], *operands: Any
) -> Callable[..., Any]:
    """`run` of the candidate named, or for "auto" of the first one that can take the operands
    and, if it needs a check, has had it on such a GPU. Those passed over are logged once,
    as a warning where there is a GPU and none of its kernels is taken. Raises `Unsupported` if the
    one named cannot take the operands (it never falls back), `ValueError` if no candidate has this
    name."""
    if implementation == "auto":
        reasons = {}
        for name, candidate in candidates.items():
            reason = candidate.unsupported(*operands)
            if reason is None and candidate.needs_check:
                reason = verified.missing(*operands)
            if reason is None:
                has_gpu = launch.capability(*operands) is not None
                _log_once(op, tuple(reasons.items()), has_gpu and not candidate.needs_check)
                return candidate.run
            reasons[name] = reason
        raise AssertionError(f"{op} has no implementation that takes everything")
    if implementation not in candidates:
        names = ", ".join(["auto", *candidates])
        raise ValueError(f"implementation {implementation!r} is not one of {names}")
    reason = candidates[implementation].unsupported(*operands)
    if reason is not None:
        raise Unsupported(f"implementation {implementation!r}: {reason}; use 'auto' or 'xla'")
    return candidates[implementation].run


@functools.cache
def _log_once(op: str, reasons: tuple[tuple[str, str], ...], warns: bool) -> None:
    for name, reason in reasons:
        level = logging.WARNING if warns else logging.DEBUG
        _LOG.log(level, "%s does not run as '%s': %s", op, name, reason)
