"""The files that start a run on a cluster: their fields, and their commands run with stubs."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from commands import ROOT
from jax.sharding import AbstractMesh
from small_models import recipe

from ttcd_jax.run import layout
from ttcd_jax.sharding.distributed import detect
from ttcd_jax.train.watchdog import PEER_LOST

SBATCH = ROOT / "experiments/cluster/slurm.sbatch"
OPTIONS = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SBATCH.read_text(), re.MULTILINE))
RESUME_ME, KILLED = 75, 137
JOBSET = yaml.safe_load((ROOT / "experiments/cluster/jobset.yaml").read_text())
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
STUB = """#!/usr/bin/env bash
echo "$(basename "$0")" "$@" >>"$CALLS"
[[ $(basename "$0") == srun ]] && exit "$STATUS"
"""


@pytest.fixture
def sbatch(tmp_path):
    """Runs the script with an srun that ends with a status; returns (status, its calls)."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, srun_status=0, **environment):
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATUS": str(srun_status)}
        environment |= {"CALLS": str(tmp_path / "calls")}
        environment |= {"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_ID": "5"}
        result = subprocess.run(["bash", SBATCH, *arguments], env=environment, timeout=60)
        return result.returncode, (tmp_path / "calls").read_text().splitlines()

    return run


def _launch_flags(command):
    """(gin, run_dir, distributed) of a command line, as the launch reads it."""
    known = ["python", "-m", "experiments.launch"], ["ttcd", "launch"]
    (start,) = (x for x in known if command[: len(x)] == x)
    program = (
        "import sys; from ttcd_jax.commands import launch; flags = launch.FLAGS; flags(sys.argv);"
        "print(flags.gin, flags.run_dir, flags.distributed)"
    )
    line = [sys.executable, "-c", program, *command[len(start) :]]
    return tuple(subprocess.check_output(line, cwd=ROOT, text=True).split())


def test_slurm_starts_the_launch_on_every_node_and_sends_its_processes_the_signal(sbatch):
    status, (call,) = sbatch("--gin=ipttcd_760m.gin", "--run_dir=runs/a")
    srun, cpus, python, *rest = call.split()
    assert (status, srun, cpus, python) == (0, "srun", "--cpus-per-task=64", ".venv/bin/python")
    assert _launch_flags(["python", *rest]) == ("ipttcd_760m.gin", "runs/a", "slurm")
    assert OPTIONS["ntasks-per-node"] == "1"
    assert re.fullmatch(r"TERM@\d+", OPTIONS["signal"])  # with B: the shell alone would get it
    assert "requeue" in OPTIONS


@pytest.mark.parametrize(
    ("status", "restarts", "is_requeued"),
    [
        *((status, 0, False) for status in (0, 1, 2, 5)),
        *((RESUME_ME, restarts, True) for restarts in (0, 99)),
        *((lost, restarts, restarts < 10) for lost in (PEER_LOST, KILLED) for restarts in (9, 10)),
    ],
)
def test_slurm_requeues_what_goes_on_from_its_checkpoint(sbatch, status, restarts, is_requeued):
    seen, calls = sbatch(srun_status=status, SLURM_RESTART_COUNT=str(restarts))
    assert seen == status
    assert calls[1:] == (["scontrol requeue 5"] if is_requeued else [])


def test_a_jobset_is_one_indexed_job_whose_pods_find_their_coordinator():
    assert (REPLICATED["replicas"], JOB["completionMode"]) == (1, "Indexed")
    assert JOB["parallelism"] == JOB["completions"]
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in POD["volumes"]}
    _, run_dir, distributed = _launch_flags(CONTAINER["command"] + CONTAINER["args"])
    assert run_dir.startswith(tuple(mounts.values()))
    name = JOBSET["metadata"]["name"]
    annotations = {"jobset-name": name, "replicatedjob-name": REPLICATED["name"]}
    environ = {"JOB_COMPLETION_INDEX": "3"}  # Kubernetes sets it in pods of an indexed Job
    for entry in CONTAINER["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        found = re.fullmatch(r"metadata\.annotations\['jobset\.sigs\.k8s\.io/(.*)'\]", path)
        environ[entry["name"]] = annotations[found[1]] if found else entry["value"]
    (port,) = [entry["containerPort"] for entry in CONTAINER["ports"]]
    host = f"{name}-{REPLICATED['name']}-0-0.{name}"
    assert detect(distributed, environ)[1:] == (host, port, JOB["completions"], 3)


def test_the_jobset_and_the_slurm_job_have_64_devices_over_which_the_recipe_is_sharded():
    assert JOB["completions"] * CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == 64
    assert int(OPTIONS["nodes"]) * int(OPTIONS["gpus-per-node"]) == 64
    flags = [flag.split("=", 1) for flag in CONTAINER["args"]]
    (gin,), params = ([y for x, y in flags if x == name] for name in ("--gin", "--param"))
    config = recipe(gin, *params)
    sizes = layout.mesh_config(config, 64, JOB["completions"]).sizes(64)
    assert sizes == {"data": 8, "fsdp": 4, "seq": 2, "tensor": 1}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    assert (layout.num_parts(config, mesh), config.model.remat) == (1, "block")


def test_a_jobset_restarts_without_limit_after_a_signal_only():
    policy = JOBSET["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert (policy["maxRestarts"] > 0, JOB["backoffLimit"]) == (True, 0)
    exit_rule, disruption = JOB["podFailurePolicy"]["rules"]
    assert exit_rule["action"] == disruption["action"] == "FailJob"
    codes = {"containerName": CONTAINER["name"], "operator": "In", "values": [RESUME_ME]}
    assert exit_rule["onExitCodes"] == codes
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # A pod failure policy needs both: no restart of a container, and time to save.
    assert POD["restartPolicy"] == "Never"
    assert POD["terminationGracePeriodSeconds"] >= 60
