"""One HTML page, its pictures and the terminal's tables from the evaluations of some runs.

    python -m experiments.report --run_dir=DIR [--run_dir=DIR2 ...] [--output=DIR] [--next=LINE ...]

Runs that were evaluated on the same task share one table and one picture.
"""

from pathlib import Path

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("run_dir", None, "A run directory; repeat for more.", required=True)
flags.DEFINE_string("output", None, "Folder of the page; default: report/ in the first run.")
flags.DEFINE_multi_string("next", [], "A line of the page's and the terminal's 'next' list.")


def main(argv: list[str]) -> None:
    from ttcd_jax.eval import results
    from ttcd_jax.eval.report import format_table, write_page

    run_dirs = [Path(path) for path in FLAGS.run_dir]
    output = Path(FLAGS.output) if FLAGS.output else run_dirs[0] / "report"
    output.mkdir(parents=True, exist_ok=True)
    tables, pictures = [], []
    for task in ("ppl", "recall", "needle"):
        found = [r for r in (results.read_results(path, task) for path in run_dirs) if r]
        if not found:
            continue
        result = results.merged(found)
        results.plot(output / f"{task}.png", result)
        tables.append((result["title"], results.table(result)))
        pictures.append((result["title"], f"{task}.png"))
        print(f"\n{result['title']}\n{format_table(results.table(result))}")
    if not tables:
        raise UserError(
            f"no evaluation in {', '.join(FLAGS.run_dir)}: run experiments.evaluate first"
        )
    write_page(
        output / "index.html",
        title="ttcd_jax report",
        summary="Runs: " + ", ".join(f"`{path}`" for path in FLAGS.run_dir),
        tables=tables,
        pictures=pictures,
        next_steps=FLAGS.next,
    )
    names = ", ".join(name for _, name in pictures)
    print(f"\npage {output / 'index.html'}, pictures {names} beside it")
    if FLAGS.next:
        print("\nnext:\n" + "\n".join(f"  {line}" for line in FLAGS.next))


if __name__ == "__main__":
    cli.run(main)
