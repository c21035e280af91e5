"""Code in pieces that follow its statements, in any language: by indentation, and by lines that only close.

def f(x):        ─ frame        A piece of f's body is never kept without the lines at f's own depth
    a = g(x)     ─ piece        around it: `def f(x):`, `} else {`, `}`. So braces stay balanced, and a
    ...                         statement never stands in another function than its own.
    return a     ─ piece
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from fleetd.compression.structure import unnumbered
from fleetd.compression.unit_list import UnitList
from fleetd.compression.words import Range, lines

_TAB = 4
_DEPTH = 12
# More lines of its own than this has no statement that is worth framing.
_FRAMES = 16
# Of the longest piece, what comments in front of a statement may have that come with each of its pieces.
_LEAD_SHARE = 0.25
# Lines that go on with, or end, what stands above them at the same depth; a brace may have a line to itself.
_CLOSES = re.compile(
    r"[{)\]}>]|(?:end|else|elif|elsif|except|finally|catch|rescue|then|fi|done|esac|until)\b|\*/"
)
# Lines that may stand left of the statement that they are part of: parts of a switch or a class, and what a
# compiler does not read as code.
_LABEL = re.compile(r"(?:case\b.*|default|public|private|protected)\s*:")
_LABEL_CHARS = 200
_ASIDE = re.compile(r"//|#(?!include|define)|--\s|<!--")
# Lines that belong to the one below them: decorators, attributes, comments.
_LEADS = re.compile(r"@|#\[|#(?!include|define)|//|/\*|\*(?!/)|--\s|<!--|\[\w+\]|template\s*<")


class _Line(msgspec.Struct, frozen=True):
    start: int
    end: int
    indent: int  # -1: blank
    closes: bool = False
    leads: bool = False
    label: bool = False
    aside: bool = False


def split(text: str, span: Range, most: int, frames: tuple[int, ...], to: UnitList) -> None:
    """Pieces of at most about ``most`` characters that tile ``span``. Never cut within a line."""
    rows = lines(text, *span)
    bare = unnumbered([text[slice(*row)] for row in rows])
    _split([_look(row, line) for row, line in zip(rows, bare, strict=True)], most, frames, to, 0)


def _split(rows: list[_Line], most: int, frames: tuple[int, ...], to: UnitList, depth: int) -> None:
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
    """Statements: each begins at the smallest depth and has the deeper, blank and closing lines after it."""
    base = min((row.indent for row in rows if row.indent >= 0), default=0)
    inside = _inside_of(rows, base)
    groups: list[list[_Line]] = []
    leading = False
    for row, goes_on in zip(rows, inside, strict=True):
        begins = row.indent == base and not row.closes and not leading
        # Each part of a switch is a statement, where its parts stand deeper than the switch.
        if begins and goes_on and groups and not (row.label and groups[-1][0].label):
            begins = False
        if not groups or begins:
            groups.append([])
        groups[-1].append(row)
        if row.indent == base:
            leading = row.leads and not goes_on
    return groups


def _inside_of(rows: Sequence[_Line], base: int) -> list[bool]:
    """True for each line whose depth says nothing: it belongs to the statement above it."""
    found: list[bool] = []
    deeper = False
    for row in reversed(rows):
        says_nothing = row.label or row.aside
        if row.indent >= 0 and not says_nothing:
            deeper = row.indent > base or row.closes
        found.append(says_nothing and deeper)
    return found[::-1]


def _inside(rows: list[_Line], most: int, frames: tuple[int, ...], to: UnitList, depth: int) -> None:
    """Split a statement that is too long: its own lines become frames of its deeper lines."""
    base = min((row.indent for row in rows if row.indent >= 0), default=0)
    runs: list[tuple[bool, list[_Line]]] = []
    for row in rows:
        own = row.indent == base or (row.indent < 0 and (not runs or runs[-1][0]))
        if not runs or runs[-1][0] != own:
            runs.append((own, []))
        runs[-1][1].append(row)
    lead = _lead(runs[0][1], most)
    runs[0] = (runs[0][0], runs[0][1][len(lead) :])
    own_runs = [run for own, run in runs if own]
    frame_chars = sum(run[-1].end - run[0].start for run in own_runs)
    if len(runs) == 1 or frame_chars > most or len(own_runs) > _FRAMES or not runs[0][0]:
        _pack([[row] for row in rows], most, frames, to)
        return
    around = to.frames([(run[0].start, run[-1].end) for run in own_runs], frames)
    _pack([[row] for row in lead], most, around, to)
    for own, run in runs:
        if not own:
            _split(run, most, around, to, depth + 1)


def _lead(first: list[_Line], most: int) -> list[_Line]:
    """The comments before a statement, if they are too long to be repeated with each of its pieces."""
    count = next((i for i, row in enumerate(first) if row.indent >= 0 and not row.leads), 0)
    return first[:count] if first[count].start - first[0].start > _LEAD_SHARE * most else []


def _pack(groups: list[list[_Line]], most: int, frames: tuple[int, ...], to: UnitList) -> None:
    """Join whole groups while they fit."""
    start = end = -1
    for group in groups:
        first, last = group[0].start, group[-1].end
        if start >= 0 and last - start > most:
            to.add((start, end), frames)
            start = -1
        start, end = first if start < 0 else start, last
    if start >= 0:
        to.add((start, end), frames)


def _look(row: Range, line: str) -> _Line:
    code = line.strip()
    if not code:
        return _Line(*row, -1)
    width = len(line[: len(line) - len(line.lstrip())].expandtabs(_TAB))
    return _Line(
        *row,
        width,
        closes=bool(_CLOSES.match(code)),
        leads=bool(_LEADS.match(code)),
        label=bool(_LABEL.match(code[:_LABEL_CHARS])),
        aside=bool(_ASIDE.match(code)),
    )
