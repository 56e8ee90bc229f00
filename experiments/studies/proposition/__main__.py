"""Draws Proposition 1: how a fact that only the teacher saw affects a later query; its bound.

    python -m experiments.proposition [--out_dir=runs/proposition] [--num_draws=200] [--seed=0]

Random blocks (dual-window attention, ideal IP-TTCD memory) read random sequences in float64. First
with every other key orthogonal to the later query's, where y_q1(T) . delta_y_q2(S) equals
(eta / L) c_gap c_align: the update is eta times the mean over a chunk of L tokens, so the paper's
eta is a token's rate at --chunk_sizes=1 and eta / L otherwise. Then with keys that overlap, at the
first of --chunk_sizes: the bound fails. Writes proposition.png and proposition.json. Exit status 1
when the bound did not hold in every orthogonal case.
"""

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.files import write_json

FLAGS = flags.FLAGS
flags.DEFINE_string("out_dir", "runs/proposition", "Folder for the picture and the numbers.")
flags.DEFINE_integer("seed", 0, "Of blocks and sequences.", lower_bound=0)
flags.DEFINE_integer("num_draws", 200, "Blocks and sequences per setting.", lower_bound=1)
flags.DEFINE_float("eta", 0.3, "Learning rate of the memory.")
flags.DEFINE_list("chunk_sizes", ["1", "4", "16"], "Tokens per chunk.")
flags.DEFINE_list("num_fillers", ["16", "64", "256"], "Tokens between the queries.")

_OVERLAPS = (0.0, 0.1, 0.3, 0.5, 0.75, 1.0)


def main(argv: list[str]) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    from ttcd_kernels import measure
    from ttcd_kernels.table import format_table

    from experiments.studies.proposition import construction
    from experiments.studies.proposition.picture import draw_proposition

    chunk_sizes, num_fillers = cli.positives("chunk_sizes"), cli.positives("num_fillers")
    config = construction.PropositionConfig(
        chunk_size=chunk_sizes[0], num_fillers=num_fillers[0], eta=FLAGS.eta
    )
    sweep = functools.partial(construction.sweep, seed=FLAGS.seed, num_draws=FLAGS.num_draws)
    out_dir = Path(FLAGS.out_dir)
    report: dict[str, Any] = {
        "environment": measure.environment(),
        "config": config.to_dict(),
        "seed": FLAGS.seed,
        "num_draws": FLAGS.num_draws,
    }
    write_json(out_dir / "proposition.json", report)  # an error is reported before the work

    sized = [config.replace(chunk_size=size) for size in chunk_sizes]
    orthogonal = {each.chunk_size: sweep(each) for each in sized}
    equality = [construction.equality_summary(each, orthogonal[each.chunk_size]) for each in sized]
    print("Every other key orthogonal: left = y_q1(T) . delta_y_q2(S), right = rate c_gap c_align.")
    print("The update is eta times the mean over a chunk, so rate = eta / chunk_size.")
    print(format_table(equality), flush=True)

    interference = [
        {"fillers": count, "overlap": overlap}
        | construction.ratio_summary(sweep(config.replace(num_fillers=count), overlap=overlap))
        for count, overlap in itertools.product(num_fillers, _OVERLAPS)
    ]
    print(f"\nKeys overlap, chunk_size {config.chunk_size}: left / right, shares of draws.")
    print(format_table(interference), flush=True)

    is_held = all(row["held"] for row in equality)
    is_held &= not any(row["below_bound"] for row in interference if row["overlap"] == 0)
    report |= {
        "bound_held": is_held,
        "equality": equality,
        "orthogonal": {
            size: {name: values.tolist() for name, values in measured._asdict().items()}
            for size, measured in orthogonal.items()
        },
        "interference": interference,
    }
    write_json(out_dir / "proposition.json", report)
    draw_proposition(out_dir / "proposition.png", config, orthogonal, interference)
    verdict = "held in every" if is_held else "FAILED in an"
    print(f"\nthe bound {verdict} orthogonal case; picture and numbers in {out_dir}")
    sys.exit(0 if is_held else 1)


if __name__ == "__main__":
    cli.run(main)
