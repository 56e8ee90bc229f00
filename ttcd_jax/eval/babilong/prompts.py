"""Prompts of BABILong and judgement of answers, in two published forms.

"official": github booydar/babilong (Apache-2.0). "harness": EleutherAI's lm-evaluation-harness
0.4.13 (MIT), tasks babilong_qa1 to babilong_qa5, with two worked examples. `prompts.json` has their
texts word for word, by form and task.
"""

import functools
import re
from pathlib import Path
from typing import Literal

from ttcd_jax.eval.babilong.stories import BabiTask
from ttcd_jax.eval.babilong.world import GIVERS, OBJECTS, PLACES
from ttcd_jax.files import read_json

Form = Literal["official", "harness"]

NEW_TOKENS: dict[Form, int] = {"official": 20, "harness": 16}
# The words of which every answer of a task is one.
LABELS: dict[BabiTask, tuple[str, ...]] = {"qa1": PLACES, "qa2": PLACES, "qa3": PLACES}
LABELS |= {"qa4": PLACES, "qa5": (*GIVERS, *OBJECTS)}


@functools.cache
def _templates() -> dict[str, dict[str, str]]:
    return read_json(Path(__file__).with_name("prompts.json"))


def prompt(form: Form, task: BabiTask, context: str, question: str) -> str:
    template = _templates()[form][task]
    return template.format(context=context.strip(), question=question.strip())


def is_right(form: Form, task: BabiTask, target: str, output: str, question: str) -> bool:
    """Whether the generated `output` answers `question` by `target`, capitals aside.

    official: of the labels of the task, its first sentence, up to another example, has the target
    alone; labels in the question do not count. harness: it has the target.
    """
    target, output, question = target.lower(), output.lower(), question.lower()
    if form == "harness":
        return target.strip() in re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()
    sentence = re.split(r"\.|<context>|<example>", output)[0]
    labels = {label.lower() for label in LABELS[task]}
    return {x for x in labels if x in sentence and x not in question} == {target}
