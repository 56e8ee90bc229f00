"""Stories of our own in the format of bAbI: a world in which actors move and carry objects, which
derives the answers and the statements that support them.

Actors and objects begin at places that no statement names. A question is asked only when the
statements before it determine its answer.
"""

import random
from collections.abc import Iterator

from ttcd_jax.tasks.babilong.stories import BabiTask

PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
ACTORS = ("John", "Mary", "Sandra", "Daniel")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # of qa5

_VERBS = {
    "move": ("went to", "journeyed to", "travelled to", "moved to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "put down", "discarded", "left"),
    "give": ("gave", "handed", "passed"),
}
_ACTIONS = ("move", "move", "move", "get", "drop")  # in about the published proportions
_OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
_QUESTIONS = 5  # of a story, but of qa4

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


def _of_actor(world: World) -> list[Ask]:
    moves = [(x, move) for x in world.actors if (move := world.moved.get(x))]
    return [(f"Where is {x}? ", world.place[x], [move]) for x, move in moves]


def _of_object(world: World) -> list[Ask]:
    moves = [(x, [world.touched[x], move]) for x in OBJECTS if (move := world.moved.get(x))]
    return [(f"Where is the {x}? ", world.place[x], support) for x, support in moves]


def _of_object_before(world: World) -> list[Ask]:
    trails = [(x, *trail[-2:]) for x, trail in world.trail.items() if len(trail) > 1]
    return [
        (f"Where was the {x} before the {here}? ", before, [world.touched[x], second, first])
        for x, (before, first), (here, second) in trails
    ]


def _of_gift(world: World) -> list[Ask]:
    giver, thing, receiver, number = world.gift
    return [
        (f"What did {giver} give to {receiver}? ", thing, [number]),
        (f"Who did {giver} give the {thing} to? ", receiver, [number]),
        (f"Who gave the {thing} to {receiver}? ", giver, [number]),
        (f"Who gave the {thing}? ", giver, [number]),
        (f"Who received the {thing}? ", receiver, [number]),
    ]


_ASKS = {"qa1": _of_actor, "qa2": _of_object, "qa3": _of_object_before, "qa5": _of_gift}


def _story(task: BabiTask, rng: random.Random) -> World:
    """Two moves before a question of qa1; a gift and 0 to 5 other actions for qa5; for qa2 and qa3
    three actions and more, with probability 1/2 each, until there is a question."""
    world = World(rng, GIVERS if task == "qa5" else ACTORS)
    for _ in range(_QUESTIONS):
        asks, last = _ASKS[task], world.gift
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
            while not asks(world) or rng.random() < 0.5:
                world.act(*_ACTIONS)
        world.ask(*rng.choice(asks(world)))
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
