"""Compares this implementation with the stored values of the reference implementation.

    python -m tests.parity --golden_dir=tests/golden [--float64]

One line per file (kind, worst relative error, bound), then "N passed, N failed"; exit status 1 on a
failure.
"""

import sys
from pathlib import Path

from absl import flags

from ttcd_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("golden_dir", None, "Folder of reference files (.npz).", required=True)
flags.DEFINE_bool("float64", False, "Compute in float64 instead of float32, with tighter bounds.")


def main(argv: list[str]) -> None:
    import jax

    jax.config.update("jax_enable_x64", FLAGS.float64)
    from tests.parity.checks import CHECKS
    from tests.parity.golden import Golden
    from ttcd_jax.errors import DataError, UserError

    folder, dtype = Path(FLAGS.golden_dir), "float64" if FLAGS.float64 else "float32"
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise UserError(f"no .npz file in {folder.resolve()}: pass the reference values' folder")
    passed = 0
    for path in files:
        is_good = False
        try:
            golden = Golden(path)
            if golden.kind not in CHECKS:
                raise DataError(f"kind {golden.kind!r} has no check; known: {', '.join(CHECKS)}")
            worst = CHECKS[golden.kind](golden, dtype)
            text = f"{golden.kind:16} {worst.error:8.1e} of {worst.bound:7.1e}  {worst.name}"
            is_good = worst.ratio <= 1
        except (DataError, KeyError) as error:
            text = str(error)
        passed += is_good
        print(f"{'ok  ' if is_good else 'FAIL'}  {path.name:38} {text}", flush=True)
    print(f"{dtype}\n{passed} passed, {len(files) - passed} failed")
    sys.exit(int(passed < len(files)))


if __name__ == "__main__":
    cli.run(main)
