"""Answers to questions of bAbI and the statements that support them, from the text alone."""

import re

_MOVE = "(?:went to|journeyed to|travelled to|moved to|went back to)"
_GET = "(?:took|got|grabbed|picked up)"
_DROP = "(?:dropped|put down|discarded|left)"
_GIVE = "(?:gave|handed|passed)"
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


def _last(facts, pattern, before=None):
    """The number and the match of the last statement that `pattern` fits."""
    for index in reversed(range(len(facts) if before is None else before)):
        if match := re.fullmatch(pattern, facts[index]):
            return index, match
    raise AssertionError(f"no statement fits {pattern!r}")


def _place(facts, actor, before=None):
    return _last(facts, rf"{actor} {_MOVE} the (\w+)\.", before)


def _object(facts, thing):
    """Who touched it last is with it, or was when it was dropped."""
    index, touch = _last(facts, rf"(\w+) ({_GET}|{_DROP}) the {thing}(?: there)?\.")
    is_dropped = re.fullmatch(_DROP, touch[2])
    move, match = _place(facts, touch[1], index if is_dropped else None)
    return match[1], {index, move}


def _object_before(facts, thing, place):
    """The object's places, one after the other, before the last visit of `place`."""
    visits, holder, touched = [], None, None
    actors = {}
    for index, fact in enumerate(facts):
        if match := re.fullmatch(rf"(\w+) {_MOVE} the (\w+)\.", fact):
            actors[match[1]] = match[2], index
            if match[1] == holder:
                visits.append(actors[holder])
        elif match := re.fullmatch(rf"(\w+) {_GET} the {thing}(?: there)?\.", fact):
            holder, touched = match[1], index
            if holder in actors and not visits:
                visits.append(actors[holder])
        elif re.fullmatch(rf"(\w+) {_DROP} the {thing}(?: there)?\.", fact):
            holder, touched = None, index
    last = max(i for i, visit in enumerate(visits) if visit[0] == place and i)
    (before, first), (_, second) = visits[last - 1 : last + 1]
    return before, {touched, first, second}


def _relation(facts, direction, place, is_subject):
    """The other place of the statement that puts `place` at (`is_subject`) the direction."""
    for index, fact in enumerate(facts):
        a, stated, b = re.fullmatch(r"The (\w+) is (\w+) of the (\w+)\.", fact).groups()
        if stated == _OPPOSITE[direction]:
            a, stated, b = b, direction, a
        if stated == direction and place == (a if is_subject else b):
            return (b if is_subject else a), {index}
    raise AssertionError(f"nothing is {direction} of {place}")


def _gift(facts, part, giver=r"\w+", thing=r"\w+", receiver=r"\w+"):
    index, match = _last(facts, rf"({giver}) {_GIVE} the ({thing}) to ({receiver})\.")
    return match[part], {index}


_FORMS = {
    r"Where is the (\w+)\?": _object,
    r"Where is (\w+)\?": lambda facts, x: (lambda i, m: (m[1], {i}))(*_place(facts, x)),
    r"Where was the (\w+) before the (\w+)\?": _object_before,
    r"What is (\w+) of the (\w+)\?": lambda facts, d, x: _relation(facts, d, x, False),
    r"What is the (\w+) (\w+) of\?": lambda facts, x, d: _relation(facts, d, x, True),
    r"What did (\w+) give to (\w+)\?": lambda facts, x, y: _gift(facts, 2, giver=x, receiver=y),
    r"Who did (\w+) give the (\w+) to\?": lambda facts, x, t: _gift(facts, 3, giver=x, thing=t),
    r"Who gave the (\w+) to (\w+)\?": lambda facts, t, y: _gift(facts, 1, thing=t, receiver=y),
    r"Who gave the (\w+)\?": lambda facts, t: _gift(facts, 1, thing=t),
    r"Who received the (\w+)\?": lambda facts, t: _gift(facts, 3, thing=t),
}


def solve(facts, question):
    """(answer, the supporting statements in their order)."""
    for pattern, answer in _FORMS.items():
        if match := re.fullmatch(pattern, question.strip()):
            target, support = answer(facts, *match.groups())
            return target, tuple(facts[index] for index in sorted(support))
    raise AssertionError(f"no known question: {question!r}")
