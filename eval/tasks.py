"""What is asked about a haystack, and what an answer must contain. Everything follows from a seed.

Kinds that a model answers (single, needles4, needles8, distractors, hop, code, json, table, dialogue) and
kinds that selection must leave alone (aggregate, verbatim).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval import haystacks
from eval.haystacks import COLOURS, FRUIT, NAMES, PLACES, TOWNS
from fleetd.compression.document import Document

WORDS = (
    "marigold", "lantern", "cobalt", "juniper", "sparrow", "velvet", "thunder", "walnut", "saffron", "pebble",
    "ribbon", "meadow",
)  # fmt: skip
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Fact:
    said: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """``answers``: each is looked for in what the model says; ``facts``: the sentences that hold them.

    ``text``: a prompt for /v1/completions, instead of ``messages``. ``whole``: the task needs all of the
    text, and selection should decline it.
    """

    kind: str
    seed: int
    tokens: int
    depth: float
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    answers: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    whole: bool = False
    max_tokens: int = 24

    @property
    def document(self) -> Document:
        return Document.of_text(self.text) if self.text else Document.of_messages(self.messages)

    def says(self, said: str, answer: str) -> bool:
        """True if ``said`` has the answer as a word of its own; numbers may be grouped by commas."""
        plain = said.lower().replace(",", "")
        return bool(re.search(rf"(?<!\w){re.escape(answer.lower())}(?!\w)", plain))


def fact(chance: random.Random, kind: int | None = None) -> Fact:
    """Something that nothing else in the text tells, and how one asks for it."""
    place, name, town = chance.choice(PLACES), chance.choice(NAMES), chance.choice(TOWNS)
    number, colour, fruit, word = (
        str(chance.randint(10000, 99999)),
        chance.choice(COLOURS),
        chance.choice(FRUIT),
        chance.choice(WORDS),
    )
    facts = (
        Fact(
            f"The secret code of the {place} is {number}.", f"What is the secret code of the {place}?", number
        ),
        Fact(f"The locker number of {name} is {number}.", f"What is the locker number of {name}?", number),
        Fact(f"The password for the {place} is {word}.", f"What is the password for the {place}?", word),
        Fact(
            f"The favourite fruit of {name} is the {fruit}.", f"What is the favourite fruit of {name}?", fruit
        ),
        Fact(f"The flag of {town} is {colour}.", f"What colour is the flag of {town}?", colour),
        Fact(
            f"The telephone number of the {place} is {number}.",
            f"What is the telephone number of the {place}?",
            number,
        ),
    )
    return facts[chance.randrange(len(facts)) if kind is None else kind]


def single(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
    one = fact(chance)
    haystacks.hidden(chance, hay, one.said, depth)
    return _asked(hay, one.question, [one])


def distractors(
    chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool
) -> dict[str, Any]:
    """Three more facts of the same kind about others."""
    hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
    kind = chance.randrange(6)
    facts = _different(chance, 4, kind)
    for other in facts[1:]:
        haystacks.hidden(chance, hay, other.said, chance.random())
    haystacks.hidden(chance, hay, facts[0].said, depth)
    return _asked(hay, facts[0].question, facts[:1])


def needles(many: int) -> Callable[..., dict[str, Any]]:
    def made(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
        hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
        places = chance.sample(PLACES, many)
        facts = [
            Fact(
                f"The secret code of the {place} is {(number := chance.randint(10000, 99999))}.",
                "",
                str(number),
            )
            for place in places
        ]
        for i, one in enumerate(facts):
            haystacks.hidden(chance, hay, one.said, (i + chance.random()) / many)
        named = ", the ".join(places[:-1]) + f" and the {places[-1]}"
        asked = _asked(hay, f"What are the secret codes of the {named}?", facts)
        return asked | {"max_tokens": 20 * many}

    return made


def hop(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    """The answer stands beside a name that only another sentence gives."""
    hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
    place, word, number = (
        chance.choice(PLACES),
        chance.choice(WORDS).capitalize(),
        str(chance.randint(10000, 99999)),
    )
    first = Fact(f"The {place} is looked after by Mr. {word}.", "", "")
    second = Fact(
        f"The secret code of Mr. {word} is {number}.",
        f"What is the secret code of the man who looks after the {place}?",
        number,
    )
    haystacks.hidden(chance, hay, first.said, chance.random())
    haystacks.hidden(chance, hay, second.said, depth)
    lead = f"The secret code of the man who looks after the {place} is"
    return _asked(hay, second.question, [second], lead) | {"facts": (first.said, second.said)}


def code(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    """What a function of a file returns."""
    blocks: list[str] = []
    names = [
        f"{verb}_{noun}" for verb in ("load", "parse", "merge", "check", "send") for noun in (*WORDS, *FRUIT)
    ]
    chance.shuffle(names)
    left = tokens
    while left > 0 and names:
        blocks.append(_function(chance, names.pop(), str(chance.randint(100, 999))))
        left -= count(blocks[-1])
    name, number = f"open_{chance.choice(('cellar', 'harbour', 'window'))}", str(chance.randint(10000, 99999))
    blocks.insert(int(depth * len(blocks)), _function(chance, name, number))
    text = "```python\n" + "\n\n".join(blocks) + "\n```"
    asked = f"What number does the function {name} return?"
    return {
        "messages": [{"role": "user", "content": f"{text}\n\n{asked}"}],
        "answers": (number,),
        "facts": (f"    return {number}",),
    }


def _function(chance: random.Random, name: str, number: str) -> str:
    thing, other = chance.sample(WORDS, 2)
    body = [
        f"    {thing} = read({chance.randint(1, 9)})",
        f"    for {other} in {thing}:\n        if {other} is None:\n            continue\n"
        f"        log({other})",
        f"    {thing}.sort(key={other})",
        f"    assert {thing} != {chance.randint(1, 99)}",
    ]
    said = "\n".join(chance.sample(body, chance.randint(1, 3)))
    return f"def {name}({thing}, {other}):\n{said}\n    return {number}"


def records(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    """A tool's JSON result, after a call; the question is about one record."""
    rows: list[dict[str, Any]] = []
    left = tokens
    people = [f"{name} {town}" for name in NAMES for town in TOWNS]
    chance.shuffle(people)
    while left > 0 and people:
        rows.append(
            {"person": people.pop(), "town": chance.choice(TOWNS), "locker": chance.randint(10000, 99999)}
        )
        left -= count(json.dumps(rows[-1])) + 2
    row = rows[min(len(rows) - 1, int(depth * len(rows)))]
    call = {"name": "find_people", "arguments": {"town": "all"}}
    return {
        "messages": [
            {"role": "user", "content": "Look up the people of the valley."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"people": rows}, indent=1)},
            {"role": "user", "content": f"What is the locker number of {row['person']}?"},
        ],
        "answers": (str(row["locker"]),),
        "facts": (f'"locker": {row["locker"]}',),
    }


def table(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    rows: list[tuple[str, str, str]] = []
    left = tokens
    people = [f"{name} {town}" for name in NAMES for town in TOWNS]
    chance.shuffle(people)
    while left > 0 and people:
        rows.append((people.pop(), chance.choice(COLOURS), str(chance.randint(10000, 99999))))
        left -= count(" | ".join(rows[-1])) + 4
    row = rows[min(len(rows) - 1, int(depth * len(rows)))]
    said = "| Name | Colour | Locker |\n|---|---|---|\n" + "\n".join(f"| {' | '.join(r)} |" for r in rows)
    question = f"What is the locker number of {row[0]}?"
    return {
        "messages": [{"role": "user", "content": f"{said}\n\n{question}"}],
        "answers": (row[2],),
        "facts": (row[2],),
    }


def dialogue(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    """The fact was told turns ago."""
    hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
    one = fact(chance)
    haystacks.hidden(chance, hay, one.said, depth)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
    for i, paragraph in enumerate(hay):
        messages.append({"role": "assistant" if i % 2 else "user", "content": paragraph})
    if messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": "I see."})
    messages.append({"role": "user", "content": one.question})
    return {"messages": messages, "answers": (one.answer,), "facts": (one.said,)}


_AGGREGATE = (
    "How many different towns are mentioned in the text?",
    "Count how often the name {name} appears.",
    "Which season is mentioned most often?",
    "Summarize the text in three sentences.",
    "List all the people who are named in the text.",
    "What are the main points of the text above?",
    "What is the average of all the distances that are given?",
    "Compare the first half of the text with the second half.",
    "Which town has the most inhabitants?",
    "How many times does the word {fruit} occur?",
    "Put the events in chronological order.",
    "Give me a short overview of what happens.",
    "Name every town in the passage.",
    "What is the total number of fruit trees?",
)
_VERBATIM = (
    "Quote the second paragraph exactly.",
    "Translate the text into German.",
    "Rewrite the text in the past tense.",
    "Repeat the last paragraph word for word.",
    "Proofread the text and correct the spelling.",
    "Rewrite this code in Rust.",
    "Quote exactly the function {function}.",
    "Refactor the code above.",
    "Print the whole function {function}.",
    "Copy the definition of {function} verbatim.",
    "Fix the bugs in this code.",
    "Continue the story from where the text ends.",
    "Convert the code to JavaScript.",
    "Paraphrase the first paragraph.",
)


def aggregate(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
    question = chance.choice(_AGGREGATE).format(name=chance.choice(NAMES), fruit=chance.choice(FRUIT))
    return _task_about(hay, question)


def verbatim(chance: random.Random, tokens: int, depth: float, count: Count, tuning: bool) -> dict[str, Any]:
    question = chance.choice(_VERBATIM)
    if "code" not in question and "{function}" not in question:
        hay = haystacks.paragraphs(chance, tokens, count, tuning=tuning)
        return _task_about(hay, question)
    asked = code(chance, tokens, depth, count, tuning)
    text = asked["messages"][0]["content"]
    name = text.rpartition("function ")[2].partition(" ")[0]
    said = text.rpartition("\n\n")[0]
    content = f"{said}\n\n{question.format(function=name)}"
    return {"messages": [{"role": "user", "content": content}], "whole": True}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "single": single,
    "distractors": distractors,
    "needles4": needles(4),
    "needles8": needles(8),
    "hop": hop,
    "dialogue": dialogue,
    "code": code,
    "json": records,
    "table": table,
    "aggregate": aggregate,
    "verbatim": verbatim,
}


def task(kind: str, seed: int, tokens: int, depth: float, count: Count, *, tuning: bool = False) -> Task:
    """The same arguments give the same task. ``tokens``: about as many as the haystack has."""
    chance = random.Random(f"{kind} {seed} {tokens}")
    made = KINDS[kind](chance, tokens, depth, count, tuning)
    return Task(kind=kind, seed=seed, tokens=tokens, depth=depth, **made)


def _different(chance: random.Random, many: int, kind: int) -> list[Fact]:
    """Facts of one kind about different things with different answers."""
    found: list[Fact] = []
    while len(found) < many:
        one = fact(chance, kind)
        if all(one.question != other.question and one.answer != other.answer for other in found):
            found.append(one)
    return found


def _asked(hay: Sequence[str], question: str, facts: Sequence[Fact], lead: str = "") -> dict[str, Any]:
    """A question about one text, and how its answer begins: a small model goes on from there, where it would
    otherwise go on with the text."""
    lead = lead or facts[0].said.partition(f" {facts[0].answer}")[0]
    return {
        "text": "\n\n".join(hay) + f"\n\nQuestion: {question}\nAnswer: {lead}",
        "answers": tuple(one.answer for one in facts),
        "facts": tuple(one.said for one in facts),
        "max_tokens": 12,
    }


def _task_about(hay: Sequence[str], question: str) -> dict[str, Any]:
    content = "\n\n".join(hay) + f"\n\n{question}"
    return {"messages": [{"role": "user", "content": content}], "whole": True}
