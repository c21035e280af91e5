"""A run of random faults without its machines: what is tried, by a seed, and what came of it. Pure."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from fleetd.errors import BY_CODE

#: The model that drafts for another machine's answers.
DRAFTER = "scribe"
#: What an answer may be made of: keys and values from another machine, from the disk, computed with helpers,
#: and drafts.
PARTS = ("fetched", "restored", "shared", "drafted")
#: Codes that say that the program is wrong, not what happened.
_BUGS = {"internal_error"}


class Outcome(StrEnum):
    """What came of a try, worse ones later."""

    RIGHT = "right"  # every answer has the bytes of an undisturbed machine
    TYPED = "typed"  # at least one answer is an error of the list in fleetd.errors, said in time
    GONE = "gone"  # at least one connection broke, to a machine that was killed or without descriptors
    LEAKED = "leaked"  # afterwards there is more than before: descriptors, processes, memory, files
    HUNG = "hung"  # an answer, or the fleet's recovery, took longer than the bound
    WRONG = "wrong"  # other bytes, an error without a type, a connection that broke for no reason

    @property
    def fails(self) -> bool:
        return self in (Outcome.LEAKED, Outcome.HUNG, Outcome.WRONG)


_ORDER = list(Outcome)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    return max(outcomes, key=_ORDER.index, default=Outcome.RIGHT)


@dataclass(frozen=True)
class TryReply:
    """What a client got: a whole answer, an error, or neither.

    ``answer`` is everything that must be equal: text, finish reason, log probabilities.
    """

    answer: Any = None
    code: str = ""
    broken: str = ""
    late: bool = False
    #: Where and how it was computed, as the answer's header says.
    plan: str = ""
    #: What it was made of besides, by PARTS.
    parts: tuple[str, ...] = ()


def judged(reply: TryReply, expected: Any, *, killed: bool) -> tuple[Outcome, str]:
    """The outcome of one request, and why where it is not right. ``killed``: the machine asked was."""
    if reply.late:
        return Outcome.HUNG, "no answer and no error in time"
    if reply.broken:
        return (Outcome.GONE if killed else Outcome.WRONG), f"the connection broke: {reply.broken}"
    if reply.code:
        typed = reply.code in BY_CODE and reply.code not in _BUGS
        return (Outcome.TYPED if typed else Outcome.WRONG), reply.code
    if reply.answer != expected:
        return Outcome.WRONG, f"got {reply.answer!r}, not {expected!r}"
    return Outcome.RIGHT, ""


@dataclass(frozen=True)
class Ask:
    """One request: whom, what, how; ``after_s`` from the beginning of the try.

    ``read_by``: the machine that is asked the same before the try begins and keeps the prompt's keys and
    values on its disk alone. If that is another one, it has unloaded the model, so that they are to be
    fetched; if it is the same, they are to be restored. ``drafter``: the model that drafts the answer, ""
    for none.
    """

    machine: int
    model: str
    prompt: str
    tokens: int
    stream: bool
    after_s: float
    read_by: int | None = None
    drafter: str = ""

    @property
    def fetches(self) -> bool:
        return self.read_by not in (None, self.machine)

    @property
    def restores(self) -> bool:
        return self.read_by == self.machine

    @property
    def question(self) -> tuple[str, str, int]:
        """What decides the answer."""
        return self.model, self.prompt, self.tokens


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, when it begins, for how long, and a seed for what else it draws."""

    kind: str
    begins_s: float
    lasts_s: float
    seed: int


@dataclass(frozen=True)
class Try:
    number: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "they",
    "river",
    "stone",
    "lamp",
    "green",
    "seven",
]
_SHORT = ("Name a colour.", "What is 2 + 2?", "Say hello.", "Where is Paris?", "Count to three.")


def schedule(seed: int, kinds: Sequence[str], faults: int, machines: int) -> Iterator[Try]:
    """Tries with at least ``faults`` faults in all, each kind about as often as any other.

    The same for a seed.
    """
    draw = random.Random(seed)
    left, number, bag = faults, 0, list[str]()
    while left > 0:
        count = draw.choices((1, 2, 3), (2, 3, 5))[0]
        begins_s = draw.uniform(0.0, 0.5)
        chosen: list[Fault] = []
        for _ in range(count):
            if not bag:
                bag = draw.sample(list(kinds), len(kinds))
            lasts_s = draw.choice((draw.uniform(0.05, 0.5), draw.uniform(0.5, 4.0)))
            chosen.append(Fault(bag.pop(), begins_s, lasts_s, draw.getrandbits(32)))
            begins_s += draw.uniform(0.0, 0.5)
        # One that has unloaded its model for one request is not the one to compute another.
        asked, reader = draw.sample(range(1, machines), 2)
        asks = tuple(
            _ask(draw, f"{number}.{place}", machines, asked, reader, chosen[0].begins_s)
            for place in range(draw.randint(1, 3))
        )
        yield Try(number, asks, tuple(chosen))
        number, left = number + 1, left - count


def _ask(draw: random.Random, name: str, machines: int, fetcher: int, reader: int, harmed_s: float) -> Ask:
    """``name``: no other request has it. ``fetcher`` fetches what ``reader`` has read, and restores what it
    has read itself. ``harmed_s``: when the first fault begins."""
    machine, stream, after_s = draw.randrange(machines), draw.random() < 0.5, draw.uniform(0.0, 1.0)
    kinds = ("chain", "short", "drafted", "fetched", "restored", "long")
    # More are to be fetched and restored than are: a fault may come first.
    match kind := draw.choices(kinds, (2, 2, 2, 9, 7, 2))[0]:
        case "chain":
            return Ask(machine, "chain", "<count>", draw.choice((10, 40)), stream, after_s)
        case "short":
            return Ask(machine, "small", draw.choice(_SHORT), draw.choice((6, 12)), stream, after_s)
        case "drafted":
            # The first machine alone has no drafter of its own. Long enough that one comes before its end.
            tokens = draw.choice((200, 400))
            return Ask(0, "chain", "<count>", tokens, stream, after_s, drafter=DRAFTER)
        case "fetched" | "restored":
            # Either takes moments, so it begins shortly before a fault does.
            after_s = max(0.0, harmed_s - draw.uniform(0.0, 0.3))
            read_by = reader if kind == "fetched" else fetcher
            return Ask(fetcher, "small", _long(draw, name), 6, stream, after_s, read_by=read_by)
        case _:
            return Ask(machine, "small", _long(draw, name), 6, stream, after_s)


def _long(draw: random.Random, name: str) -> str:
    """A prompt of one block or two, whose beginning is its own, so that no cache has it."""
    words = draw.choice((draw.randint(270, 340), draw.randint(540, 620)))
    return f"{name}: {' '.join(draw.choices(_WORDS, k=words))}"


@dataclass
class Row:
    """What came of the faults of one kind; a try with several faults counts for the kind of each."""

    tries: int = 0
    right: int = 0
    typed: int = 0
    gone: int = 0
    leaked: int = 0
    hung: int = 0
    wrong: int = 0


@dataclass
class Tally:
    """What came of a run, by kind of fault."""

    rows: dict[str, Row] = field(default_factory=dict)
    #: What failed: the number of the try, its kinds, the outcome, why.
    failures: list[dict[str, Any]] = field(default_factory=list)
    #: How many answers were computed how: by the kind of plan.
    plans: Counter[str] = field(default_factory=Counter)
    #: By kind of fault, how many whole answers there were under it ("answers"), how many of them had a part
    #: of PARTS and, if there are any, how many of those were wrong ("fetched wrong"); how many requests were
    #: to fetch ("to fetch") or to restore ("to restore"), and how many fetches failed, after which the prompt
    #: is computed ("failed").
    parts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, tried: Try, outcome: Outcome, why: str) -> None:
        kinds = [fault.kind for fault in tried.faults]
        for kind in kinds:
            row = self.rows.setdefault(kind, Row())
            row.tries += 1
            setattr(row, outcome.value, getattr(row, outcome.value) + 1)
        if outcome.fails:
            self.failures.append({"try": tried.number, "kinds": kinds, "outcome": outcome, "why": why})

    def answered(self, tried: Try, ask: Ask, reply: TryReply, *, right: bool) -> None:
        """Count how an answer was made, for the kind of each fault of its try."""
        if reply.plan:
            self.plans[reply.plan] += 1
        found: Counter[str] = Counter()
        if ask.read_by is not None:
            found["to fetch" if ask.fetches else "to restore"] += 1
        if reply.answer is not None:
            found["answers"] += 1
            found.update(part if right else f"{part} wrong" for part in reply.parts)
        self._count(tried, found)

    def fetches_failed(self, tried: Try, count: int) -> None:
        self._count(tried, Counter({"failed": count}))

    def _count(self, tried: Try, found: Counter[str]) -> None:
        for kind in {fault.kind for fault in tried.faults} | {"all"}:
            self.parts.setdefault(kind, Counter()).update(found)

    @property
    def total(self) -> Row:
        """Of all kinds."""
        found = Row()
        for row in self.rows.values():
            for name, value in asdict(row).items():
                setattr(found, name, getattr(found, name) + value)
        return found

    @property
    def exit_code(self) -> int:
        return 1 if self.failures else 0

    def table(self) -> str:
        names = list(asdict(Row()))
        lines = [f"{'fault':<30}" + "".join(f"{name:>8}" for name in names)]
        for kind, row in [*sorted(self.rows.items()), ("all", self.total)]:
            lines.append(f"{kind:<30}" + "".join(f"{value:>8}" for value in asdict(row).values()))
        return "\n".join(lines)

    def parts_table(self) -> str:
        """What the answers were made of, by kind of fault."""
        names = ["answers", "to fetch", "to restore", "failed", *PARTS]
        names += sorted({name for found in self.parts.values() for name in found} - set(names))
        lines = [f"{'fault':<30}" + "".join(f"{name:>{len(name) + 3}}" for name in names)]
        for kind in sorted(self.parts, key=lambda kind: (kind == "all", kind)):
            counts = self.parts[kind]
            lines.append(f"{kind:<30}" + "".join(f"{counts[name]:>{len(name) + 3}}" for name in names))
        return "\n".join(lines)

    def as_json(self, **about: Any) -> str:
        rows: Mapping[str, Any] = {kind: asdict(row) for kind, row in sorted(self.rows.items())}
        found: dict[str, Any] = {
            "kinds": rows,
            "all": asdict(self.total),
            "plans": self.plans,
            "parts": self.parts,
        }
        found["failures"] = self.failures
        return json.dumps({**about, **found}, indent=1)
