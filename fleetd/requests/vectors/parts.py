"""Which machine computes which texts: a pure core.

    texts ──longest first──► Unclaimed ──take──► a part for each machine that is worth it

A machine gets one part of a request at a time, of about ``limits.VECTOR_PART_S`` by its measured speed, so
that a fast one takes more parts, and one that fails loses little. What it was given of other requests counts:
many requests of one text each are spread as one request of many texts is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fleetd import limits
from fleetd.plan.refusals import THIS_NODE

# Every part has about so many tokens at least: smaller ones cost more to send than they gain.
_LEAST_TOKENS = 256


class VectorMachine(msgspec.Struct, frozen=True):
    """A machine that has the model, at one moment."""

    node_id: str
    # For people.
    name: str
    # Tokens per second of this model, measured or by its chip.
    tok_s: float
    # Seconds until the model is loaded there; 0 if it is.
    load_s: float = 0.0
    # Seconds of a round trip; 0 for this machine.
    rtt_s: float = 0.0
    # Tokens that other requests of this machine have given it and wait for, and whether it takes no more of
    # them now.
    queued: float = 0.0
    full: bool = False
    # True while it answers a chat.
    chats: bool = False
    # True if it was just given a part beside a chat, and is left to that for a while.
    rests: bool = False
    # Equal for machines that compute the same bytes.
    kind: str = ""
    # True if the first part there compiles kernels (``chip_speeds``), so that its time is no speed.
    compiles: bool = False

    @property
    def here(self) -> bool:
        return self.node_id == THIS_NODE

    def seconds(self, tokens: float) -> float:
        """Until it has computed so many tokens, after what it was given before."""
        return self.load_s + self.rtt_s + (self.queued + tokens) / self.tok_s


class Unclaimed:
    """The texts that no machine has been given yet, the longest first.

    Texts of one part are about equally long, which wastes little on padding, and the shortest come last,
    when machines have to end at the same time.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """``tokens``: of each text, an estimate."""
        self._tokens = tokens
        self._left = sorted(range(len(tokens)), key=lambda text: (-tokens[text], text))
        self.tokens = sum(tokens)

    def __len__(self) -> int:
        return len(self._left)

    def take(self, tokens: float) -> tuple[int, ...]:
        """The numbers of the next texts, of about so many tokens in all and at least one text."""
        count = taken = 0
        for text in self._left[: limits.VECTOR_PART_TEXTS]:
            if count and taken + self._tokens[text] > tokens:
                break
            taken += self._tokens[text]
            count += 1
        part, self._left = self._left[:count], self._left[count:]
        self.tokens -= taken
        return tuple(part)

    def give_back(self, part: Iterable[int]) -> None:
        """Texts that a machine was given and has not computed."""
        self._left = sorted({*self._left, *part}, key=lambda text: (-self._tokens[text], text))
        self.tokens = sum(self._tokens[text] for text in self._left)


class Share(msgspec.Struct, frozen=True):
    """A part for a machine that is free: of about so many tokens."""

    machine: VectorMachine
    tokens: float


def shares(machines: Sequence[VectorMachine], working: frozenset[str], left: int) -> list[Share]:
    """The machines that get a part now.

    A machine joins if it would end its part before the others had done everything without it. One that
    answers a chat gets a small part, and only if no other machine works and it has done what it was given.

    Args:
        machines: all that could, those that work among them.
        working: ids of those that have a part.
        left: tokens that are unclaimed.
    """
    rate = sum(machine.tok_s for machine in machines if machine.node_id in working)
    free = [machine for machine in machines if machine.node_id not in working and not machine.full]
    idle = sorted((each for each in free if not each.chats), key=lambda each: each.seconds(left))
    found: list[VectorMachine] = []
    for machine in idle:
        if rate and left / rate <= machine.seconds(min(left, _LEAST_TOKENS)):
            continue
        rate += machine.tok_s
        found.append(machine)
    if not found and not working:
        # Of all requests together it has little more than one part.
        chatting = [each for each in free if each.chats and not each.rests]
        chatting = [each for each in chatting if each.queued < limits.VECTOR_CHAT_PART_S * each.tok_s]
        best = min(chatting, key=lambda each: each.seconds(left), default=None)
        return [] if best is None else [Share(best, limits.VECTOR_CHAT_PART_S * best.tok_s)]
    several = len(found) + len(working) > 1
    return [Share(each, _part_tokens(each, rate, left, several=several)) for each in found]


def _part_tokens(machine: VectorMachine, rate: float, left: int, *, several: bool) -> float:
    """Tokens of the next part: towards the end smaller ones, so that all machines end together."""
    tokens = limits.VECTOR_PART_S * machine.tok_s
    if several:
        tokens = min(tokens, left * machine.tok_s / (2 * rate))
    return max(float(_LEAST_TOKENS), tokens)
