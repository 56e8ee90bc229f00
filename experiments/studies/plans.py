"""Plans recipes on described GPUs: a line of records for each recipe and topology.

    python -m experiments.plans --records=FILE [--gin=ipttcd_760m.gin ...] [--topology=h100x64 ...]

Lines that FILE has are not planned again, so the command goes on where it stopped. A step that does
not divide among the devices has the reason in place of its layout.
"""

import json
from pathlib import Path

import jax
from absl import flags
from ttcd_kernels.measure import environment

from ttcd_jax.commands import cli, plan
from ttcd_jax.errors import UserError
from ttcd_jax.files import parse_json
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.described import missing_compiler

TOPOLOGIES = ["h100x8", "h100x64", "h100x512", "h200x64", "b200x64"]
RECIPES = [
    str(path.relative_to(cli.CONFIG_DIR))
    for pattern in ("*_[37][46]0m*.gin", "ablation/*.gin", "cpt/*.gin")
    for path in sorted(cli.CONFIG_DIR.glob(pattern))
]
FLAGS = flags.FLAGS
flags.DEFINE_string("records", None, "The file, a JSON line per row.", required=True)
flags.DEFINE_multi_string("gin", RECIPES, "A file in experiments/configs/.")
flags.DEFINE_multi_string("topology", TOPOLOGIES, "Devices.")


def main(argv: list[str]) -> None:
    if (reason := missing_compiler()) is not None:
        raise UserError(f"plans are compiled for described GPUs, and {reason}")
    plan.use_topology(FLAGS.topology[0])  # before `environment` asks JAX for its devices
    jax.config.update("jax_enable_compilation_cache", False)
    file = Path(FLAGS.records)
    if not file.exists():
        head = {"command": f"python -m experiments.plans --records={file.as_posix()}"}
        head |= {"commit": environment()["commit"], "device": "none: compiled for described GPUs"}
        file.write_text(json.dumps(head) + "\n", encoding="utf-8")
    rows = [parse_json(line, file) for line in file.read_bytes().splitlines()[1:]]
    done = {(row["row"], row["devices"]) for row in rows}
    for topology in FLAGS.topology:
        target = plan.use_topology(topology)
        for gin in FLAGS.gin:
            if (name := gin.removesuffix(".gin"), topology) not in done:
                config = load_config(RunConfig, gin, (), config_dir=cli.CONFIG_DIR)
                row = {"row": name, "devices": topology} | row_of(config, target)
                with file.open("a", encoding="utf-8") as records:
                    records.write(json.dumps(row) + "\n")
                jax.clear_caches()


def row_of(config: RunConfig, target: plan.Target) -> dict[str, str | float | list[float]]:
    """The layout of a plan, GiB and milliseconds of one device."""
    try:
        config, mesh, (used, sent, _) = plan.plan_of(config, target)
    except UserError as error:
        return {"layout": str(error)}
    if isinstance(sent, str):
        raise UserError(f"not counted: {sent}")
    times = plan.times_of(plan.flops_of(config) / mesh.size, sent, target.hardware)
    layout = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    row = {"layout": f"{layout}; {config.accumulation_steps}"}
    total, (there, _) = sum(used.values()), plan.room(target)
    row |= {"GiB": round(total / 2**30, 2), "fits": "yes" if total <= there else "no"}
    for link in ("NVLink", "network"):
        found = [values for (_, name), values in times.links.items() if name == link]
        row[f"{link} GiB"] = round(sum(size for size, _ in found) / 2**30, 2)
        row[f"{link} ms"] = round(1e3 * sum(seconds for _, seconds in found), 1)
    row["FLOPs ms"] = round(1e3 * times.flops, 1)
    return row | {"step ms": [round(1e3 * x, 1) for x in (times.shortest, times.longest)]}


if __name__ == "__main__":
    cli.run(main)
