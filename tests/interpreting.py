"""Cases of the Triton kernels that run in Triton's interpreter, in a process of its own."""

import json
from pathlib import Path
from typing import Any

from devices import printed


def check_errors(op: str, cases: list[dict[str, Any]], bound: dict[str, float], *sums: str) -> None:
    """Every result of every case is within its dtype's bound; `sums`, in float32 of exact products
    of narrow numbers, within that of float32 (narrow taps have rounded gradients)."""
    script = Path(__file__).parent / "kernels" / "interpreted.py"
    lines = printed(str(script), op, json.dumps(cases), count=1).splitlines()
    for case, errors in zip(cases, map(json.loads, lines), strict=True):
        # One by one: `max` passes over NaN, the value of an unwritten result.
        allowed = bound[case.get("dtype", "float32")]
        assert all(error < allowed for error in errors.values()), (case, errors)
        exact = () if "taps_dtype" in case else sums
        assert all(errors[name] < bound["float32"] for name in exact), (case, errors)
