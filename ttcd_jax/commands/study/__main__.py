"""Trains several recipes with several seeds, evaluates all of them on the same texts, compares.

    ttcd study --gin=study/language.gin [--param="BOOKS='FOLDER'" ...]
               [--run_dir=DIR] [--only=NAME ...] [--records=FILE]

--param binds fields of the study and of its evaluations (StudyConfig.seeds=(3,)), any other one
those of all recipes and their controls. Every run has a folder DIR/NAME-SEED; the same command
continues after an interruption and computes what is missing. At the end it prints the tables and
writes DIR/index.html. Intervals are over seeds and documents; a table shows every seed.
"""

from pathlib import Path

from absl import flags

from ttcd_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("gin", None, "One of `ttcd recipes study`, or a path.", required=True)
flags.DEFINE_multi_string("param", [], "A binding of the study or of all its recipes.")
flags.DEFINE_string("run_dir", None, "The folder (default: runs/study-<name of the gin file>).")
flags.DEFINE_string("records", None, "Write a JSON line per row, for the tables of pages.")
flags.DEFINE_multi_string("only", [], "Train and evaluate only this recipe; repeat for more.")


def main(argv: list[str]) -> None:
    from ttcd_jax.commands.study import runs as study
    from ttcd_jax.config import check_text
    from ttcd_jax.run.bindings import load_config, reachable_classes
    from ttcd_jax.run.directory import RunDirectory

    classes = reachable_classes(study.StudyConfig)
    own = [text for text in FLAGS.param if text.partition(".")[0].strip() in classes]
    params = [text for text in FLAGS.param if text not in own]
    config = load_config(study.StudyConfig, FLAGS.gin, own, config_dir=cli.CONFIG_DIR)
    runs = config.runs(params)
    chosen = config.chosen(runs, FLAGS.only)
    path = Path(FLAGS.run_dir or f"runs/study-{Path(FLAGS.gin).stem}")
    check_text("--run_dir", str(path))  # refused in a bucket
    with RunDirectory(path).lock():
        texts = study.held_out_texts(config, runs, path)
        for name, seed in sorted(chosen, key=lambda run: run[0] != study.START):
            study.compute(config, name, seed, runs[name], texts, path)
        sections = study.write_study(config, runs, texts, path)
        if FLAGS.records is not None:
            command = cli.command_line("study")
            study.write_records(config, runs, sections, path, FLAGS.records, command)


if __name__ == "__main__":
    cli.run(main, options=cli.recipe_options)
