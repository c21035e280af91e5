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
    """The model calls a tool that was offered."""

    name: str
    #: The id that the model gave the call; "" if it gave none.
    call_id: str = ""


class CallText(msgspec.Struct, frozen=True):
    """More of the arguments, as the text of one JSON object."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The end of a call."""

    #: True if the arguments are one JSON object; False if the answer ended inside of them.
    whole: bool


Part = Said | CallBegun | CallText | CallEnded


class Parts:
    """Parts in order. Parts that are added after ``hold`` are kept by ``release`` or lost by ``drop``."""

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
        """The parts that are certain and that no earlier call returned."""
        found, self._kept[0] = self._kept[0], []
        return found
