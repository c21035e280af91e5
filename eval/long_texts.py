"""Long texts with facts in them, and many questions about each. Everything follows from a seed.

Kinds are those of RULER (arXiv 2404.06654), made anew: one needle, several, keys that differ, values of one
key, variables that are passed on, two hops; besides these questions that share no word with their facts, code
with bugs, JSON and tables. Common words, RULER's last kind, need the whole text: the gate declines them.

A text hides the facts of all its questions, so a question of a template has its like beside it. Kinds share
texts (`groups`): reading one is what a question costs.
"""

from __future__ import annotations

import bisect
import itertools
import json
import pydoc_data.topics
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval import haystacks
from eval.haystacks import COLOURS, FRUIT, NAMES, PLACES, TOWNS
from eval.tasks import WORDS, Count

# Facts of each kind that a text hides and that are asked for at least; of tables and JSON, if they have room.
FACTS = 40
# Of a text, at most: the rest is what they stand in.
_FACTS_SHARE = 0.5
# Tokens of one sort of text before the other one goes on.
_RUN_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Asked:
    """``facts``: what must be kept, word for word."""

    kind: str
    question: str
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LongText:
    """``tokens``: about how many it has, facts included."""

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
    ("    file = open(path); return file.readline()", "leaves a file open"),
    ("    except Exception: pass", "hides every error"),
    ("    os.system('ls ' + user_input)", "runs a shell command that a user can choose"),
    ("    if index = 3: return values", "has an assignment where a comparison is meant"),
    ("    for value in values: values.remove(value)", "changes a list while it walks over it"),
    ("    price = round(0.1 + 0.2, 2) == 0.3 and float(index)", "computes money in binary fractions"),
    ("    return handle(values, path, index, user_input)", "calls itself without an end"),
    ("    lock.acquire(); values.clear(); return", "never releases the lock"),
    ("    day = (index + 1) % 8", "takes a week to have eight days"),
    ("    token = str(random.random())", "makes a session key that can be guessed"),
    ("    requests.get(path, verify=False)", "does not check the server's certificate"),
    ("    return values[0] if not values else None", "takes the first element only of an empty list"),
    ("    celsius = index * 9 / 5 + 32", "takes Fahrenheit for Celsius"),
    ("    time.sleep(index * 1000)  # milliseconds", "waits a thousand times too long"),
)

_Made = tuple[list[str], list[Asked]]


def _told(chance: random.Random) -> _Made:
    kinds = ((1, "one needle"), (2, "no word in common"))
    asked = [Asked(kind, said[which], (said[0],)) for which, kind in kinds for said in _SAID]
    return [said for said, *_ in _SAID], asked


def _keys(chance: random.Random, many: int) -> list[str]:
    every = [f"{place} of {town}" for place in PLACES for town in TOWNS]
    return chance.sample(every, many)


def _codes(chance: random.Random) -> _Made:
    """Questions about one, four and eight keys at once; each key is asked for once by each kind."""
    said = {
        key: f"The secret code of the {key} is {chance.randint(10000, 99999)}."
        for key in _keys(chance, FACTS)
    }
    asked = []
    for kind, many in (("one key of forty", 1), ("four needles", 4), ("eight needles", 8)):
        keys = chance.sample(list(said), FACTS)
        for of in (keys[at : at + many] for at in range(0, FACTS, many)):
            named = "the " + ", the ".join(of)
            question = f"What {'are the secret codes' if many > 1 else 'is the secret code'} of {named}?"
            asked.append(Asked(kind, question, tuple(said[key] for key in of)))
    return list(said.values()), asked


def _values(chance: random.Random) -> _Made:
    """Four values of one key."""
    hidden: list[str] = []
    asked: list[Asked] = []
    for key in _keys(chance, FACTS // 4):
        said = tuple(
            f"One of the lucky numbers of the {key} is {number}."
            for number in chance.sample(range(10000, 99999), 4)
        )
        hidden += said
        asked.append(Asked("four values of a key", f"What are all the lucky numbers of the {key}?", said))
    return hidden, asked


def _variables(chance: random.Random) -> _Made:
    """A value that is passed on from variable to variable, three to a chain."""
    hidden: list[str] = []
    asked: list[Asked] = []
    names = [f"{word.upper()}_{fruit.upper()}" for word in WORDS for fruit in FRUIT]
    chance.shuffle(names)
    for number in range(-(-FACTS // 3)):
        chain, value = names[3 * number : 3 * number + 3], chance.randint(10000, 99999)
        said = (
            f"VAR {chain[0]} = {value}.",
            *(f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain)),
        )
        hidden += said
        asked.append(Asked("variables passed on", f"Which variables have the value {value}?", said))
    return hidden, asked


def _hops(chance: random.Random) -> _Made:
    hidden: list[str] = []
    asked: list[Asked] = []
    people = [f"{name} {word.capitalize()}" for name in NAMES for word in WORDS]
    many = FACTS // 2
    for key, person in zip(_keys(chance, many), chance.sample(people, many), strict=True):
        said = (
            f"The {key} is looked after by {person}.",
            f"The secret code of {person} is {chance.randint(10000, 99999)}.",
        )
        hidden += said
        question = f"What is the secret code of whoever looks after the {key}?"
        asked.append(Asked("two hops", question, said))
    return hidden, asked


# Kinds that ask about the same facts, and these.
_MAKERS: tuple[tuple[tuple[str, ...], Callable[[random.Random], _Made]], ...] = (
    (("one needle", "no word in common"), _told),
    (("one key of forty", "four needles", "eight needles"), _codes),
    (("four values of a key",), _values),
    (("variables passed on",), _variables),
    (("two hops",), _hops),
)
HIDDEN = tuple(kind for kinds, _ in _MAKERS for kind in kinds)


def hidden_text(kinds: Sequence[str], tokens: int, seed: int, count: Count) -> LongText:
    """The facts of ``kinds`` at even distances between sentences from templates and paragraphs of Python's
    documentation, which take turns; an even seed begins with the first."""
    chance = random.Random(f"{' '.join(kinds)} {tokens} {seed}")
    hidden: list[str] = []
    asked: list[Asked] = []
    for of, make in _MAKERS:
        if set(of) & set(kinds):
            said, questions = make(chance)
            hidden += said
            asked += [each for each in questions if each.kind in kinds]
    chance.shuffle(hidden)
    theirs = sum(count(fact) + 1 for fact in hidden)
    hay = _hay(chance, max(tokens - theirs, round(tokens * (1 - _FACTS_SHARE))), seed, count)
    # Paragraphs differ in length: distances are those of the text.
    ends = list(itertools.accumulate(len(paragraph) for paragraph in hay))
    for place, fact in enumerate(hidden):
        at = bisect.bisect_left(ends, (place + chance.random()) / len(hidden) * ends[-1])
        haystacks.hidden(chance, hay, fact, (at + 0.5) / len(hay))
    return LongText(tokens, "\n\n".join(hay), tuple(asked))


def _hay(chance: random.Random, tokens: int, seed: int, count: Count) -> list[str]:
    """Paragraphs of ``tokens`` together: a run of each sort in turn."""
    topics = list(pydoc_data.topics.topics.values())
    chance.shuffle(topics)
    documentation = itertools.cycle("\n\n".join(topics).split("\n\n"))
    found: list[str] = []
    left = tokens
    while left > 0:
        run = min(_RUN_TOKENS, left)
        seed += 1
        if seed % 2:
            found += (made := haystacks.paragraphs(chance, run, count, tuning=False))
            left -= sum(count(paragraph) + 1 for paragraph in made)
            continue
        while run > 0:
            found.append(next(documentation))
            run -= (one := count(found[-1]) + 1)
            left -= one
    return found


def structured_text(kinds: Sequence[str], tokens: int, seed: int, count: Count) -> LongText:
    """Rows of a table, records in JSON, functions of which some have a bug; one behind the other."""
    chance = random.Random(f"{' '.join(kinds)} {tokens} {seed}")
    parts: list[str] = []
    asked: list[Asked] = []
    for kind in kinds:
        text, questions = _PARTS[kind](chance, tokens // len(kinds), count)
        parts.append(text)
        asked += questions
    return LongText(tokens, "\n\n".join(parts), tuple(asked))


def _rows(
    make: Callable[[random.Random, int], str], chance: random.Random, tokens: int, count: Count
) -> list[str]:
    rows: list[str] = []
    while tokens > 0:
        rows.append(make(chance, len(rows)))
        tokens -= count(rows[-1]) + 1
    return rows


def _spread(chance: random.Random, rows: int) -> list[int]:
    """Numbers of rows, at even distances."""
    many = min(FACTS, rows)
    return [int((number + chance.random()) / many * rows) for number in range(many)]


def _table(chance: random.Random, tokens: int, count: Count) -> tuple[str, list[Asked]]:
    lockers: list[str] = []

    def row(chance: random.Random, index: int) -> str:
        lockers.append(str(chance.randint(10_000_000, 99_999_999)))
        return f"| visitor {index} | {chance.choice(TOWNS)} | {lockers[-1]} |"

    rows = _rows(row, chance, tokens, count)
    asked = [
        Asked("table", f"What is the locker number of visitor {index}?", (lockers[index],))
        for index in _spread(chance, len(rows))
    ]
    return "| Visitor | Town | Locker |\n|---|---|---|\n" + "\n".join(rows), asked


def _json(chance: random.Random, tokens: int, count: Count) -> tuple[str, list[Asked]]:
    lockers: list[str] = []

    def record(chance: random.Random, index: int) -> str:
        lockers.append(str(locker := chance.randint(10_000_000, 99_999_999)))
        return json.dumps({"person": f"person {index}", "town": chance.choice(TOWNS), "locker": locker})

    rows = _rows(record, chance, tokens, count)
    asked = [
        Asked("JSON", f"What is the locker number of person {index}?", (lockers[index],))
        for index in _spread(chance, len(rows))
    ]
    return "```json\n[\n" + ",\n".join(rows) + "\n]\n```", asked


def _code(chance: random.Random, tokens: int, count: Count) -> tuple[str, list[Asked]]:
    """Each bug counts as two facts: the name of its function, and its line."""
    names = [f"handle_{word}_{colour}" for word in WORDS for colour in COLOURS]
    said, asked = [], []
    for name, (line, bug) in zip(chance.sample(names, len(_BUGS)), _BUGS, strict=True):
        said.append(f"def {name}(values, path, index, user_input):\n{line}\n")
        asked.append(Asked("code with a bug", f"Which function {bug}?", (f"def {name}(", line)))
    chance.shuffle(said)
    theirs = sum(count(function) + 1 for function in said)
    rows = _rows(_function, chance, max(tokens - theirs, round(tokens * (1 - _FACTS_SHARE))), count)
    for place, function in enumerate(said):
        rows.insert(int((place + chance.random()) / len(said) * len(rows)), function)
    return "```python\n" + "\n".join(rows) + "\n```", asked


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


_PARTS: dict[str, Callable[[random.Random, int, Count], tuple[str, list[Asked]]]] = {
    "table": _table,
    "JSON": _json,
    "code with a bug": _code,
}
STRUCTURED = tuple(_PARTS)
KINDS = (*HIDDEN, *STRUCTURED)
# A text has room for the facts of all kinds from so many tokens on.
_ROOM_FOR_ALL = 16_000


def groups(tokens: int) -> tuple[tuple[str, ...], ...]:
    """Kinds that share a text of so many tokens."""
    if tokens >= _ROOM_FOR_ALL:
        return HIDDEN, STRUCTURED
    return HIDDEN[:5], HIDDEN[5:], STRUCTURED[:2], STRUCTURED[2:]


def long_text(kinds: Sequence[str], tokens: int, seed: int, count: Count) -> LongText:
    """The same arguments give the same text."""
    made = structured_text if kinds[0] in _PARTS else hidden_text
    return made(kinds, tokens, seed, count)
