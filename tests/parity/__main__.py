"""Compares this implementation with the stored values of the reference implementation.

    python -m tests.parity --golden_dir=tests/golden [--records=FILE]

Computes in float32, then in float64 with tighter bounds. One line per file (kind, worst relative
error, bound), then "N passed, N failed"; exit status 1 on a failure.
"""

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

from absl import flags

from ttcd_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("golden_dir", None, "Folder of reference files (.npz).", required=True)
flags.DEFINE_string("records", None, "Write a JSON line per kind, for the tables of pages.")


def main(argv: list[str]) -> None:
    import jax

    from tests.parity.checks import CHECKS
    from tests.parity.golden import Golden
    from ttcd_jax.errors import DataError, UserError
    from ttcd_jax.measure.page import Section
    from ttcd_jax.run.page import write_records

    folder, errors = Path(FLAGS.golden_dir), dict[str, dict[str, Any]]()
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise UserError(f"no .npz file in {folder.resolve()}: pass the reference values' folder")
    passed = 0
    for dtype, path in itertools.product(("float32", "float64"), files):
        is_good = False
        try:
            golden = Golden(path)
            if golden.kind not in CHECKS:
                raise DataError(f"kind {golden.kind!r} has no check; known: {', '.join(CHECKS)}")
            with jax.enable_x64(dtype == "float64"):
                worst = CHECKS[golden.kind](golden, dtype)
            text = f"{golden.kind:16} {worst.error:8.1e} of {worst.bound:7.1e}  {worst.name}"
            is_good = worst.ratio <= 1
            name = golden.kind + ", bfloat16" * ("bf16" in worst.name)  # with a wide bound
            row = errors.setdefault(name, {"kind": name})
            row[dtype] = max(worst.error, row.get(dtype, 0.0))
        except (DataError, KeyError) as error:
            text = str(error)
        passed += is_good
        print(f"{'ok  ' if is_good else 'FAIL'}  {dtype}  {path.name:38} {text}", flush=True)
    print(f"{passed} passed, {2 * len(files) - passed} failed")
    if FLAGS.records is not None:
        sections = [Section("Worst relative error", [*errors.values()])]
        command = shlex.join(["python", "-m", "tests.parity", *sys.argv[1:]])
        write_records(FLAGS.records, sections, (), command)
    sys.exit(int(passed < 2 * len(files)))


if __name__ == "__main__":
    cli.run(main)
