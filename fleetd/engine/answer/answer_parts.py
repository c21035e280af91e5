"""The parts of an answer as its grammar finds them: text of a channel, and calls of tools. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Channel = Literal["content", "reasoning"]


class Said(msgspec.Struct, frozen=True):
    """Text; ``at``: where in all that the model wrote it begins, in characters."""

    channel: Channel
    text: str
    at: int


class CallBegun(msgspec.Struct, frozen=True):
    """The model calls a tool that was offered. ``call_id`` is "" if it gave none."""

    name: str
    call_id: str = ""


class CallText(msgspec.Struct, frozen=True):
    """More of the arguments, as the text of one JSON object."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """``whole``: the arguments are one JSON object; else the answer has ended inside of them."""

    whole: bool


Part = Said | CallBegun | CallText | CallEnded


class Parts:
    """Parts in order. What is held back is released, or never was."""

    def __init__(self) -> None:
        self._kept: list[list[Part]] = [[]]

    def add(self, part: Part) -> None:
        self._kept[-1].append(part)

    def hold(self) -> None:
        self._kept.append([])

    def release(self) -> None:
        held = self._kept.pop()
        self._kept[-1] += held

    def drop(self) -> None:
        self._kept.pop()

    def take(self) -> list[Part]:
        """What is certain, and was not taken before."""
        found, self._kept[0] = self._kept[0], []
        return found
