"""Short texts in which one sentence answers a question, made up by rule, to see which heads find it.

The words carry no knowledge that a model could answer from, other sentences are about the same names and
places, and every other question asks in words of its own: a head that only finds repetitions does not pass.
"""

from __future__ import annotations

import random

import msgspec

_NAMES = [
    "Abel",
    "Brina",
    "Corin",
    "Delva",
    "Edrin",
    "Fossa",
    "Garrick",
    "Hesper",
    "Ivo",
    "Jorun",
    "Kessel",
    "Lorna",
]
_PLACES = ["bakery", "quarry", "chapel", "stable", "brewery", "dairy", "forge", "mill", "pier", "school"]
_COLOURS = ["green", "yellow", "purple", "grey", "orange", "brown", "pink", "white"]
_THINGS = ["violin", "ladder", "blanket", "teapot", "bicycle", "telescope", "hammer", "suitcase"]
_FILLING = (
    "The road to the {place} is narrow and floods in spring.",
    "Nobody had painted the {place} since {year}.",
    "{name} and {other} walked home before the rain came.",
    "In {year} the price of wool fell by a third.",
    "A dog slept in front of the {place} all afternoon.",
    "{name} wrote long letters and seldom sent them.",
    "The committee met twice and decided nothing about the {place}.",
    "Most of the trees on the hill were planted by {name}.",
    "After dinner {other} read aloud from an old almanac.",
    "There were {count} chairs in the hall, and half of them were broken.",
)
# The sentence, what asks for it with its own words, and what asks for it with others.
_NEEDLES = (
    ("The password of the {place} is {number}.", "What is the password of the {place}?",
     "What must one say to be let into the {place}?"),
    ("{name} keeps a {colour} {thing} in the attic.", "What does {name} keep in the attic?",
     "What is stored under the roof of {name}'s house?"),
    ("The train to {name}'s town leaves at {hour} o'clock.", "When does the train to {name}'s town leave?",
     "At what time can one travel to where {name} lives?"),
    ("{name} paid {number} crowns for the {thing}.", "How much did {name} pay for the {thing}?",
     "What was the cost of the {thing} that {name} bought?"),
    ("The {thing} was found behind the {place} by {name}.", "Where was the {thing} found?",
     "At which place did somebody discover the {thing}?"),
    ("{name} is afraid of {colour} birds.", "What is {name} afraid of?",
     "Which animals does {name} fear?"),
)  # fmt: skip


class Needle(msgspec.Struct, frozen=True):
    """``text`` answers ``question`` in characters [start, end)."""

    text: str
    question: str
    start: int
    end: int


def needles(count: int, sentences: int) -> list[Needle]:
    """``count`` texts of ``sentences`` sentences each, about 14 tokens long; always the same ones."""
    return [_needle(number, sentences) for number in range(count)]


def _needle(number: int, sentences: int) -> Needle:
    chance = random.Random(number)  # noqa: S311 - the same texts every time
    form = _NEEDLES[number % len(_NEEDLES)]
    asked = _words(chance)
    said = [chance.choice(_FILLING).format(**_words(chance)) for _ in range(sentences)]
    answer = form[0].format(**asked)
    at = chance.randrange(len(said))
    said.insert(at, answer)
    start = sum(len(sentence) + 1 for sentence in said[:at])
    question = form[1 + number // len(_NEEDLES) % 2].format(**asked)
    return Needle(" ".join(said), question, start, start + len(answer))


def _words(chance: random.Random) -> dict[str, str]:
    kinds = {"name": _NAMES, "place": _PLACES, "thing": _THINGS, "colour": _COLOURS}
    words = {key: chance.choice(kind) for key, kind in kinds.items()}
    words["other"] = chance.choice(_NAMES)
    words["number"] = str(chance.randrange(1000, 100_000))
    words["year"], words["count"] = str(chance.randrange(1700, 1950)), str(chance.randrange(20, 90))
    words["hour"] = str(chance.randrange(1, 12))
    return words
