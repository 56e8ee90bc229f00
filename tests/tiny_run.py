"""A tiny run: its flags, the losses it reports, and how tests wait for it."""

import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from ttcd_jax.run.reporting import read_metrics

BINDINGS = (
    *("RunConfig.batch_size=2", "RunConfig.log_every=1", "RunConfig.checkpoint_every=4"),
    *("TransformerConfig.dim=8", "TransformerConfig.mlp_dim=8", "TransformerConfig.num_heads=2"),
    *("TransformerConfig.num_layers=1", "TransformerConfig.fast_layers=(0,)"),
    *("TransformerConfig.window=8", "TransformerConfig.student_window=4"),
    *("MemoryConfig.chunk_size=4", "ScheduleConfig.peak=1e-2", "ScheduleConfig.warmup=2"),
)
RECALL = (
    *("STEPS=24", "TransformerConfig.vocab_size=8", "RecallConfig.num_slots=8"),
    *("RecallConfig.num_keys=4", "RecallConfig.num_values=4"),
)


def flags(gin: str, *bindings: str) -> list[str]:
    """The flags of `experiments.launch` for a file of experiments/configs, at tiny sizes."""
    return [f"--gin={gin}", *params(*BINDINGS, *bindings)]


def params(*bindings: str) -> list[str]:
    return [f"--param={binding}" for binding in bindings]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm of the gradient) of every step reported so far."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(run_dir / "metrics.jsonl")]


def wait_until(is_true: Callable[[], object], *processes: Popen) -> None:
    """Returns when `is_true`, while `processes` run; fails after 200 seconds."""
    deadline = time.monotonic() + 200
    while not is_true():
        for process in processes:
            assert process.poll() is None, ("it ended too early", process.communicate())
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_step(run_dir: Path, step: int, *processes: Popen) -> None:
    wait_until(lambda: any(done >= step for done, *_ in losses(run_dir)), *processes)
