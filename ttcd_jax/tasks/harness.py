"""Tasks of lm-evaluation-harness: HellaSwag, ARC, MMLU from local files, and any other."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from ttcd_jax.config import DISTINCT, LIMIT, NonNegative
from ttcd_jax.errors import UserError, listed
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
class Harness(Task[Any, Score]):
    """Accuracies, or what else a task measures, with the harness' own prompts.

    `tasks`: names of tasks, groups and tags, also several separated by commas. `data`: a folder
    with hellaswag.jsonl, arc_easy.jsonl, arc_challenge.jsonl, mmlu_test.jsonl, mmlu_dev.jsonl
    (docs/benchmarks.md). `include_path`: a folder of YAML files that define more tasks, and may run
    Python. `limit`: the first items of every task, or a share of them. `num_fewshot`: examples
    before a question; None: as the task says.
    """

    name = "harness"
    title = "lm-evaluation-harness: questions with choices, and other tasks"
    record = Score
    key = "task"
    x_label = "task and metric"
    rank = 48
    value = "value"
    opposite = "word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity"
    shaping = ("limit", "num_fewshot")  # tasks may differ

    tasks: Annotated[tuple[str, ...], DISTINCT] = ("hellaswag", "arc_easy", "arc_challenge", "mmlu")
    data: str | None = None
    include_path: str | None = None
    limit: Annotated[float, LIMIT] | None = None
    num_fewshot: NonNegative | None = None

    def rows(self, subject: Subject) -> Any:
        if subject.tokenizer is None:
            raise UserError(f"{subject.run_dir} has no tokenizer: task harness is for text")
        names = [name for text in self.tasks for name in text.split(",") if name]
        options = {x: getattr(self, x) for x in ("data", "include_path", "limit", "num_fewshot")}
        return _library().load_tasks(names, **options)

    def measured_on(self, rows: Any, subject: Subject) -> dict[str, str]:
        """By task."""
        names = dict.fromkeys(name for name, _ in rows)
        return {x: digest([question for name, question in rows if name == x]) for x in names}

    def measure(self, scorer: Scorer, rows: Any, subject: Subject) -> list[Score]:
        """A record for every metric of every task and group, members after their group."""
        results, loaded = _library().measure(rows, scorer), rows.loaded
        members = results["group_subtasks"]
        inner = {name for names in members.values() for name in names}
        roots = [name for name in (*loaded["tasks"], *members) if name not in inner]
        records = [record for name in roots for record in _records(name, 0, loaded, results)]
        if not records:
            raise UserError(f"the harness measures nothing of {listed(roots)}: check their metrics")
        return records

    @classmethod
    def columns(cls, series: Series[Score]) -> dict[str, dict[Any, Any]]:
        """The tasks asked for, without the members of groups; accuracies of choices in percent."""
        columns: dict[str, dict[str, float]] = {name: {} for name in series}
        for name, record in ((x, y) for x in series for y in series[x] if y.depth == 0):
            factor, unit = (1, "") if record.chance is None else (100, " (%)")
            columns[name][f"{record.task}, {record.metric}{unit}"] = factor * record.value
        return columns

    @classmethod
    def unit(cls, series: Series[Score]) -> tuple[str, str]:
        return "value", "score" if None in (_chances(series) or {None}) else "accuracy (%)"

    @classmethod
    def pictures(cls, folder: Path, series: Series[Score], chance: float | None) -> list[Picture]:
        """The bars of the table, with the accuracy by guessing where all questions have one."""
        chances = _chances(series)
        guess = chances.pop() if len(chances) == 1 else None
        return super().pictures(folder, series, None if guess is None else 100 * guess)


def _chances(series: Series[Score]) -> set[float | None]:
    """The accuracies by guessing in the table."""
    return {x.chance for records in series.values() for x in records if x.depth == 0}


def _records(name: str, depth: int, loaded: Any, results: Any) -> Iterator[Score]:
    """Those of a task, or of a group and its members."""
    values, group = results["results"][name], loaded["groups"].get(name)
    tasks = [loaded["tasks"][name]] if group is None else group.get_all_tasks()
    # The reciprocal number of choices of every item.
    chances = [
        1 / count
        for task in tasks
        if task.OUTPUT_TYPE == "multiple_choice"
        for count in Counter(instance.doc_id for instance in task.instances).values()
    ]
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and _number(value) is not None:
            is_choice = chances and metric in ("acc", "acc_norm")
            yield Score(
                task=name,
                metric=metric if kind == "none" else f"{metric} ({kind})",
                value=float(value),
                stderr=_number(values.get(f"{metric}_stderr,{kind}")),
                chance=sum(chances) / len(chances) if is_choice else None,
                items=sum(results["n-samples"][task.task_name]["effective"] for task in tasks),
                examples=max(task.get_config("num_fewshot") for task in tasks),
                depth=depth,
            )
    for member in () if group is None else group.child_names:
        yield from _records(member, depth + 1, loaded, results)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


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
