"""A tiny run: its flags, the losses it reports, and how tests wait for it; a saved tiny model."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from flax import nnx

from ttcd_jax import Transformer, TransformerConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.run.directory import IMPORT, IMPORTED, RunDirectory
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.train.checkpoint import Checkpoints

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


def save_text_model(
    run_dir: Path, model: TransformerConfig, change: Callable[[dict], None] = lambda params: None
) -> None:
    """A run directory, as if imported, of random parameters at step 7, which `change` edits."""
    directory = RunDirectory(run_dir)
    directory.path.mkdir(parents=True)
    params = nnx.to_pure_dict(nnx.state(Transformer(model, rngs=nnx.Rngs(0)), nnx.Param))
    change(params)
    with contextlib.closing(Checkpoints(directory.checkpoints, model=model)) as checkpoints:
        checkpoints.save(7, {"params": params})
    data = {"type": IMPORTED, "seq_len": 32, "tokenizer": TokenizerConfig().to_dict()}
    directory.write({"model": model.to_dict(), "data": data}, {}, IMPORT)
