"""A scheduler turned by hand whose answers are drafted for, and sources that are right, wrong, or worse."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoded_reports import DecodedReports

from fleetd.engine.loop.scheduler import Scheduler
from fleetd.engine.measure.chunk_size import FixedChunks
from fleetd.engine.measure.memory import KvBudget
from fleetd.engine.prefixes.prefix_cache import PrefixCache
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt
from fleetd.engine.protocol import Delta, Failed, Finished, Generate, Sampling, TokenPrompt
from fleetd.engine.sequence_state.kinds import ANY
from fleetd.engine.speculation.exactness_probe import ExactnessVerdict
from fleetd.engine.speculation.sources import Context, DraftSource
from fleetd.engine.speculation.speculation import Mode, WorkerSpeculation

GREEDY = Sampling(temperature=0.0)
EXACT = ExactnessVerdict(16, ANY, "exact: for the test", {1: 1.0, 16: 1.5})


def speculation(vocab_size: int, mode: Mode = "on", **changes: Any) -> WorkerSpeculation:
    return WorkerSpeculation(changes.pop("verdict", EXACT), vocab_size, mode, **changes)


class Run:
    """Requests through a scheduler of their own; ``speculation`` None is plain decoding."""

    def __init__(
        self, model: Any, tokenizer: Any, speculation: WorkerSpeculation | None = None, **options: Any
    ) -> None:
        self.events = DecodedReports()
        # Prompt and answer of each, as far as it was seen between turns.
        self.tokens: dict[str, list[int]] = {}
        # How often a sequence went into the batch or out of it between two turns.
        self.moves = 0
        self._apart: dict[str, bool] = {}
        settings: dict[str, Any] = {
            "context_tokens": 2048,
            "chunks": FixedChunks(64, 32),
            "max_streams": 4,
            "budget": KvBudget.of(1 << 30, 1024),
            "prefix": PrefixCache(1 << 30),
            **options,
        }
        self.scheduler = Scheduler(
            model=model,
            tokenizer=tokenizer,
            emit=self.events.take,
            speculation=speculation,
            **settings,
        )
        self.decoding = self.scheduler.decoding

    def submit(
        self, name: str, tokens: Sequence[int], *sources: DraftSource, matcher: Any = None, **fields: Any
    ) -> None:
        request = Generate(name, TokenPrompt(list(tokens)), **{"sampling": GREEDY, **fields})
        self.scheduler.inbox.put(PreparedPrompt(request, list(tokens), matcher=matcher))
        for source in sources:
            self.decoding.attach(name, source)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def turn(self) -> None:
        if not self.busy:
            return  # it would wait for something to arrive
        assert self.scheduler.turn()
        self.scheduler.validate()
        for running in (*self.decoding.batch.values(), *self.decoding.apart):
            name, apart = running.sequence.id, running.row is not None
            self.tokens[name] = list(running.tokens)
            self.moves += self._apart.get(name, apart) != apart
            self._apart[name] = apart

    def finish(self, turns: int = 3000) -> None:
        s = self.scheduler
        for _ in range(turns):
            if not self.busy:
                break
            self.turn()
        assert len(self.decoding) == 0
        assert s.budget.used_bytes == 0
        s.validate()

    def said(self, name: str) -> list[Any]:
        """All that a client could tell apart, bit for bit; only times are left out."""
        out: list[Any] = []
        for event in self.events:
            if isinstance(event, Delta) and event.id == name:
                out.append((event.text, event.channel, event.tokens, event.logprobs))
            elif isinstance(event, Finished) and event.id == name:
                out.append((event.reason, event.usage, event.stop))
            elif isinstance(event, Failed) and event.id == name:
                out.append(event)
        return out

    def finished(self, name: str) -> Finished:
        return next(e for e in self.events if isinstance(e, Finished) and e.id == name)


@dataclass
class Scripted:
    """A source that says what ``say`` makes of the text and the width."""

    say: Callable[[Sequence[int], int], list[int]]
    name: str = "scripted"
    hidden_layers: tuple[int, ...] = ()
    told: list[int] = field(default_factory=list)
    closed: bool = False

    def propose(self, context: Context) -> list[int]:
        return self.say(context.tokens, context.width)

    def committed(self, tokens: Sequence[int]) -> None:
        self.told += tokens

    def close(self) -> None:
        self.closed = True


def perfect(whole: Sequence[int]) -> Scripted:
    """Knows prompt and answer."""
    return Scripted(lambda tokens, width: list(whole[len(tokens) : len(tokens) + width]))


def right_for(whole: Sequence[int], count: int) -> Scripted:
    """Right for ``count`` tokens, then wrong by one, every time."""

    def say(tokens: Sequence[int], width: int) -> list[int]:
        rest = list(whole[len(tokens) : len(tokens) + width])
        return rest[:count] + [(token + 1) % 256 for token in rest[count:]]

    return Scripted(say)


def patchy(text: Sequence[int], seed: int, right: float, vocab_size: int) -> Scripted:
    """Each guess is right with this chance, the same one whenever it is asked; sometimes it has none."""

    def say(tokens: Sequence[int], width: int) -> list[int]:
        found = []
        for at in range(len(tokens), min(len(text), len(tokens) + width)):
            dice = random.Random(f"{seed} {at}")
            if dice.random() < 0.05:
                break
            found.append(text[at] if dice.random() < right else dice.randrange(vocab_size))
        return found

    return Scripted(say)


def guessing(vocab_size: int, seed: int) -> Scripted:
    dice = random.Random(seed)
    return Scripted(lambda tokens, width: [dice.randrange(vocab_size) for _ in range(dice.randint(0, width))])


def lying(vocab_size: int, seed: int) -> Scripted:
    """Sends what it must not: ids that do not exist, far too many tokens, or an exception."""
    dice = random.Random(seed)

    def say(tokens: Sequence[int], width: int) -> list[int]:
        match dice.randrange(5):
            case 0:
                return [-1, vocab_size, 1 << 40]
            case 1:
                return [0] * (50 * width + 50)
            case 2:
                return [tokens[-1]] * width
            case 3 if dice.random() < 0.1:
                raise RuntimeError("a source that breaks")
            case _:
                return []

    return Scripted(say)
