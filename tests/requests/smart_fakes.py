"""A compressor that likes what holds a word, and prompts with one line that is worth keeping."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fakes import FACTS, FakeEngine, FakeFolder, FakeModels, FakePool
from msgspec.structs import replace

from fleetd.compression.packed import PackedScores
from fleetd.compression.words import estimate_tokens
from fleetd.engine.protocol import (
    Accepted,
    ChatPrompt,
    Delta,
    Event,
    Finished,
    Generate,
    Loading,
    Prefill,
    Profile,
    Ready,
    Score,
    Scored,
    ScoringState,
    TextPrompt,
    Timings,
    Tokenized,
    Usage,
)

NEEDLE = "The code of the green safe is 4711."
FILLER = [
    f"Day {n}: the weather was calm, the harbour quiet, and nobody wrote anything of note about it."
    for n in range(400)
]
QUESTION = "What is the code of the green safe?"
SCORER, DIGEST = "smollm2-135m", "d" * 64
PROFILE = Profile(heads=[(0, 0)], exit_layer=1)


def haystack(lines: int = 200, at: int = 90) -> str:
    """About 20 tokens a line."""
    return "\n\n".join([*FILLER[:at], NEEDLE, *FILLER[at:lines]])


def messages(text: str | None = None) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You answer in one line."},
        {"role": "user", "content": haystack() if text is None else text},
        {"role": "user", "content": QUESTION},
    ]


def chat(text: str | None = None, request_id: str = "r1", **fields: Any) -> Generate:
    return Generate(request_id, ChatPrompt(messages(text)), **fields)


def completion(request_id: str = "r1") -> Generate:
    return Generate(request_id, TextPrompt(f"{haystack()}\n\n{QUESTION}"))


def scored(score: Score, like: str = "safe") -> Scored:
    """Tokens of four characters in the segment; those in a line that holds ``like`` matter."""
    text = score.text
    first, last = score.segment if score.segment != (0, 0) else (0, len(text))
    spans: list[tuple[int, int]] = []
    logits: list[float] = []
    for start in range(first, last, 4):
        end = min(start + 4, last)
        if any(a < end and start < b for a, b in score.questions):
            continue
        line = text[text.rfind("\n", 0, start) + 1 : (text.find("\n", start) + 1 or len(text))]
        spans.append((start, end))
        logits.append(8.0 if like in line else 0.0)
    n = len(spans)
    total = math.log(sum(math.exp(value) for value in logits)) if logits else 0.0
    packed = PackedScores(
        1,
        1,
        struct.pack(f"<{n}i", *(a for a, _ in spans)),
        struct.pack(f"<{n}i", *(b for _, b in spans)),
        struct.pack(f"<{n}H", *([0] * n)),
        struct.pack(f"<{n}f", *logits),
        struct.pack("<f", total),
    )
    return Scored(score.id, packed, PROFILE, n, 0.01)


def spoiled(honest: Scored, how: str) -> Scored:
    """The same as a machine tells it that is broken, or lies."""
    packed = honest.scores
    starts, ends = (struct.unpack(f"<{len(part) // 4}i", part) for part in (packed.starts, packed.ends))
    match how:
        case "garbage":
            packed = PackedScores(1, 1, b"", b"", packed.pairs, b"", b"")
        case "elsewhere":
            away = 10**6
            packed = replace(
                packed,
                starts=struct.pack(f"<{len(starts)}i", *(start + away for start in starts)),
                ends=struct.pack(f"<{len(ends)}i", *(end + away for end in ends)),
            )
        case "one":
            packed = PackedScores(
                1, 1, packed.starts[:4], packed.ends[:4], packed.pairs[:2], packed.logits[:4], packed.log_sums
            )
        case "endless":
            return replace(honest, tokens=10**9)
        case "free":
            return replace(honest, tokens=0)
        case "slow":
            return replace(honest, seconds=1e9)
        case "heads":
            return replace(honest, profile=Profile(heads=[(0, 0), (0, 1)], exit_layer=1))
    return replace(honest, scores=packed)


@dataclass
class ScoringPool(FakePool):
    """Answers with ``script`` whatever it is asked, and scores.

    ``trouble`` happens instead, once per entry: an error, an event to wait for, both, or how the
    scores are ``spoiled``; ``after`` the same by the number of the segment, from 1 on. ``sparse``: why tokens
    cannot be left out; "" where they can, but for the last ``tail``. ``scoring``: of every model that is
    loaded. ``tokens_per_estimated``: how many tokens the model makes of a text for which one is estimated.
    """

    asked: list[Generate] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    trouble: list[BaseException | asyncio.Event | tuple[asyncio.Event, BaseException] | str] = field(
        default_factory=list
    )
    after: dict[int, BaseException] = field(default_factory=dict)
    answers: list[BaseException | None] = field(default_factory=list)
    sparse: str = "it has no such ropes."
    tail: int = 8
    kept: int = 0
    cancelled_scores: int = 0
    loads: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=lambda: ["m", SCORER])
    room: bool = True
    facts: Ready = FACTS
    scoring: ScoringState = FACTS.scoring
    to_measure: list[str] = field(default_factory=list)
    tokens_per_estimated: float = 1.0

    async def stream(
        self, folder: Any, request: Generate, over: Any = None
    ) -> AsyncGenerator[Loading | Event, None]:
        if request.count_only:
            assert isinstance(request.prompt, TextPrompt)
            estimated = estimate_tokens(request.prompt.text)
            yield Accepted(request.id, prompt_tokens=round(self.tokens_per_estimated * estimated))
            yield Finished(request.id, "stop")
            return
        self.asked.append(request)
        if self.answers and (error := self.answers.pop(0)) is not None:
            raise error
        kept = self.kept if request.keep is not None else 0
        yield Tokenized(request.id, 50)
        yield Accepted(request.id, prompt_tokens=50, kept=kept)
        yield Prefill(request.id, done=50, total=50)
        yield Delta(request.id, "4711")
        yield Finished(
            request.id, "stop", Usage(prompt_tokens=50, completion_tokens=1), Timings(0.0, 0.2, 0.1)
        )

    async def ask(
        self, folder: Any, question: Score, *, evict: bool, progress: Callable[[Any], None]
    ) -> Scored:
        assert not evict
        self.scores.append(question)
        trouble = self.trouble.pop(0) if self.trouble else self.after.get(len(self.scores))
        try:
            progress(Prefill(question.id, 1, 2))
            if isinstance(trouble, tuple):
                waits, trouble = trouble
                await waits.wait()
            if isinstance(trouble, BaseException):
                raise trouble
            if isinstance(trouble, asyncio.Event):
                await trouble.wait()
        except asyncio.CancelledError:
            self.cancelled_scores += 1
            raise
        found = scored(question)
        return spoiled(found, trouble) if isinstance(trouble, str) else found

    async def loading(
        self, folder: Any, *, evict: bool = True, over: Any = None
    ) -> AsyncGenerator[Loading, None]:
        assert evict == (folder.name == "m")
        self.loads.append(folder.name)
        if folder.name in self.loaded:
            return
        yield Loading("reading")
        if self.room:
            self.loaded.append(folder.name)

    def engine(self, folder: FakeFolder) -> FakeEngine | None:
        shape = replace(self.facts.shape, sparse_tail=self.tail)
        facts = replace(self.facts, sparse=self.sparse, shape=shape, scoring=self.scoring)
        return FakeEngine(facts) if folder.name in self.loaded else None

    @property
    def measuring(self) -> ScoringPool:
        return self

    def want(self, folder: FakeFolder) -> None:
        self.to_measure.append(folder.name)


def folders(*names: str) -> list[FakeFolder]:
    return [FakeFolder(name, context_tokens=100_000) for name in names]


def models(*names: str) -> FakeModels:
    """Models of which ``m`` answers; the others may score."""
    return FakeModels(["m", *names], folders(*names), digests={SCORER: DIGEST})


class Profiles:
    """Knows the profile of ``SCORER``, or of the models with these digests."""

    def __init__(self, found: Mapping[str, Profile] | None = None) -> None:
        self._found = {DIGEST: PROFILE} if found is None else found

    def find(self, digest: str, device: str = "") -> Profile | None:
        return self._found.get(digest)
