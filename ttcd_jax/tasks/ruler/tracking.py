"""Variable tracking: a chain of assignments in noise, after one example."""

import functools
import itertools
import string

from ttcd_jax.tasks.ruler.documents import Sources
from ttcd_jax.tasks.ruler.niah import NOISE
from ttcd_jax.tasks.ruler.search import Cell, Drawn, Prompt

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
    "above. Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)
_NUM_VARIABLES = 5
_EXAMPLE_LENGTH, _EXAMPLE_VALUE = 500, "12345"


def track_variables(cell: Cell, sources: Sources, num_samples: int) -> Drawn:
    example = _example(cell)
    step = 5 if cell.is_short else 10
    make = functools.partial(_prompt, cell)
    size = cell.largest(make, step, extra=cell.count(example))
    for _ in range(num_samples):
        yield cell.fitted(functools.partial(_after_example, cell, example), size, step)


def _example(cell: Cell) -> str:
    """A shorter text with its answers, at most 500 tokens if the tokenizer allows it."""
    cell = cell.example(_EXAMPLE_LENGTH)
    make = functools.partial(_prompt, cell, is_example=True)
    found, _ = cell.fitted(make, cell.largest(make, 5), 5, may_exceed=True)
    return f"{found.text} {' '.join(found.answers)}\n"


def _after_example(cell: Cell, example: str, size: int) -> Prompt | None:
    """A prompt after the example, whose names and value are drawn anew."""
    if (prompt := _prompt(cell, size)) is None:
        return None
    for name in example.split()[-_NUM_VARIABLES:]:
        (other,) = cell.names(string.ascii_uppercase, len(name), 1)
        example = example.replace(name, other)
    example = example.replace(_EXAMPLE_VALUE, _value(cell))
    return Prompt(f"{example}\n{prompt.text}", prompt.answers)


def _prompt(cell: Cell, size: int, *, is_example: bool = False) -> Prompt | None:
    """`size`: lines of noise, at least one for each assignment; None for fewer, and for two names
    that are equal."""
    names = cell.names(string.ascii_uppercase, 3 if is_example else 5, _NUM_VARIABLES)
    value = _EXAMPLE_VALUE if is_example else _value(cell)
    if len(names) > _NUM_VARIABLES and not is_example:
        _value(cell)  # of the second chain that the published generator begins, and fails
    if len(names) > _NUM_VARIABLES or size < _NUM_VARIABLES:
        return None
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    lines = [NOISE] * size
    places = sorted(cell.random.sample(range(size), _NUM_VARIABLES))
    for shift, (place, statement) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + shift, statement)
    context = "\n".join(lines).replace(". \n", ".\n")
    return Prompt(_TEMPLATE.format(context=context, value=value, count=_NUM_VARIABLES), names)


def _value(cell: Cell) -> str:
    return str(cell.legacy.randint(10_000, 99_999))
