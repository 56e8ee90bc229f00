"""The configuration of a run: the root of every .gin file and of `config.json`."""

import dataclasses
from typing import Annotated

from ttcd_jax.config import Bound, Config, NonNegative, Positive
from ttcd_jax.data.sources import DataConfig
from ttcd_jax.errors import UserError
from ttcd_jax.eval.tasks import find_task
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.train.loss import DEFAULT_ROWS
from ttcd_jax.train.optimizer import OptimizerConfig

SpikeFactor = Annotated[float, Bound("above 1, at most 1e6", lambda value: 1 < value <= 1e6)]

# The fields that may change when a run is resumed: sharding, parts of a step, evaluations, and what
# happens to bad steps.
LAYOUT = ("mesh", "accumulation_steps", "loss_rows", "evaluate_every", "tasks")
LAYOUT += ("max_skipped_steps", "spike_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """`batch_size` rows per step, computed in `accumulation_steps` parts one after another on the
    devices of `mesh`; None: as `ttcd_jax.run.layout` chooses for the available devices.
    `loss_rows`: rows of logits computed at once. `start_from`: a run directory whose newest
    parameters this run starts from, with a fresh optimizer; missing ones are drawn from `seed`.
    `start_drops`: patterns (`layers/*/mlp/proj`) of parameters that are not taken from it.
    `evaluate_every`: steps between evaluations of `tasks` on the current parameters, None for none.
    `max_skipped_steps`: so many bad steps of a run are skipped, the next one ends it. Bad is a loss
    or gradient that is not finite and, with `spike_factor`, a gradient norm above so many times its
    average (`ttcd_jax.train.bad_steps`).
    """

    model: TransformerConfig
    data: DataConfig
    optimizer: OptimizerConfig
    steps: Positive
    batch_size: Annotated[int, Bound("in 1 .. 16,777,216", lambda rows: 0 < rows <= 2**24)]
    accumulation_steps: Positive | None = None
    seed: Annotated[int, Bound("in 0 .. 2^32 - 1", lambda seed: 0 <= seed < 2**32)] = 0
    log_every: Positive = 10
    checkpoint_every: Positive = 200
    keep_checkpoints: Positive = 3
    loss_rows: Positive = DEFAULT_ROWS
    evaluate_every: Positive | None = None
    tasks: tuple[str, ...] = ("ppl",)
    max_skipped_steps: NonNegative = 0
    spike_factor: SpikeFactor | None = None
    start_from: str | None = None
    start_drops: tuple[str, ...] = ()
    mesh: MeshConfig | None = None

    @property
    def counts_skips(self) -> bool:
        """Whether the training state counts bad steps."""
        return self.max_skipped_steps > 0 or self.spike_factor is not None

    def validate(self) -> None:
        for name in self.tasks:
            find_task(name)
        if self.start_drops and self.start_from is None:
            raise UserError(
                f"RunConfig.start_drops {self.start_drops} without RunConfig.start_from: set the "
                "run whose parameters it names"
            )
        if self.accumulation_steps and self.batch_size % self.accumulation_steps:
            raise UserError(
                f"accumulation_steps {self.accumulation_steps} does not divide batch_size "
                f"{self.batch_size}"
            )
