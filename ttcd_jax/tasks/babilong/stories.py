"""Stories in the format of bAbI (Weston et al. 2015), from its files and of our own: a numbered
statement or question per line, from 1 in every story; after a question, divided by tabs, its answer
and the numbers of the statements that support it.

Our own are of a world in which actors move and carry objects, which derives the answers and the
statements that support them. Actors and objects begin at places that no statement names. A question
is asked only when the statements before it determine its answer.
"""

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ttcd_jax.data.documents import LeftOut, read_documents
from ttcd_jax.errors import DataError

BabiTask = Literal["qa1", "qa2", "qa3", "qa4", "qa5"]
PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
ACTORS = ("John", "Mary", "Sandra", "Daniel")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # of qa5

_LINE = re.compile(r"([0-9]{1,6}) ([ -~]+)(?:\t([!-~][ -~]*)\t([0-9]{1,6}(?: [0-9]{1,6})*) ?)?\r?")
_VERBS = {
    "move": ("went to", "journeyed to", "travelled to", "moved to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "put down", "discarded", "left"),
    "give": ("gave", "handed", "passed"),
}
_ACTIONS = ("move", "move", "move", "get", "drop")  # in about the published proportions
_OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
_QUESTIONS = 5  # of a story, but of qa4


class Question(NamedTuple):
    """A question, the statements of its story before it, its answer, and the statements among them
    that support the answer, in their order."""

    facts: tuple[str, ...]
    question: str
    target: str
    references: tuple[str, ...]


def read_questions(lines: Iterable[str], where: str = "the stories") -> Iterator[Question]:
    """The questions of all stories in order. Raises `DataError`, with `where` and the number of the
    line, for a line of another format."""
    facts: dict[int, str] = {}
    last = 0
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        index, text, target, support = match.groups() if match else ("0", "", None, None)
        if index == "1":
            facts, last = {}, 0
        chosen = {int(reference) for reference in (support or "").split()}
        if int(index) != last + 1 or not chosen <= facts.keys():
            raise DataError(
                f"{where}, line {number}: {line[:80]!r} is no line {last + 1} of a bAbI story ('1 "
                "Mary got the milk.' or, divided by tabs, '2 Who got it?', answer, statements)"
            )
        last += 1
        if target is None:
            facts[last] = text
            continue
        references = tuple(fact for index, fact in facts.items() if index in chosen)
        yield Question(tuple(facts.values()), text, target, references)


def read_folder(folder: Path, task: BabiTask) -> list[Question]:
    """The questions of the file `<task>_*_test.txt` in `folder`. Raises `DataError` for none or
    several, and for a file that is no bAbI stories."""
    found = sorted(folder.glob(f"{task}_*test.txt"))
    if len(found) != 1:
        raise DataError(
            f"{folder} has {len(found)} files {task}_*test.txt: give a folder with one, such as "
            "tasks_1-20_v1-2/en of bAbI"
        )
    (document,) = read_documents(found[0], found[0].name, "text", LeftOut())
    return [*read_questions(document.text.decode(errors="replace").split("\n"), str(found[0]))]


Ask = tuple[str, str, list[int]]  # question, answer, numbers of the statements


class World:
    """Places of actors and objects, and the numbered statements about them. `rng` chooses."""

    def __init__(self, rng: random.Random, actors: tuple[str, ...] = ACTORS) -> None:
        self.rng, self.actors, self.lines = rng, actors, list[str]()
        self.place = {name: rng.choice(PLACES) for name in (*actors, *OBJECTS)}
        self.holder: dict[str, str | None] = dict.fromkeys(OBJECTS)
        self.moved: dict[str, int | None] = {}  # the move to the place of an actor or object
        self.touched: dict[str, int] = {}  # the last change of hands of an object
        # Where an object is known to have been, each place with the move to it.
        self.trail: dict[str, list[tuple[str, int]]] = {thing: [] for thing in OBJECTS}
        self.gift = ("", "", "", 0)  # the last: giver, object, receiver, statement

    def say(self, text: str) -> int:
        """The number of the statement `text`."""
        self.lines.append(f"{len(self.lines) + 1} {text}")
        return len(self.lines)

    def ask(self, question: str, answer: str, support: list[int]) -> None:
        self.say(f"{question}\t{answer}\t{' '.join(map(str, support))}")

    def act(self, *kinds: str) -> None:
        """One of the possible actions, stated: of one of `kinds`, then any of that kind."""
        possible = {kind: actions for kind in kinds if (actions := self._possible(kind))}
        kind = self.rng.choice([kind for kind in kinds if kind in possible])
        actor, name, *receiver = self.rng.choice(possible[kind])
        ends = ("", " there") if kind in ("get", "drop") else ("",)
        end = f" to {receiver[0]}" if receiver else self.rng.choice(ends)
        number = self.say(f"{actor} {self.rng.choice(_VERBS[kind])} the {name}{end}.")
        if kind == "move":
            self.place[actor], self.moved[actor] = name, number
            for thing in (thing for thing, holder in self.holder.items() if holder == actor):
                self.place[thing], self.moved[thing] = name, number
                self.trail[thing].append((name, number))
            return
        self.touched[name] = number
        self.holder[name] = holder = {"drop": None, "get": actor}.get(kind, *receiver)
        if holder:
            self.moved[name] = move = self.moved.get(holder)
            if move and not self.trail[name]:
                self.trail[name].append((self.place[holder], move))
        if receiver:
            self.gift = actor, name, receiver[0], number

    def _possible(self, kind: str) -> list[tuple[str, ...]]:
        """(actor, place), (actor, object) or (giver, object, receiver) of all possible actions."""
        at, held = self.place, [(x, thing) for thing, x in self.holder.items() if x]
        if kind == "move":
            return [(x, place) for x in self.actors for place in PLACES if place != at[x]]
        if kind == "drop":
            return [*held]
        if kind == "give":
            others = [(x, thing, y) for x, thing in held for y in self.actors if x != y]
            return [(x, thing, y) for x, thing, y in others if at[x] == at[y]]
        free = [thing for thing, holder in self.holder.items() if holder is None]
        return [(x, thing) for x in self.actors for thing in free if at[x] == at[thing]]


def _asks(world: World, task: BabiTask) -> list[Ask]:
    """The questions of a task that the statements so far answer."""
    place, touched = world.place, world.touched
    moves = {name: move for name, move in world.moved.items() if move}
    if task == "qa1":
        movers = [x for x in world.actors if x in moves]
        return [(f"Where is {x}? ", place[x], [moves[x]]) for x in movers]
    if task == "qa2":
        moved = [x for x in OBJECTS if x in moves]
        return [(f"Where is the {x}? ", place[x], [touched[x], moves[x]]) for x in moved]
    if task == "qa3":
        trails = [(x, *trail[-2:]) for x, trail in world.trail.items() if len(trail) > 1]
        return [
            (f"Where was the {x} before the {here}? ", before, [touched[x], second, first])
            for x, (before, first), (here, second) in trails
        ]
    giver, thing, receiver, number = world.gift
    return [
        (f"What did {giver} give to {receiver}? ", thing, [number]),
        (f"Who did {giver} give the {thing} to? ", receiver, [number]),
        (f"Who gave the {thing} to {receiver}? ", giver, [number]),
        (f"Who gave the {thing}? ", giver, [number]),
        (f"Who received the {thing}? ", receiver, [number]),
    ]


def _story(task: BabiTask, rng: random.Random) -> World:
    """Two moves before a question of qa1; a gift and 0 to 5 other actions for qa5; for qa2 and qa3
    three actions and more, with probability 1/2 each, until there is a question."""
    world = World(rng, GIVERS if task == "qa5" else ACTORS)
    for _ in range(_QUESTIONS):
        last = world.gift
        if task == "qa1":
            world.act("move")
            world.act("move")
        elif task == "qa5":
            while world.gift == last:
                world.act("give", "give", "get", "move")
            for _ in range(rng.randint(0, 5)):
                world.act(*_ACTIONS)
        else:
            for _ in range(3):
                world.act(*_ACTIONS)
            while not _asks(world, task) or rng.random() < 0.5:
                world.act(*_ACTIONS)
        world.ask(*rng.choice(_asks(world, task)))
    return world


def _line_of_places(rng: random.Random) -> World:
    """qa4: three places, the first at a direction of the second, and the second of the third."""
    world, direction = World(rng), rng.choice([*_OPPOSITE])
    first, middle, last = rng.sample(PLACES, 3)
    pairs = rng.sample([(first, middle), (middle, last)], 2)
    for a, b in pairs:
        forms = (a, direction, b), (b, _OPPOSITE[direction], a)
        world.say("The {} is {} of the {}.".format(*rng.choice(forms)))
    number = pairs.index((first, middle)) + 1
    questions = (
        (f"What is {direction} of the {middle}?", first, [number]),
        (f"What is the {middle} {direction} of?", last, [3 - number]),
    )
    world.ask(*rng.choice(questions))
    return world


def story_lines(task: BabiTask, seed: int, num_stories: int) -> Iterator[str]:
    """The lines of stories, of five questions each, one for qa4. Those of a `seed` begin alike for
    any number of stories."""
    rng = random.Random(f"{task} {seed}")
    for _ in range(num_stories):
        yield from (_line_of_places(rng) if task == "qa4" else _story(task, rng)).lines
