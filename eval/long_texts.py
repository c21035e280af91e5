"""Long texts with facts in them, and many questions about each. Everything follows from a seed.

Kinds are those of RULER (arXiv 2404.06654), made anew: one needle, several, keys that differ, values of one
key, variables that are passed on, two hops; besides these questions that share no word with their facts, code
with bugs, JSON and tables. Common words, RULER's last kind, need the whole text: the gate declines them.

A text hides the facts of all its questions, so a question of a template has its like beside it.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import random
from collections.abc import Callable
from dataclasses import dataclass

from eval import haystacks
from eval.haystacks import COLOURS, FRUIT, NAMES, PLACES, TOWNS
from eval.tasks import WORDS, Count

# Of each text.
QUESTIONS = 40


@dataclass(frozen=True, slots=True)
class Asked:
    """``facts``: what must be kept, word for word."""

    question: str
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongText:
    kind: str
    tokens: int
    text: str
    asked: tuple[Asked, ...]


# What is hidden, and how one asks for it: with its words, and with none of them.
_SAID = (
    ("The lighthouse keeper's parrot is called Admiral.", "What is the lighthouse keeper's parrot called?",
     "Under which name does the feathered pet on the rock answer?"),
    ("Doctor Ferro stores her violin under the stairs.", "Where does Doctor Ferro store her violin?",
     "In what spot does the physician keep an instrument?"),
    ("The bakery closes early because the ovens overheat.", "Why does the bakery close early?",
     "What makes the bread shop shut before time?"),
    ("Old Brandt won his tractor in a card game.", "How did Old Brandt win his tractor?",
     "By what luck was the farm vehicle obtained?"),
    ("The mayor is afraid of elevators.", "What is the mayor afraid of?",
     "Which thing frightens the head of local government?"),
    ("Trespassers are filmed by a camera in the oak.", "Where is the camera that films trespassers?",
     "From which tree are intruders pictured?"),
    ("The museum's oldest coin was found inside a fish.", "Where was the museum's oldest coin found?",
     "What animal had swallowed an ancient piece of money?"),
    ("Miss Tarn learned Portuguese from sailors.", "From whom did Miss Tarn learn Portuguese?",
     "Who taught a foreign language to her, the crew of ships?"),
    ("The choir rehearses in the disused swimming pool.", "Where does the choir rehearse?",
     "At what abandoned place do singers practise?"),
    ("The ferry's captain repairs watches at night.", "What does the ferry's captain repair at night?",
     "Which timepieces get mended after dark on board?"),
    ("The train to the quarry was cancelled for lack of coal.", "Why was the train to the quarry cancelled?",
     "Which missing fuel stopped rail traffic?"),
    ("The new bridge hums in strong wind.", "What does the new bridge do in strong wind?",
     "Which structure makes a sound during storms?"),
    ("Professor Adler's hat was eaten by a goat.", "What happened to Professor Adler's hat?",
     "Whose headwear became food of an animal?"),
    ("The castle's well is poisoned with lead.", "With what is the castle's well poisoned?",
     "Which metal makes water at the fortress unsafe to drink?"),
    ("The twins were born on different continents.", "Where were the twins born?",
     "Which siblings of one birth have separate homelands?"),
    ("Sergeant Moll proposed to her on a roller coaster.", "Where did Sergeant Moll propose to her?",
     "On what fairground ride did a soldier ask for marriage?"),
    ("The hotel's third floor is haunted by a cook.", "Who haunts the hotel's third floor?",
     "Which ghost walks above the guests, a former kitchen worker?"),
    ("The senator's speech was written by his barber.", "Who wrote the senator's speech?",
     "Which hairdresser authored a politician's address?"),
    ("The orchard was sold for a barrel of wine.", "For what was the orchard sold?",
     "Which drink paid for land with fruit trees?"),
    ("The clock tower runs nine minutes slow on purpose.", "How slow does the clock tower run on purpose?",
     "By how much is public time deliberately behind?"),
    ("The blacksmith's daughter studies volcanoes.", "What does the blacksmith's daughter study?",
     "Which eruptions interest a smith's child in research?"),
    ("The river froze solid in the year of the comet.", "When did the river freeze solid?",
     "In which season of a bright star in heaven was the stream all ice?"),
    ("The post van is painted with zebra stripes.", "How is the post van painted?",
     "What pattern decorates a vehicle that delivers mail?"),
    ("Aunt Philippa sleeps on a billiard table.", "On what does Aunt Philippa sleep?",
     "Which piece of game furniture serves a relative as bed?"),
    ("The treasure map is sewn into a curtain.", "Where is the treasure map sewn in?",
     "In what cloth by a window do directions to riches lie?"),
    ("The school cat answers to a dog whistle.", "To what does the school cat answer?",
     "Which signal calls a feline among pupils?"),
    ("The opera singer lost her voice to a bee sting.", "How did the opera singer lose her voice?",
     "What insect made a soprano mute?"),
    ("The inspector hides cigars in the umbrella stand.", "Where does the inspector hide cigars?",
     "In which place by doors does a detective keep tobacco?"),
    ("The bookshop pays its rent in poems.", "In what does the bookshop pay its rent?",
     "With which verses does a seller of novels settle monthly dues?"),
    ("The glacier releases a mammoth tusk every June.", "What does the glacier release every June?",
     "Which prehistoric tooth emerges from mountain ice in summer?"),
    ("The tailor measures customers with a fishing line.", "With what does the tailor measure customers?",
     "Which angler's cord helps a maker of suits take sizes?"),
    ("The astronaut collects fountain pens.", "What does the astronaut collect?",
     "Which ink tools does a space traveller gather as a hobby?"),
    ("The duke's carriage was pulled by ostriches.", "What pulled the duke's carriage?",
     "Which birds drew the nobleman's coach?"),
    ("The pharmacist grows saffron on the roof.", "What does the pharmacist grow on the roof?",
     "Which spice is cultivated atop the chemist's building?"),
    ("The organ pipes are tuned with beeswax.", "With what are the organ pipes tuned?",
     "Which hive product adjusts a church instrument?"),
    ("The jury reached its verdict over pancakes.", "Over what did the jury reach its verdict?",
     "During which breakfast dish was guilt decided?"),
    ("The submarine smells of lavender.", "What does the submarine smell of?",
     "Which flower scents an undersea vessel?"),
    ("The chess champion plays blindfolded on Sundays.", "When does the chess champion play blindfolded?",
     "On which weekend day are board games won without sight?"),
    ("The vineyard's scarecrow wears a police uniform.", "What does the vineyard's scarecrow wear?",
     "Which officer's clothes hang on a straw figure among grapes?"),
    ("The plumber inherited an island from a stranger.", "From whom did the plumber inherit an island?",
     "Which unknown person left land in the sea to a pipe fitter?"),
)  # fmt: skip

_BUGS = (
    ("    total = sum(values) / len(values)", "divides by zero if the list is empty"),
    ("    for i in range(len(values) + 1): use(values[i])", "reads one element past the end of the list"),
    ("    values.sort(); return values[-1]  # smallest", "returns the largest value instead of the smallest"),
    ("    while index < 10: use(index)", "never ends because the index is not increased"),
    ("    password = 'letmein'", "has a password in its source"),
    ("    query = 'SELECT * FROM t WHERE id=' + user_input", "lets a user inject SQL"),
    ("    file = open(path); return file.read()", "leaves a file open"),
    ("    except Exception: pass", "hides every error"),
)

_Made = tuple[list[str], list[Asked]]


def _said(direct: bool) -> Callable[[random.Random], _Made]:
    def made(chance: random.Random) -> _Made:
        asked = [Asked(question if direct else other, (said,)) for said, question, other in _SAID]
        return [said for said, *_ in _SAID], asked

    return made


def _keys(chance: random.Random, many: int) -> list[str]:
    every = [f"{place} of {town}" for place in PLACES for town in TOWNS]
    return chance.sample(every, many)


def _codes(many: int) -> Callable[[random.Random], _Made]:
    """Questions about ``many`` keys at once."""

    def made(chance: random.Random) -> _Made:
        said = {
            key: f"The secret code of the {key} is {chance.randint(10000, 99999)}."
            for key in _keys(chance, QUESTIONS)
        }
        asked = []
        for _ in range(QUESTIONS):
            keys = chance.sample(list(said), many)
            named = "the " + ", the ".join(keys)
            question = (
                f"What are the secret codes of {named}?"
                if many > 1
                else f"What is the secret code of {named}?"
            )
            asked.append(Asked(question, tuple(said[key] for key in keys)))
        return list(said.values()), asked

    return made


def _values(chance: random.Random) -> _Made:
    """Four values of one key."""
    hidden: list[str] = []
    asked: list[Asked] = []
    for key in _keys(chance, QUESTIONS):
        said = tuple(
            f"One of the lucky numbers of the {key} is {number}."
            for number in chance.sample(range(10000, 99999), 4)
        )
        hidden += said
        asked.append(Asked(f"What are all the lucky numbers of the {key}?", said))
    return hidden, asked


def _variables(chance: random.Random) -> _Made:
    """A value that is passed on from variable to variable, four times."""
    hidden: list[str] = []
    asked: list[Asked] = []
    names = [f"{word.upper()}_{fruit.upper()}" for word in WORDS for fruit in FRUIT]
    chance.shuffle(names)
    for number in range(min(QUESTIONS, len(names) // 3)):
        chain, value = names[3 * number : 3 * number + 3], chance.randint(10000, 99999)
        said = (
            f"VAR {chain[0]} = {value}.",
            *(f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain)),
        )
        hidden += said
        asked.append(Asked(f"Which variables have the value {value}?", said))
    return hidden, asked


def _hops(chance: random.Random) -> _Made:
    hidden: list[str] = []
    asked: list[Asked] = []
    people = [f"{name} {word.capitalize()}" for name in NAMES for word in WORDS]
    for key, person in zip(_keys(chance, QUESTIONS), chance.sample(people, QUESTIONS), strict=True):
        said = (
            f"The {key} is looked after by {person}.",
            f"The secret code of {person} is {chance.randint(10000, 99999)}.",
        )
        hidden += said
        asked.append(Asked(f"What is the secret code of whoever looks after the {key}?", said))
    return hidden, asked


HIDDEN: dict[str, Callable[[random.Random], _Made]] = {
    "one needle": _said(direct=True),
    "no word in common": _said(direct=False),
    "one key of forty": _codes(1),
    "four needles": _codes(4),
    "eight needles": _codes(8),
    "four values of a key": _values,
    "variables passed on": _variables,
    "two hops": _hops,
}
HAYSTACKS = ("sentences", "documentation")


def hidden_text(kind: str, haystack: str, tokens: int, seed: int, count: Count) -> LongText:
    """Facts between the sentences of a haystack of about ``tokens`` tokens, at even distances."""
    chance = random.Random(f"{kind} {haystack} {tokens} {seed}")
    said, asked = HIDDEN[kind](chance)
    chance.shuffle(said)
    hay = _hay(haystack, chance, tokens, count)
    for place, fact in enumerate(said):
        haystacks.hidden(chance, hay, fact, (place + chance.random()) / len(said))
    return LongText(kind, tokens, "\n\n".join(hay), tuple(asked))


def _hay(haystack: str, chance: random.Random, tokens: int, count: Count) -> list[str]:
    if haystack == "sentences":
        return haystacks.paragraphs(chance, tokens, count, tuning=False)
    topics = list(pydoc_data.topics.topics.values())
    chance.shuffle(topics)
    found: list[str] = []
    left = tokens
    while left > 0:
        for paragraph in "\n\n".join(topics).split("\n\n"):
            found.append(paragraph)
            left -= count(paragraph) + 1
            if left <= 0:
                break
    return found


def structured_text(kind: str, tokens: int, seed: int, count: Count) -> LongText:
    """Rows of a table, records in JSON, or functions of which some have a bug."""
    chance = random.Random(f"{kind} {tokens} {seed}")
    rows: list[str] = []
    left = tokens
    while left > 0:
        rows.append(_ROWS[kind](chance, len(rows)))
        left -= count(rows[-1]) + 1
    asked: list[Asked] = []
    if kind == "code with a bug":
        for index, (line, bug) in enumerate(_BUGS):
            place = int((index + chance.random()) / len(_BUGS) * len(rows))
            name = f"handle_{WORDS[index]}"
            rows.insert(place, f"def {name}(values, path, index, user_input):\n{line}\n")
            asked.append(Asked(f"Which function {bug}?", (f"def {name}(", line)))
        return LongText(kind, tokens, "```python\n" + "\n".join(rows) + "\n```", tuple(asked))
    chosen = [int((n + chance.random()) / QUESTIONS * len(rows)) for n in range(QUESTIONS)]
    for index in chosen:
        locker = rows[index].split()[-2] if kind == "table" else str(json.loads(rows[index])["locker"])
        asked.append(Asked(f"What is the locker number of person {index}?", (locker,)))
    text = (
        "[\n" + ",\n".join(rows) + "\n]"
        if kind == "JSON"
        else "| Person | Town | Locker |\n|---|---|---|\n" + "\n".join(rows)
    )
    return LongText(kind, tokens, text, tuple(asked))


def _table_row(chance: random.Random, index: int) -> str:
    return f"| person {index} | {chance.choice(TOWNS)} | {chance.randint(10_000_000, 99_999_999)} |"


def _record(chance: random.Random, index: int) -> str:
    locker = chance.randint(10_000_000, 99_999_999)
    return json.dumps({"person": f"person {index}", "town": chance.choice(TOWNS), "locker": locker})


def _function(chance: random.Random, index: int) -> str:
    noun, colour = chance.choice(WORDS), chance.choice(COLOURS)
    body = chance.choice(
        (
            f"    found = sorted(values, key={colour}_key)\n    return found[: {chance.randint(2, 9)}]",
            f"    if not values:\n        return {chance.randint(2, 9)}\n    return len(values)",
            f"    with open(path) as file:\n        return file.read({chance.randint(100, 999)})",
            f"    for value in values:\n        {colour}.append(value)\n    return {colour}",
        )
    )
    return f"def {chance.choice(('load', 'sort', 'merge', 'send'))}_{noun}_{index}(values, path):\n{body}\n"


_ROWS: dict[str, Callable[[random.Random, int], str]] = {
    "table": _table_row,
    "JSON": _record,
    "code with a bug": _function,
}
KINDS = (*HIDDEN, *_ROWS)


def long_text(kind: str, tokens: int, seed: int, count: Count) -> LongText:
    """The same arguments give the same text; an odd seed has documentation as its haystack."""
    if kind in _ROWS:
        return structured_text(kind, tokens, seed, count)
    return hidden_text(kind, HAYSTACKS[seed % 2], tokens, seed, count)
