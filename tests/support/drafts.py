"""A text that is decoded with drafts, and drafters that need no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from fleetd import limits
from fleetd.engine.speculation import draft_messages as wire
from fleetd.engine.speculation.lookahead import Guess
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import Context
from fleetd.engine.streams.frames import FrameHeader, Kind

VOCAB = 512
# What the next token of a text is.
Next = Callable[[Sequence[int]], int]


def scrambled(text: Sequence[int]) -> int:
    """A next token that depends on all of the text."""
    return hash((len(text), *text[-5:], sum(text))) % VOCAB


def greedy(target: Next, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` tokens without drafts."""
    text = list(prompt)
    for _ in range(count):
        text.append(target(text))
    return text[len(prompt) :]


@dataclass
class Decoded:
    """An answer, and how many passes and right drafts it took."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    accepted: int = 0


def decode(
    target: Next,
    prompt: Sequence[int],
    count: int,
    source: RemoteSource,
    *,
    width: int = 4,
    between: Callable[[], None] = lambda: None,
) -> Decoded:
    """As a verifier does it: a pass takes what is right of a proposal, and one token more.

    ``between``: what happens elsewhere between two passes.
    """
    found = Decoded()
    while len(found.tokens) < count:
        between()
        text = [*prompt, *found.tokens]
        proposed = source.propose(Context(text, min(width, count - len(found.tokens) - 1)))
        block: list[int] = []
        for token in proposed:
            if target([*text, *block]) != token:
                break
            block.append(token)
        found.accepted += len(block)
        block.append(target([*text, *block]))
        found.tokens += block
        found.passes += 1
        source.committed(block)
    return found


@dataclass
class OracleGuesser:
    """``drafter.Guesser`` that knows the target. Wrong where ``wrong`` says so; then the truth is its
    runner-up if ``second_best``."""

    target: Next
    wrong: Callable[[int], bool] = lambda length: False
    second_best: bool = True
    text: list[int] = field(default_factory=list)
    held: int = 0
    prefilled: list[int] = field(default_factory=list)

    def committed(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def missing(self, path: Sequence[int]) -> int:
        return max(0, len(self.text) + len(path) - 1 - self.held)

    def prefill(self, path: Sequence[int], most: int) -> None:
        self.prefilled.append(min(most, self.missing(path)))
        self.held += self.prefilled[-1]

    def guess(self, path: Sequence[int]) -> Guess:
        text = [*self.text, *path]
        self.held = len(text)
        right = self.target(text)
        other = (right + 1) % VOCAB
        if self.wrong(len(text)):
            return Guess(other, right if self.second_best else (right + 2) % VOCAB, 0.6, 0.3)
        return Guess(right, other, 0.9, 0.05)


# ---- what a drafter may send instead of what it drafted -------------------------------------------------


def ints(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]


LIES: dict[str, Callable[[FrameHeader, bytes], list[tuple[FrameHeader, bytes]]]] = {
    "other tokens": lambda h, p: [
        (h, p[: h.sizes[0]] + wire.packed((t + 1) % VOCAB for t in ints(p)[h.count :]))
    ],
    "no tokens": lambda h, p: [(h, p[: h.sizes[0]] + wire.packed(VOCAB for _ in ints(p)[h.count :]))],
    "negative tokens": lambda h, p: [(h, p[: h.sizes[0]] + wire.packed(-1 for _ in ints(p)[h.count :]))],
    "another base": lambda h, p: [(msgspec.structs.replace(h, start=h.start + 1), p)],
    "an old base": lambda h, p: [(msgspec.structs.replace(h, start=h.start - 1), p)],
    "another hash": lambda h, p: [(msgspec.structs.replace(h, prefix=b"12345678"), p)],
    "other lengths": lambda h, p: [(h, wire.packed(n + 1 for n in ints(p)[: h.count]) + p[h.sizes[0] :])],
    "another kind": lambda h, p: [(msgspec.structs.replace(h, kind=Kind.COMMIT), p)],
    "prefill": lambda h, p: [(msgspec.structs.replace(h, kind=Kind.ROWS), p)],
    "an end": lambda h, p: [(FrameHeader(Kind.DONE), b"")],
    "many paths": lambda h, p: [(msgspec.structs.replace(h, count=limits.DRAFT_BRANCHES + 1), p)],
    "a layer": lambda h, p: [(msgspec.structs.replace(h, layer=1), p)],
    "silence": lambda h, p: [],
    "twice": lambda h, p: [(h, p), (h, p)],
}
