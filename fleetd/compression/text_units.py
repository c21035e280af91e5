"""A text in units: the pieces that are kept or dropped whole.

prose: paragraphs, or sentences of long ones · code: statements · table: rows · JSON: values. Units tile the
text. Some are *frames* of others, kept with any of these: a table's header, the lines of a fence, the
brackets and keys around a value, a function's first and last line.
"""

from __future__ import annotations

import re

from fleetd.compression import code_blocks
from fleetd.compression.json_values import JsonNode
from fleetd.compression.structure import Region, regions
from fleetd.compression.unit_list import TextUnit, UnitList
from fleetd.compression.words import PARAGRAPH_END, Range, lines, sentences

# No unit of several sentences, statements or values is longer than about 128 tokens.
MOST_CHARS = 512
# Values and rows shorter than this share a unit with their neighbours.
_SMALL = 48
_LEAST_WHOLE = 240
_HEADING = re.compile(r"#{1,6} |.{1,80}:$")


def units(text: str, most_chars: int = MOST_CHARS, *, boundaries: bool = True) -> list[TextUnit]:
    """Units that cover ``text`` without gaps, in its order.

    What cannot be cut (a line of code, a JSON number) may be longer than ``most_chars``. Without
    ``boundaries``: sentences and lines, and none needs another.
    """
    builder = _Builder(text, min(most_chars, MOST_CHARS))
    if boundaries:
        for region in regions(text):
            builder.region(region)
    else:
        for region in regions(text):
            if region.kind == "prose":
                builder.sentences(region.start, region.end)
            else:
                builder.kind = "code"
                builder.lines(region.start, region.end)
    return builder.sorted()


class _Builder(UnitList):
    def __init__(self, text: str, most: int) -> None:
        super().__init__(text)
        self._most = most
        # Sentences, statements and records are not cut for a small budget: shreds say nothing.
        self._most_whole = min(MOST_CHARS, max(most, _LEAST_WHOLE))

    def region(self, region: Region) -> None:
        self.kind = region.kind
        match region.kind:
            case "prose":
                self._prose(region.start, region.end)
            case "code":
                span = (region.start, region.end)
                code_blocks.split(self._text, span, self._most_whole, (), self)
            case "table":
                self._table(region)
            case "json":
                self._json(region, (region.start, region.end), ())
            case "fence":
                self._fence(region)

    def _fence(self, region: Region) -> None:
        first, last = region.body
        closing = [(last, region.end)] if last < region.end else []
        around = self.frames([(region.start, first), *closing])
        if first == last:
            return
        if region.node is not None:
            self.kind = "json"
            self._json(region, region.body, around)
        else:
            self.kind = "code"
            code_blocks.split(self._text, region.body, self._most_whole, around, self)

    def _table(self, region: Region) -> None:
        first, last = region.body
        head = self.frames([(region.start, first)])
        for row in lines(self._text, first, last):
            self.add(row, head)

    # ---- JSON ------------------------------------------------------------------------------------------

    def _json(self, region: Region, span: Range, frames: tuple[int, ...]) -> None:
        if region.node is not None:
            self._value(region.node, span, frames)

    def _value(self, node: JsonNode, span: Range, frames: tuple[int, ...]) -> None:
        """A value with the key before it and the comma behind it, all of ``span``."""
        children = node.children
        most = self._most_whole
        if span[1] - span[0] <= most or not children:
            self.add(span, frames)
            return
        closing = children[-1].end if node.kind == "string" else node.end - 1
        first = children[0].first
        around = self.frames([(span[0], first), (closing, span[1])], frames)
        start = first
        least = most if node.kind == "string" else _SMALL
        for child, following in zip(children, [*children[1:], None], strict=True):
            stop = closing if following is None else following.first
            if start < child.first and stop - start > most:
                self.add((start, child.first), around)
                start = child.first
            if stop - start > most:
                self._value(child, (child.first, stop), around)
                start = stop
            elif stop - start >= least:
                self.add((start, stop), around)
                start = stop
        if start < closing:
            self.add((start, closing), around)

    # ---- Prose -----------------------------------------------------------------------------------------

    def _prose(self, start: int, end: int) -> None:
        """Paragraphs; a heading goes with what it stands above."""
        waiting = start
        ends = [match.end() for match in PARAGRAPH_END.finditer(self._text, start, end)]
        for stop in [*(e for e in ends if e < end), end]:
            paragraph = self._text[start:stop].strip()
            if "\n" not in paragraph and _HEADING.match(paragraph) and stop < end:
                start = stop
                continue
            if stop - waiting <= self._most:
                self.add((waiting, stop))
            else:
                self.sentences(waiting, stop)
            start = waiting = stop
        if waiting < end:
            self.add((waiting, end))

    def sentences(self, start: int, end: int) -> None:
        """Sentences together while they fit; longer ones are cut between words."""
        first = start
        for a, b in sentences(self._text, start, end):
            if b - first <= self._most:
                continue
            if first < a:
                self.add((first, a))
            first = self._words(a, b)
        if first < end:
            self.add((first, end))

    def lines(self, start: int, end: int) -> None:
        first = start
        for a, b in lines(self._text, start, end):
            if b - first > self._most and first < a:
                self.add((first, a))
                first = a
        if first < end:
            self.add((first, end))

    def _words(self, start: int, end: int) -> int:
        """Pieces of a very long sentence; returns where the last of it begins that still has room."""
        most = self._most_whole
        while end - start > most:
            cut = max(self._text.rfind(space, start + 1, start + most) for space in " \n\t") + 1
            stop = cut if cut > start else start + most
            self.add((start, stop))
            start = stop
        return start
