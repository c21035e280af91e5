"""Code in pieces that follow its statements, in any language: by indentation, and by lines that only close.

def f(x):        ─ frame        A piece of f's body is never kept without the lines at f's own depth
    a = g(x)     ─ piece        around it: `def f(x):`, `} else {`, `}`. So braces stay balanced, and a
    ...                         statement never stands in another function than its own.
    return a     ─ piece
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetd.smart.structure import NUMBERED
from fleetd.smart.text import Range, lines


class Pieces(Protocol):
    """Where pieces go to. Frames are named by the numbers that ``frames`` returns, those in ``outer`` too."""

    def add(self, span: Range, frames: tuple[int, ...]) -> int: ...

    def frames(self, spans: Sequence[Range], outer: tuple[int, ...]) -> tuple[int, ...]: ...


_TAB = 4
_DEPTH = 12
# Lines that go on with, or end, what stands above them at the same depth.
_CLOSES = re.compile(
    r"[)\]}>]|(?:end|else|elif|elsif|except|finally|catch|rescue|then|fi|done|esac|until)\b|\*/"
)
# Lines that belong to the one below them: decorators, attributes, comments.
_LEADS = re.compile(r"@|#\[|#(?!include|define)|//|/\*|\*(?!/)|--\s|<!--|\[\w+\]|template\s*<")


@dataclass(frozen=True, slots=True)
class _Line:
    start: int
    end: int
    indent: int  # -1: blank
    closes: bool
    leads: bool


def split(text: str, span: Range, most: int, frames: tuple[int, ...], to: Pieces) -> None:
    """Pieces of at most about ``most`` characters that tile ``span``. Never cut within a line."""
    found = [_look(text, row) for row in lines(text, *span)]
    _split(found, most, frames, to, 0)


def _split(rows: list[_Line], most: int, frames: tuple[int, ...], to: Pieces, depth: int) -> None:
    if not rows:
        return
    if rows[-1].end - rows[0].start <= most or depth >= _DEPTH or len(rows) == 1:
        _pack([[row] for row in rows], most, frames, to)
        return
    groups = _statements(rows)
    if len(groups) == 1:
        _inside(rows, most, frames, to, depth)
        return
    small: list[list[_Line]] = []
    for group in groups:
        if group[-1].end - group[0].start <= most:
            small.append(group)
            continue
        _pack(small, most, frames, to)
        small = []
        _split(group, most, frames, to, depth + 1)
    _pack(small, most, frames, to)


def _statements(rows: Sequence[_Line]) -> list[list[_Line]]:
    """Lines at the smallest depth begin statements; what is deeper, blank or closes belongs to the last."""
    base = min((row.indent for row in rows if row.indent >= 0), default=0)
    groups: list[list[_Line]] = []
    leading = False
    for row in rows:
        begins = row.indent == base and not row.closes and not leading
        if not groups or begins:
            groups.append([])
        groups[-1].append(row)
        if row.indent == base:
            leading = row.leads
    return groups


def _inside(rows: list[_Line], most: int, frames: tuple[int, ...], to: Pieces, depth: int) -> None:
    """One statement that is too long: its own lines are frames of what is deeper."""
    base = min((row.indent for row in rows if row.indent >= 0), default=0)
    runs: list[tuple[bool, list[_Line]]] = []
    for row in rows:
        own = row.indent == base or (row.indent < 0 and (not runs or runs[-1][0]))
        if not runs or runs[-1][0] != own:
            runs.append((own, []))
        runs[-1][1].append(row)
    frame_chars = sum(run[-1].end - run[0].start for own, run in runs if own)
    if len(runs) == 1 or frame_chars > most or not runs[0][0]:
        _pack([[row] for row in rows], most, frames, to)
        return
    around = to.frames([(run[0].start, run[-1].end) for own, run in runs if own], frames)
    for own, run in runs:
        if not own:
            _split(run, most, around, to, depth + 1)


def _pack(groups: list[list[_Line]], most: int, frames: tuple[int, ...], to: Pieces) -> None:
    """Whole groups together while they fit."""
    start = end = -1
    for group in groups:
        first, last = group[0].start, group[-1].end
        if start >= 0 and last - start > most:
            to.add((start, end), frames)
            start = -1
        start, end = first if start < 0 else start, last
    if start >= 0:
        to.add((start, end), frames)


def _look(text: str, row: Range) -> _Line:
    line = NUMBERED.sub("", text[slice(*row)], count=1)
    code = line.strip()
    if not code:
        return _Line(*row, -1, False, False)
    width = len(line[: len(line) - len(line.lstrip())].expandtabs(_TAB))
    return _Line(*row, width, bool(_CLOSES.match(code)), bool(_LEADS.match(code)))
