"""What one run is: the root of every .gin file and of `config.json`."""

import dataclasses

from ttcd_jax.config import Config
from ttcd_jax.data.sources import DataConfig
from ttcd_jax.errors import UserError
from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.train.loss import DEFAULT_ROWS
from ttcd_jax.train.optimizer import OptimizerConfig

# The fields that say where and in which parts a step is computed, not what it computes.
LAYOUT = ("mesh", "accumulation_steps", "loss_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """`batch_size` rows per step, computed in `accumulation_steps` parts one after another.
    `loss_rows`: rows of logits that exist at once. `start_from`: a run directory whose newest
    parameters this run starts from, with a fresh optimizer; `model`, unless bound, is that run's.
    A run may go on with another `LAYOUT` than it was started with.
    """

    model: TransformerConfig
    data: DataConfig
    optimizer: OptimizerConfig
    steps: int
    batch_size: int
    accumulation_steps: int = 1
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 200
    keep_checkpoints: int = 3
    loss_rows: int = DEFAULT_ROWS
    start_from: str | None = None
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def validate(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "accumulation_steps",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
            "loss_rows",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"RunConfig.{name} {getattr(self, name)} must be at least 1")
        if self.batch_size % self.accumulation_steps:
            raise UserError(
                f"accumulation_steps {self.accumulation_steps} does not divide batch_size "
                f"{self.batch_size}"
            )
