"""What the real model is asked, as tokens: texts, excerpts, questions, long contexts.

python -m tests.smollm2.asked RUN FILE     for `values.py`: the tokens, of an imported run
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.measure.task import Subject
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.tasks.babilong.task import BabiLong
from ttcd_jax.tasks.ruler.task import Ruler

FOLDER = Path(__file__).parent
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Water boils at 100 degrees Celsius. Ice melts at",
)
MESSAGES = ("What is the capital of Norway?", "And which language do people speak there?")
NEW_TOKENS, ANSWER_TOKENS, WINDOW, SINKS = 40, 12, 64, 4
BOS = 1
_RULER = Ruler(
    tasks="niah_single_1,niah_single_2,niah_multikey_1,vt,fwe,cwe",
    lengths=(1024,),
    samples=1,
    essay=str(FOLDER / "river.txt"),
)
_BABI = BabiLong(lengths=("0k",), samples=1)
_LONG_BABI = BabiLong(
    tasks=("qa1",), lengths=("1k",), samples=1, background=str(FOLDER / "river.txt")
)


class Requests(NamedTuple):
    """Lists of token ids: `texts` and `contexts` are continued, `excerpts` are scored, `questions`
    are (context, answer) by the number of the question."""

    texts: list[list[int]]
    excerpts: list[list[int]]
    questions: list[list[tuple[list[int], list[int]]]]
    contexts: list[list[int]]

    @property
    def digest(self) -> str:
        """The sha256 of all tokens."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


def requests(run_dir: Path, tokenizer: Tokenizer) -> Requests:
    """Every request; all but `questions`' answers begin with bos."""

    def begun(text: str) -> list[int]:
        return [BOS, *tokenizer.encode(text).tolist()]

    subject = Subject(None, tokenizer, RunDirectory(run_dir).read_part("data"), run_dir)
    contexts = [begun(case.sample.prompt) for case in _RULER.rows(subject)]
    babi = [case.prompt for task in (_BABI, _LONG_BABI) for case in task.rows(subject)]
    return Requests(
        texts=[begun(text) for text in PROMPTS],
        excerpts=[begun((FOLDER / name).read_text()) for name in ("river.txt", "shelf.txt")],
        questions=[
            [(begun(context), tokenizer.encode(answer).tolist()) for answer in answers]
            for context, answers in _asked(json.loads((FOLDER / "questions.json").read_text()))
        ],
        contexts=contexts + [[BOS, *np.asarray(prompt).tolist()] for prompt in babi],
    )


def _asked(questions: dict) -> list[tuple[str, list[str]]]:
    """(context, answers) as HellaSwag, ARC (easy and challenge) and MMLU ask."""
    asked = [(context, [f" {x}" for x in ends]) for context, ends in questions["sentences"]]
    for question, choices, _ in questions["simple"] + questions["harder"]:
        asked.append((f"Question: {question}\nAnswer:", [f" {x}" for x in choices]))
    for question, choices, _ in questions["letters"]:
        lines = [f"{letter}. {x}" for letter, x in zip("ABCD", choices, strict=True)]
        asked.append(("\n".join([question, *lines, "Answer:"]), [" A", " B", " C", " D"]))
    return asked


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    found = requests(run_dir, load_run(run_dir).tokenizer)
    Path(sys.argv[2]).write_text(
        json.dumps(found._asdict() | {"digest": found.digest, "chat": MESSAGES})
    )
