"""Kills, stops, damages and moves a tiny run at random, and compares it with an undisturbed one.

    python -m tests.soak [--faults=500] [--seed=0] [--output=runs/soak] [--kind=NAME ...]

Trains an IP-TTCD model of a few thousand parameters on records of drawn text, in float64: once
undisturbed by one process and once by two, then in one run directory after the other, launched
again after every fault (the table in tests/soak/faults.py, of which the suite runs each row once)
until it ends. Then metrics.jsonl has every step once and in order.
Losses, norms of the gradient and final parameters are equal bit for bit up to the step at which the
run was moved to another mesh or number of parts, and to 1e-9 after it. No unfinished file and no
lock are left, and the run can be evaluated. A process that does not end in 200 s hangs. The
clock that jumps is Python's.

A difference is one line with the command that repeats the run, and exit status 1; the files of the
run are kept.
"""

import os
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

from absl import flags

from tests.commands import XLA_FLAGS
from ttcd_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("output", "runs/soak", "Holds the records, the runs, the compiled programs.")
flags.DEFINE_integer("seed", 0, "Of the faults.", lower_bound=0)
flags.DEFINE_integer("faults", 500, "How many; the last run is trained to its end.", lower_bound=1)
flags.DEFINE_integer("first", 0, "The number of the first fault.", lower_bound=0)
flags.DEFINE_multi_string("kind", [], "The faults to draw from (default: all of the table).")


def main(argv: list[str]) -> None:
    folder = Path(FLAGS.output).absolute()
    os.environ |= {"JAX_PLATFORMS": "cpu"}  # before jax is imported
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    from ttcd_kernels.table import format_table

    from tests.soak.faults import FAULTS, Unavailable, drawn
    from tests.soak.run import Broken, Chain
    from ttcd_jax.errors import UserError

    kinds = FLAGS.kind or list(FAULTS)
    if unknown := set(kinds) - set(FAULTS):
        raise UserError(f"--kind: {unknown.pop()!r} is not one of {', '.join(FAULTS)}")
    chain, outcomes = Chain(folder), {kind: [] for kind in kinds}
    for number in range(FLAGS.first, FLAGS.first + FLAGS.faults):
        kind, rng = drawn(kinds, FLAGS.seed, number)
        name, since = f"fault {number} ({kind})", time.monotonic()
        try:
            status = chain.hit(FAULTS[kind], rng, number)
            if number == FLAGS.first + FLAGS.faults - 1:
                chain.end(is_whole=True)
        except Unavailable as reason:
            print(f"{name}: this machine {reason}", flush=True)
            continue
        except Broken as error:
            flag = [f"--kind={kind}" for kind in FLAGS.kind] + [f"--seed={FLAGS.seed}"]
            flag += [f"--first={chain.begun}", f"--faults={number - chain.begun + 1}"]
            command = shlex.join(["python", "-m", "tests.soak", *flag])
            print(f"FAILED: seed {FLAGS.seed}, {name}: {error}; again: {command}", file=sys.stderr)
            sys.exit(1)
        outcomes[kind].append((status, time.monotonic() - since))
        print(f"{name} in run-{chain.begun}: exit status {status}", flush=True)
    rows = []
    for kind, ends in outcomes.items():
        counts = Counter(status for status, _ in ends)
        statuses = ", ".join(f"{x} ({counts[x]})" for x in sorted(counts))
        seconds = sum(x for _, x in ends) / len(ends) if ends else None
        rows.append({"fault": kind, "n": len(ends), "exit status (n)": statuses, "s": seconds})
    print(format_table(rows))
    print(f"seed {FLAGS.seed}, {FLAGS.faults} faults: every loss is that of the undisturbed run")


if __name__ == "__main__":
    cli.run(main)
