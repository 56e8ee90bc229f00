"""Tasks of lm-evaluation-harness: HellaSwag, ARC, MMLU from local files, and any other."""

import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from ttcd_kernels.table import Row

from ttcd_jax.config import LIMIT, NonNegative
from ttcd_jax.errors import UserError
from ttcd_jax.measure.pictures import Picture
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Series, Subject, Task, digest, register


class Score(NamedTuple):
    """A metric of a task or group, `depth` groups down. `chance`: the accuracy that guessing
    reaches, None where there are no choices."""

    task: str
    metric: str
    value: float
    stderr: float | None
    chance: float | None
    items: int
    examples: int
    depth: int


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness(Task[Any, Score]):
    """Accuracies, or what else a task measures, with the harness' own prompts.

    `tasks`: names of tasks, groups and tags, also several separated by commas. `data`: a folder
    with hellaswag.jsonl, arc_easy.jsonl, arc_challenge.jsonl, mmlu_test.jsonl, mmlu_dev.jsonl
    (docs/evaluation.md). `include_path`: a folder of YAML files that define more tasks, and may run
    Python. `limit`: the first items of every task, or a share of them. `num_fewshot`: examples
    before a question; None: as the task says. `metadata`: a JSON object that some tasks read.
    """

    name = "harness"
    title = "lm-evaluation-harness: questions with choices, and other tasks"
    record = Score
    key = "task"
    x_label = "task and metric"
    rank = 48
    value = "value"

    tasks: tuple[str, ...] = ("hellaswag", "arc_easy", "arc_challenge", "mmlu")
    data: str | None = None
    include_path: str | None = None
    limit: Annotated[float, LIMIT] | None = None
    num_fewshot: NonNegative | None = None
    metadata: str | None = None

    def rows(self, subject: Subject) -> Any:
        if subject.tokenizer is None:
            raise UserError(f"{subject.run_dir} has no tokenizer: task harness is for text")
        try:
            metadata = json.loads(self.metadata or "{}")
        except ValueError as error:
            raise UserError(f"--metadata={self.metadata} is not JSON ({error})") from error
        if not isinstance(metadata, dict):
            raise UserError(f"--metadata={self.metadata} is no JSON object")
        names = [name for text in self.tasks for name in text.split(",") if name]
        options = {x: getattr(self, x) for x in ("data", "include_path", "limit", "num_fewshot")}
        return _library().load_tasks(names, **options, metadata=metadata)

    def measured_on(self, rows: Any, subject: Subject) -> dict[str, str]:
        """By task."""
        return {name: digest(documents) for name, documents in rows.documents().items()}

    def measure(self, scorer: Scorer, rows: Any, subject: Subject) -> list[Score]:
        return [Score(**record) for record in _library().measure(rows, scorer)]

    @classmethod
    def table(cls, series: Series[Score]) -> list[Row]:
        """The tasks asked for, without the members of groups; accuracies of choices in percent."""
        rows: dict[str, dict[str, Any]] = {}
        for name, records in series.items():
            for record in records:
                if record.depth == 0:
                    factor, unit = (1, "") if record.chance is None else (100, " (%)")
                    bucket = f"{record.task}, {record.metric}{unit}"
                    rows.setdefault(bucket, {cls.key: bucket})[name] = factor * record.value
        return [*rows.values()]

    @classmethod
    def unit(cls, series: Series[Score]) -> tuple[str, str]:
        return "value", "score" if None in _chances(series) else "accuracy (%)"

    @classmethod
    def pictures(cls, folder: Path, series: Series[Score], chance: float | None) -> list[Picture]:
        """The bars of the table, and the accuracy by guessing where all questions have as many
        choices."""
        chances = _chances(series)
        guess = chances.pop() if len(chances) == 1 else None
        return super().pictures(folder, series, None if guess is None else 100 * guess)

    @classmethod
    def comparable(cls, options: dict[str, Any], table: list[Row]) -> Any:
        """Other tasks share a table, with cells that are empty."""
        return [options.get(name) for name in ("limit", "num_fewshot", "metadata")]


def _chances(series: Series[Score]) -> set[float | None]:
    """The accuracies by guessing in the table."""
    return {x.chance for records in series.values() for x in records if x.depth == 0}


def _library() -> ModuleType:
    try:
        from ttcd_jax.measure import harness
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ttcd_jax"):
            raise
        raise UserError(
            f"task harness needs lm-eval ({error.name} is missing): install ttcd_jax[harness]"
        ) from error
    return harness
