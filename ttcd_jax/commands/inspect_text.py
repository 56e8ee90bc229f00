"""Looks at the memories of a run while its model reads a text: one page, and all arrays.

    ttcd inspect --run_dir=DIR --text=FILE --output=DIR
                 [--layer=N ...] [--query=TEXT ...] [--other=FILE] [--max_tokens=N]
    ttcd inspect --run_dir=DIR --text=FILE --output=DIR --stream_window=128

Prints a row for every layer, the controls, and who answered each --query. index.html in --output
has the pictures, arrays.npz all numbers. --stream_window: a plain model is given a memory of its
stream, untrained. docs/inspect.md says what the numbers mean.
"""

import io
from pathlib import Path
from typing import Any

from absl import flags

from ttcd_jax.commands import cli
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_text, write_whole
from ttcd_jax.terminal import note

FLAGS = flags.FLAGS
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_string("text", None, "A file of text, UTF-8.", required=True)
flags.DEFINE_string("output", None, "Folder of the page and the arrays.", required=True)
flags.DEFINE_multi_integer("layer", None, "A layer to look at (default: all with a memory).")
flags.DEFINE_multi_string("query", [], "Words of the text: who answered their first token.")
flags.DEFINE_string("other", None, "A file of text whose memory is read instead, as a control.")
flags.DEFINE_integer("max_tokens", 4096, "Tokens of the text that are read.", lower_bound=2)
flags.DEFINE_integer("stream_window", None, "Of a plain model with a memory of its stream.")
flags.DEFINE_integer("step", None, "The checkpoint (default: the newest).")
flags.DEFINE_multi_string("param", [], "A binding of the model, as in a .gin file.")


def main(argv: list[str]) -> None:
    folder = cli.output_folder(FLAGS.output)
    text, other = (x and read_text(Path(x)) for x in (FLAGS.text, FLAGS.other))
    from ttcd_kernels.table import format_table

    from ttcd_jax.inspection import inspect, with_stream_memory
    from ttcd_jax.inspection.inspection import row_of
    from ttcd_jax.run.directory import load_run
    from ttcd_jax.units import printable

    note(f"loading {FLAGS.run_dir}; its programs are compiled at the first layers")
    cli.keep_programs()
    run = load_run(FLAGS.run_dir, FLAGS.step, FLAGS.param)
    if FLAGS.stream_window is not None:
        run = with_stream_memory(run, window=FLAGS.stream_window)
    tokens, _ = row_of(run.tokenizer, text)
    if len(tokens) > FLAGS.max_tokens:
        note(f"the first {FLAGS.max_tokens:,} of {len(tokens):,} tokens (--max_tokens)")
    seen = inspect(run, tokens[: FLAGS.max_tokens], layers=FLAGS.layer)
    answers = []
    for query in FLAGS.query:
        if not len(found := seen.find(query)):
            raise UserError(f"--query={query!r} is not in the {len(seen.tokens):,} tokens read")
        answers.append(seen.writers(max(int(found[-1]), 1)))
    tables = {"Memories": seen.table(), "Controls": seen.controls(other)}
    for title, rows in tables.items():
        print(f"{title}\n{format_table(rows)}\n")
    for query, answer in zip(FLAGS.query, answers, strict=True):
        writers = format_table(answer.table()) if len(answer.positions) else "nothing was read"
        print(f"Who answered {query!r}, token {answer.token}\n{writers}\n")
    _write(seen, tables, answers, folder)
    print(printable(f"page {folder / 'index.html'}, arrays {folder / 'arrays.npz'}"))


def _write(seen: Any, tables: dict[str, Any], answers: list[Any], folder: Any) -> None:
    import numpy as np

    from ttcd_jax.inspection.show import answer, page_part
    from ttcd_jax.measure.page import Section, write_page

    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **seen.arrays())
    write_whole(folder / "arrays.npz", content.getvalue())
    views = [seen.show().html, seen.show("loudness").html, *map(answer, answers)]
    for layer in seen.layers:
        views += [seen.show(what, layer=layer).html for what in ("reads", "gate")]
    sections = [Section(title, rows) for title, rows in tables.items()]
    title = f"{len(seen.tokens):,} tokens of {FLAGS.text}, {seen.model.config.label}"
    page = folder / "index.html"
    write_page(page, title=title, sections=sections, views=page_part(*views))


if __name__ == "__main__":
    cli.run(main)
