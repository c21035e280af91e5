"""A selection as text: what is kept, in its order, and a line for each gap.

    Intro.                          | id | city |              {"rows": [
    [... 212 tokens omitted ...]    |----|------|                {"id": 1},
    The code is 48213.              | [... 90 tokens omitted ...] |  "[... 90 tokens omitted ...]"]}
                                    | 7  | Rome |
Fences stay closed, tables keep their header, JSON can be parsed, no line of code is cut. Where gaps are not
marked, models call the text corrupted.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fleetd.compression.document import Document
from fleetd.compression.json_values import JsonNode
from fleetd.compression.selection import Selection
from fleetd.compression.structure import Region, regions
from fleetd.compression.words import Range, estimate_tokens, lines


def marker(tokens: int) -> str:
    return f"[... {tokens} tokens omitted ...]"


def texts(document: Document, selection: Selection) -> list[str]:
    """Each block's text with a marker for what is dropped. A block that is kept whole is unchanged."""
    return [
        block.text
        if selection.whole(document, i)
        else elided(block.text, selection.kept[i], boundaries=selection.boundaries)
        for i, block in enumerate(document.blocks)
    ]


def messages(
    document: Document, selection: Selection, original: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """``original`` with each string content replaced by its block's text, otherwise unchanged.

    Every message stays, even if little of it is kept: calls keep their results, and roles alternate.
    """
    return [
        {**message, "content": text} if isinstance(message.get("content"), str) else dict(message)
        for message, text in zip(original, texts(document, selection), strict=True)
    ]


def elided(text: str, kept: Sequence[Range], *, boundaries: bool = True) -> str:
    """``text`` with a marker for each part that is in none of the sorted, disjoint ranges."""
    ranges = _Ranges(kept)
    parts: Iterator[_TextPart]
    if boundaries:
        parts = (part for region in regions(text) for part in _region(text, region, ranges))
    else:
        parts = _parts(text, (0, len(text)), ranges, "line")
    out = ""
    for part in _joined(parts):
        out += part.said if part.gap is None else _gap(out, part, text)
    return out


class _TextPart(msgspec.Struct, frozen=True):
    """Text that is kept, or a gap with the kind of its marker: line, code, row or json."""

    said: str
    gap: Range | None = None
    style: str = "line"


class _Ranges:
    def __init__(self, kept: Sequence[Range]) -> None:
        self._kept = kept
        self._starts = [start for start, _ in kept]

    def within(self, span: Range) -> list[Range]:
        """The parts of a span that are kept."""
        found = []
        at = max(0, bisect_right(self._starts, span[0]) - 1)
        while at < len(self._kept) and self._kept[at][0] < span[1]:
            start, end = max(self._kept[at][0], span[0]), min(self._kept[at][1], span[1])
            if start < end:
                found.append((start, end))
            at += 1
        return found

    def all_of(self, span: Range) -> bool:
        return self.within(span) == [span] or span[0] == span[1]


def _region(text: str, region: Region, ranges: _Ranges) -> Iterator[_TextPart]:
    span = (region.start, region.end)
    if not ranges.within(span):
        # Between the records of JSON Lines, a line that can be parsed too.
        yield _TextPart("", span, "json" if region.kind == "json" else "line")
    elif ranges.all_of(span):
        yield _TextPart(text[slice(*span)])
    elif region.kind == "fence":
        first, last = region.body
        yield _TextPart(text[region.start : first])
        if region.node is not None:
            yield _TextPart(_json_text(text, region.body, region.node, ranges))
        else:
            yield from _parts(text, region.body, ranges, "code")
        yield _TextPart(text[last : region.end])
    elif region.kind == "table":
        yield _TextPart(text[region.start : region.body[0]])
        yield from _parts(
            text, region.body, ranges, "row" if "|" in text[region.start : region.end] else "line"
        )
    elif region.kind == "json" and region.node is not None:
        yield _TextPart(_json_text(text, span, region.node, ranges))
    else:
        yield from _parts(text, span, ranges, "code" if region.kind == "code" else "line")


def _parts(text: str, span: Range, ranges: _Ranges, style: str) -> Iterator[_TextPart]:
    at = span[0]
    for start, end in [*ranges.within(span), (span[1], span[1])]:
        if at < start:
            yield _TextPart("", (at, start), style)
        yield _TextPart(text[start:end])
        at = end


def _joined(parts: Iterator[_TextPart]) -> Iterator[_TextPart]:
    """The parts with adjacent gaps joined."""
    open_gap: _TextPart | None = None
    for part in parts:
        if part.gap is None:
            if not part.said:
                continue
            if open_gap is not None:
                yield open_gap
                open_gap = None
            yield part
        elif open_gap is None or open_gap.gap is None:
            open_gap = part
        else:
            style = part.style if part.style == open_gap.style else "line"
            open_gap = _TextPart("", (open_gap.gap[0], part.gap[1]), style)
    if open_gap is not None:
        yield open_gap


def _gap(before: str, part: _TextPart, text: str) -> str:
    """The marker as a line, with line feeds where the text around it has none."""
    start, end = part.gap or (0, 0)
    dropped = text[start:end]
    if not dropped.strip():
        return dropped
    said = marker(estimate_tokens(dropped))
    if part.style == "row":
        said = f"| {said} |"
    elif part.style == "json":
        said = json.dumps(said)
    elif part.style == "code":
        first = next((line for a, b in lines(text, start, end) if (line := text[a:b]).strip()), "")
        said = first[: len(first) - len(first.lstrip())] + said
    opening = "" if not before or before.endswith("\n") else "\n"
    closing = "" if end == len(text) and not dropped.endswith("\n") else "\n"
    return opening + said + closing


# ---- JSON ----------------------------------------------------------------------------------------------


def _json_text(text: str, span: Range, node: JsonNode, ranges: _Ranges) -> str:
    """A region of JSON with what surrounds the value, which is white space."""
    return text[span[0] : node.start] + _value(text, node, ranges) + text[node.end : span[1]]


def _value(text: str, node: JsonNode, ranges: _Ranges) -> str:
    children = node.children
    if not children or ranges.all_of((node.start, node.end)):
        return text[node.start : node.end]
    if node.kind == "string":
        return _string(text, node, ranges)
    said: list[str] = []
    gap: list[JsonNode] = []
    for child in children:
        if not ranges.within((child.start, child.end)):
            gap.append(child)
            continue
        said += _omitted(text, gap, node.kind)
        gap = []
        said.append(text[child.first : child.start] + _value(text, child, ranges))
    said += _omitted(text, gap, node.kind)
    between = text[children[0].end : children[1].first] if len(children) > 1 else ", "
    return text[node.start : children[0].first] + between.join(said) + text[children[-1].end : node.end]


def _omitted(text: str, gap: Sequence[JsonNode], kind: str) -> list[str]:
    """An element, or a member, in the place of the elements that are left out."""
    if not gap:
        return []
    said = json.dumps(marker(estimate_tokens(text[gap[0].first : gap[-1].end])))
    return [f"{said}: null" if kind == "object" else said]


def _string(text: str, node: JsonNode, ranges: _Ranges) -> str:
    """A long string without some of its lines."""
    said, gap = '"', ""
    for line in [*node.children, None]:
        kept = line is not None and ranges.within((line.start, line.end))
        if line is not None and not kept:
            gap += text[line.start : line.end]
            continue
        if gap:
            said += marker(estimate_tokens(gap)) + ("\\n" if gap.endswith("\\n") else "")
            gap = ""
        if line is not None:
            said += text[line.start : line.end]
    return said + '"'
