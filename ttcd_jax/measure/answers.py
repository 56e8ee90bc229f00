"""What a page says first: whether a memory helps, how much and where, and what it costs.

Everything is compared in pairs, on the same cases: the memory on and off, and the run with its
control, which has no memory and was trained on the same data.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ttcd_kernels.table import Row

from ttcd_jax import units
from ttcd_jax.errors import listed
from ttcd_jax.measure.page import Answer
from ttcd_jax.measure.pictures import is_off, stem_of
from ttcd_jax.measure.task import Differences, Series, Task

type Seeds = Mapping[int, Series[Any]]
MOST_TASKS = 3  # of a run in its answer
_WORDS = (1, "better"), (-1, "worse")


class Facts(NamedTuple):
    """What a page knows of a run: the label of its method, whether it writes a memory, its data and
    windows, and what it costs; None where that is not known."""

    method: str
    has_memory: bool
    data: str
    window: int | None
    steps: int | None
    device: str
    tokens_per_second: float | None
    flops: float  # per token, in training
    state: int | None  # bytes held per text


class Measured(NamedTuple):
    """A task and its series by run and seed."""

    task: type[Task]
    title: str
    runs: Mapping[str, Seeds]


def controls(facts: Mapping[str, Facts]) -> dict[str, str]:
    """By run its control, if there is one: without a memory, at best under the same window; for a
    memory without one, the same with equal windows."""
    found = {}
    for run, own in facts.items():
        others = [x for x, y in facts.items() if x != run and y.data == own.data]
        silent = [x for x in others if not facts[x].has_memory]
        silent.sort(key=lambda x: (facts[x].window != own.window, facts[x].steps != own.steps))
        equal = [x for x in others if facts[x].method == f"{own.method}, no gap"]
        if own.has_memory and (silent or equal):
            found[run] = (silent or equal)[0]
    return found


def compared(measured: Measured, run: str, control: str | None) -> dict[str, Differences]:
    """The differences of a run: "on - off" and "less CONTROL", where both were measured."""
    on, found = _by_seed(measured, run), {}
    off, base = _by_seed(measured, run, wants_off=True), _by_seed(measured, control or "")
    for name, other in (("on - off", off), (f"less {control}", base)):
        if both := [seed for seed in on if seed in other]:
            pair = [on[seed] for seed in both], [other[seed] for seed in both]
            found[name] = measured.task.differences(*pair)
    return {name: x for name, x in found.items() if x}


def _by_seed(measured: Measured, run: str, *, wants_off: bool = False) -> dict[int, list[Any]]:
    """The records of the run itself, not of a changed model, with its memory on or off."""
    return {
        seed: records
        for seed, series in measured.runs.get(run, {}).items()
        for name, records in series.items()
        if stem_of(name) == run and is_off(name) == wants_off
    }


def with_differences(
    table: Sequence[Row], measured: Measured, controls_of: Mapping[str, str]
) -> list[Row]:
    """The table with the differences that it lacks behind the columns of their run: mean ± half."""
    rows: list[Any] = [dict(row) for row in table]
    key = measured.task.key
    for run in measured.runs:
        own = {x for row in rows for x in row if f"{x}, ".startswith(f"{run}, ")}
        for name, found in compared(measured, run, controls_of.get(run)).items():
            column = f"{run}, {name}"
            texts = {str(x): f"{y:+.3f}{_half(*ends)}" for x, (y, *ends) in found.items()}
            texts = [texts.get(str(row.get(key))) for row in rows]
            if not any(texts) or any(x.startswith(column) for x in own):
                continue
            for i, text in enumerate(texts):
                items = [*rows[i].items()]
                last = max(j for j, (x, _) in enumerate(items) if x in {*own, key}) + 1
                rows[i] = dict([*items[:last], (column, text), *items[last:]])
            own.add(column)
    return rows


def _half(low: float, high: float) -> str:
    return "" if math.isnan(high - low) else f" ± {(high - low) / 2:.3f}"


def answers(everything: Sequence[Measured], facts: Mapping[str, Facts]) -> list[Answer]:
    """One for every run with a memory, and one that names the runs that were not evaluated."""
    of_run, found = controls(facts), []
    for run in (run for run, x in facts.items() if x.has_memory):
        control, texts, verdicts = of_run.get(run), [], {}
        for measured in everything:
            pairs = compared(measured, run, control)
            if pairs and not measured.task.is_detail and len(texts) < MOST_TASKS:
                of_all = all(measured.task.whole in x for x in pairs.values())
                verdicts.setdefault(of_all, f"{run}: {_verdict(measured.task, pairs)}.")
                parts = (_sentence(measured, run, *pair) for pair in pairs.items())
                texts.append(f"{measured.title}: {'; '.join(parts)}.")
        texts.append(_cost(facts[run], control, facts.get(control or "")))
        if any(run in x.runs for x in everything):
            verdict = verdicts.get(True) or verdicts.get(False)
            found.append(Answer(verdict or f"{run}: nothing to compare it with.", " ".join(texts)))
    if alone := [x for x, y in facts.items() if y.has_memory and x not in of_run]:
        text = "A run of SWA on the same data would show what a memory is worth against a model"
        text = f"{', '.join(alone)}. {text} trained without one."
        found.append(Answer("No control here:", text))
    over = {x.task.interval for x in everything if x.task.interval != "seeds"}
    if found and over:
        is_seeded = any(len(y) > 1 for x in everything for y in x.runs.values())
        names = [*(["seeds"] if is_seeded else []), *sorted(over)]
        text = f"half of a 95 % interval over {' and '.join(names)}, in pairs where cases are."
        found.append(Answer("±:", text))
    missing = [run for run in facts if not any(run in x.runs for x in everything)]
    for run in missing if everything else ():
        tasks = ", ".join(dict.fromkeys(x.task.name for x in everything))
        text = f"the other runs here were, by {tasks} (`ttcd evaluate --run_dir=... --task=...`)."
        found.append(Answer(f"{run} was not evaluated:", text))
    return found


def judged(task: type[Task], bucket: Any, mean: float, low: float, high: float) -> int | None:
    """1 for better, -1 for worse, 0 for no difference that the interval shows; None without one."""
    if math.isnan(low) or math.isnan(high):
        return None
    sign = -1 if task.prefers_less(str(bucket)) else 1
    return 0 if low <= 0 <= high else int(sign * math.copysign(1, mean))


def _verdict(task: type[Task], pairs: Mapping[str, Differences]) -> str:
    """Against the control, then on against off."""
    parts = []
    for less, found in sorted(pairs.items()):
        is_own, control = less == "on - off", less.removeprefix("less ")
        than = "with its memory on than off" if is_own else f"than {control}"
        seen = "between its memory on and off" if is_own else f"from {control}"
        words: dict[int | None, str] = {
            1: f"better {than}",
            -1: f"worse {than}",
            0: f"no difference {seen} is seen",
            None: f"whether it is better {than} is not known (no interval)",
        }
        bucket, values = _headline(task, found)
        of = "" if bucket == task.whole else f" ({bucket})"
        parts.append(words[judged(task, bucket, *values)] + of)
    return "; ".join(parts)


def _headline(task: type[Task], found: Differences) -> tuple[Any, tuple[float, float, float]]:
    """The bucket of everything, else the last one."""
    return (x := task.whole if task.whole in found else [*found][-1]), found[x]


def _axis(task: type[Task]) -> str:
    return task.x_label.partition(" (")[0]


def place(task: type[Task], bucket: Any) -> str:
    """Where a value was measured, for a sentence."""
    return "" if bucket == task.whole else f" ({_axis(task)}: {bucket})"


def _sentence(measured: Measured, run: str, less: str, found: Differences) -> str:
    """The bucket of everything, else the last one, and where a run is better."""
    task, (bucket, (mean, low, high)) = measured.task, _headline(measured.task, found)
    unit = task.difference or task.unit(next(iter(measured.runs[run].values())))[1]
    what = "with the memory on than off" if less == "on - off" else f"than {less[5:]}"
    text = f"{abs(mean):.3f}{_half(low, high)} {unit} {'lower' if mean < 0 else 'higher'} {what}"
    text += place(task, bucket)
    sides = {x: judged(task, x, *y) for x, y in found.items() if x != task.whole}
    if None in sides.values() or len(sides) < 2:
        return text
    named = {word: [str(x) for x in sides if sides[x] == side] for side, word in _WORDS}
    last = [*itertools.takewhile(lambda x: sides[x] == 1, [*sides][::-1])]
    start = last and re.match(r"(?:beyond )?(\d+)", str(last[-1]))
    if start and len(sides) > len(last) == len(named["better"]):
        return f"{text}, better from {start[1]} on ({_axis(task)})"
    words = (f"{y} in {len(x)} of {len(sides)} ({listed(x)})" for y, x in named.items() if x)
    return ", ".join([text, *words])


def _cost(own: Facts, control: str | None, other: Facts | None) -> str:
    held = [f"{units.size(own.state)} held per text"] if own.state else []
    speed = own.tokens_per_second
    if other is None:
        parts = [f"{speed:,.0f} tokens/s in training"] if speed else []
        return f"Cost: {', '.join([*parts, f'{own.flops:.3g} FLOPs per token', *held])}."
    parts = [f"{own.flops / other.flops:.2f} times the FLOPs per token of {control}", *held]
    if own.state and other.state:
        parts[-1] += f" ({own.state / other.state:.2f} times)"
    if speed and other.tokens_per_second and own.device == other.device:
        parts.insert(0, f"{speed / other.tokens_per_second:.2f} times the tokens/s")
    steps = f" {control} was trained {other.steps} steps, not {own.steps}."
    return f"Cost: {', '.join(parts)}.{steps if own.steps != other.steps else ''}"
