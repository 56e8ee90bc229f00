"""Evaluates a run directory and writes JSON, CSV and a picture into it.

    ttcd evaluate --run_dir=DIR --task=NAME [--text=PATH] [--step=N] [--OPTION=VALUE ...]
                  [--param=TransformerConfig.window=8192 ...] [--label=NAME]
                  [--mesh=data=2,seq=2] [--distributed=slurm] [--records=FILE]
    ttcd evaluate --help                   the tasks
    ttcd evaluate --task=NAME --help       the options of a task

Text is the held-out part of the run's corpus, unless --text names other. A model with a memory is
measured with its fast weights on and off (eta = 0). docs/evaluation.md describes every task.
--param changes what needs no other parameters: windows, YaRN, options of the task
(--param='Perplexity.seq_len=512' is --seq_len=512). Results go to eval/TASK in the run, those of a
changed or labelled model to a folder next to it. An interrupted evaluation goes on. All devices are
used.
"""

from absl import flags

from ttcd_jax.commands import cli
from ttcd_jax.config import Config

FLAGS = flags.FLAGS
cli.define_distributed()
flags.DEFINE_string("run_dir", None, "The run directory.", required=True)
flags.DEFINE_string("task", None, "The task; its options follow.", required=True)
flags.DEFINE_integer("step", None, "The checkpoint (default: the newest).")
flags.DEFINE_list("mesh", [], "Devices along mesh axes, as data=2,seq=2; fsdp takes the rest.")
flags.DEFINE_string("label", None, "Name of this run in tables and pictures (default: its method).")
flags.DEFINE_multi_string(
    "param", [], "A binding of the model or the task, as in a .gin file; may be repeated."
)
flags.DEFINE_string("records", None, "Write a JSON line per row, for the tables of pages.")


def main(argv: list[str]) -> None:
    import jax
    from ttcd_kernels.table import format_table

    from ttcd_jax.measure.page import Section
    from ttcd_jax.measure.results import evaluate
    from ttcd_jax.measure.task import Subject
    from ttcd_jax.run.bindings import rebound
    from ttcd_jax.run.directory import RunDirectory, load_run
    from ttcd_jax.run.model_changes import describe
    from ttcd_jax.run.page import write_records
    from ttcd_jax.sharding.mesh import MeshConfig, build_mesh
    from ttcd_jax.tasks import find_task
    from ttcd_jax.terminal import note
    from ttcd_jax.train.watchdog import Watchdog
    from ttcd_jax.units import printable

    kind = find_task(FLAGS.task)
    own = [x for x in FLAGS.param if x.startswith(f"{kind.__name__}.")]
    params = [x for x in FLAGS.param if x not in own]
    task = rebound(cli.parse_options(kind, f"task {FLAGS.task}", argv[1:]), own)
    data = RunDirectory(FLAGS.run_dir).read_part("data")
    mesh_config = cli.parse_options(MeshConfig, "--mesh", FLAGS.mesh)
    note(f"loading {FLAGS.run_dir}; programs are compiled at the first rows of {task.title}")
    cli.connect()
    with Watchdog(jax.process_count()), jax.set_mesh(build_mesh(mesh_config)):
        run = load_run(FLAGS.run_dir, FLAGS.step, params)
        changes = describe(params)
        subject = Subject(run.model, run.tokenizer, data, FLAGS.run_dir, FLAGS.label, changes)
        result = evaluate(task, subject, run.step)
        if jax.process_index() == 0:
            folder = result.write()
            print(f"{task.title} (step {run.step}, {result.rows} rows)")
            print(format_table(result.table))
            print(printable(f"written to {folder}"))
            if FLAGS.records is not None:
                found, command = [Section(task.title, result.table)], cli.command_line("evaluate")
                write_records(FLAGS.records, found, [result.run_dir], command)


def _options(arguments: list[str]) -> type[Config] | str:
    from ttcd_jax.tasks import TASKS

    lines = [f"  {name:<14}{task.title}" for name, task in TASKS.items()]
    return TASKS.get(FLAGS.task) or "\n".join(["\ntasks:", *lines, ""])


if __name__ == "__main__":
    cli.run(main, arguments=None, options=_options)
