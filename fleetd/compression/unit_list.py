"""Units as they are found, in any order, and the frames that are kept with them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetd.compression.structure import Kind
from fleetd.compression.words import Range


class TextUnit(msgspec.Struct, frozen=True):
    """Characters ``[start, end)`` of a block; ``frames``: indexes of the units kept with this one.

    ``is_frame``: kept only with others.
    """

    start: int
    end: int
    kind: Kind = "prose"
    frames: tuple[int, ...] = ()
    is_frame: bool = False


class UnitList:
    """The units of one text. ``kind``: of those that are added next."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: list[TextUnit] = []
        self.kind: Kind = "prose"

    def add(self, span: Range, frames: tuple[int, ...] = ()) -> int:
        """Add a unit; returns its index in order of addition."""
        self._found.append(TextUnit(*span, self.kind, frames))
        return len(self._found) - 1

    def frames(self, spans: Sequence[Range], outer: tuple[int, ...] = ()) -> tuple[int, ...]:
        """New units that are kept together, around others: ``outer`` and their own indexes."""
        first = len(self._found)
        own = tuple(range(first, first + len(spans)))
        for i, span in zip(own, spans, strict=True):
            self.add(span, outer + tuple(other for other in own if other != i))
        return outer + own

    def sorted(self) -> list[TextUnit]:
        """The units in the order of the text, with the indexes of frames to match."""
        found = self._found
        framing = {frame for unit in found for frame in unit.frames}
        ordered: list[tuple[TextUnit, bool]] = []
        place: dict[int, int] = {}
        for old in sorted(range(len(found)), key=lambda i: found[i].start):
            unit, is_frame = found[old], old in framing
            if ordered and not is_frame and self._text[unit.start : unit.end].isspace():
                # A blank line belongs to the unit before it.
                before, was_frame = ordered[-1]
                ordered[-1] = TextUnit(before.start, unit.end, before.kind, before.frames), was_frame
                continue
            place[old] = len(ordered)
            ordered.append((unit, is_frame))
        return [
            TextUnit(unit.start, unit.end, unit.kind, tuple(place[f] for f in unit.frames), is_frame)
            for unit, is_frame in ordered
        ]
