"""Plans recipes on described GPUs: a line of records for each recipe and topology.

    python -m experiments.plans --records=FILE [--gin=ipttcd_760m.gin ...] [--topology=h100x64 ...]

Lines that FILE has are not planned again, so the command goes on where it stopped; a step that does
not divide among the devices has the reason in place of its layout. It compiles a step in a minute.
"""

import json
from pathlib import Path

import jax
from absl import flags
from ttcd_kernels.measure import environment

from experiments import cli, plan
from ttcd_jax.errors import UserError
from ttcd_jax.files import parse_json
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.described import missing_compiler

TOPOLOGIES = ("h100x8", "h100x64", "h100x512", "h200x64", "b200x64")
FLAGS = flags.FLAGS
flags.DEFINE_string("records", None, "The file, a JSON line per row.", required=True)
flags.DEFINE_multi_string("gin", [], "A file in experiments/configs/; default: the paper's.")
flags.DEFINE_multi_string("topology", [], f"Devices; default: {', '.join(TOPOLOGIES)}.")
FIRST = ("ipttcd_760m.gin", "swa_760m.gin", "ipttcd_340m.gin", "swa_340m.gin")


def recipes() -> list[str]:
    """The paper's: from scratch, their ablations, and continued."""
    found = (
        str(path.relative_to(cli.CONFIG_DIR))
        for pattern in ("*_[37][46]0m*.gin", "ablation/*.gin", "cpt/*.gin")
        for path in sorted(cli.CONFIG_DIR.glob(pattern))
    )
    return [*dict.fromkeys((*FIRST, *found))]


def main(argv: list[str]) -> None:
    if (reason := missing_compiler()) is not None:
        raise UserError(f"plans are compiled for described GPUs, and {reason}")
    cli.keep_programs("")
    file = Path(FLAGS.records)
    if not file.exists():
        head = {"command": f"python -m experiments.plans --records={file.as_posix()}"}
        head |= {"commit": environment()["commit"], "device": "none: compiled for described GPUs"}
        file.write_text(json.dumps(head) + "\n", encoding="utf-8")
    lines = [parse_json(line, file) for line in file.read_bytes().splitlines()]
    done = {(row["row"], row["devices"]) for row in lines[1:]}
    for topology in FLAGS.topology or TOPOLOGIES:
        target = plan.use_topology(topology)
        for gin in FLAGS.gin or recipes():
            if (name := gin.removesuffix(".gin"), topology) not in done:
                row = {"row": name, "devices": topology} | row_of(gin, target)
                with file.open("a", encoding="utf-8") as records:
                    records.write(json.dumps(row) + "\n")
                jax.clear_caches()


def row_of(gin: str, target: plan.Target) -> dict[str, str | float | bool | list[float]]:
    """What the records have of a plan: GiB and milliseconds of one device, and its layout."""
    config = load_config(RunConfig, gin, (), config_dir=cli.CONFIG_DIR)
    try:
        config, mesh, found = plan.plan_of(config, target)
    except UserError as error:
        return {"layout": str(error)}
    if isinstance(found.sent, str):
        raise UserError(f"{gin}: not counted: {found.sent}")
    total = sum(found.used.values())
    times = plan.times_of(plan.flops_of(config) / mesh.size, found.sent, target.hardware)
    sent = {"NVLink": [0.0, 0.0], "network": [0.0, 0.0]}
    for (_, link), values in times.links.items():
        sent[link] = [x + y for x, y in zip(sent[link], values, strict=True)]
    layout = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return {
        "layout": f"{layout}; {config.accumulation_steps}",
        "GiB": round(total / 2**30, 2),
        "fits": "yes" if total <= plan.room(target.hardware) else "no",
        **{f"{link} GiB": round(size / 2**30, 2) for link, (size, _) in sent.items()},
        **{f"{link} ms": round(1e3 * seconds, 1) for link, (_, seconds) in sent.items()},
        "FLOPs ms": round(1e3 * times.flops, 1),
        "step ms": [round(1e3 * times.shortest, 1), round(1e3 * times.longest, 1)],
    }


if __name__ == "__main__":
    cli.run(main)
