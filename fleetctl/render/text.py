"""Words and figures for people: safe text, sizes, durations, tables. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from fleetd.text.terminal_text import printable

# Between a figure and its unit no line is broken.
_UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|d|B|kB|MB|GB|TB|%|tok/s|tokens?|cores?)(?![\w/]))")
_NO_BREAK = "\u00a0"
# Nor within a command, which is to be copied.
_COMMAND = re.compile(r"`[^`]*`")
# Narrower lines are unreadable, so the text is not broken further.
_NARROWEST = 20


def one_line(text: str) -> str:
    """Safe text in one line, for names and messages in tables."""
    return printable(text.replace("\n", " ").replace("\t", " "))


def clause(text: str) -> str:
    """A sentence of the daemon's without its full stop, for use within another sentence."""
    return one_line(text).rstrip(". ")


def size(count_bytes: float | None) -> str:
    """1536 → "1.5 kB" in powers of 1000, as disks and memory figures in the docs are."""
    if count_bytes is None:
        return "-"
    value = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            digits = 0 if unit == "B" or abs(value) >= 99.95 else 1
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """0.84 → "0.84 s", 75 → "1 min 15 s", 7300 → "2 h 1 min"."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    for big, big_name, small, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= big:
            return f"{whole // big} {big_name} {whole % big // small} {small_name}"
    raise AssertionError("unreachable")


def brief(seconds: float | None) -> str:
    """A time to be compared, of a step or a first token: 0.0042 → "4.2 ms", 10.93 → "10.9 s", None → "-"."""
    if seconds is None:
        return "-"
    if seconds >= 0.0995:
        return f"{seconds:.1f} s" if 9.995 <= seconds < 99.95 else duration(seconds)
    return f"{1000 * seconds:.{1 if 0.00005 <= seconds < 0.00995 else 0}f} ms"


def rough(seconds: float) -> str:
    """An estimated time: whole seconds, and never none."""
    return f"{max(1, round(seconds))} s" if seconds < 59.5 else duration(seconds)


def count(number: float) -> str:
    """Thousands with commas."""
    return f"{number:,.0f}"


def layers(first: int, last: int) -> str:
    """Those from ``first`` up to and without ``last``: "layers 0-14"."""
    return f"layers {first}-{last - 1}" if last - first > 1 else f"layer {first}"


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Lines of at most ``width`` cells, broken between words; None leaves it to the reader.

    A command in backticks stays on one line, which is longer if the command is.
    """
    if width is None:
        return indent + text
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    filled = textwrap.fill(
        _UNIT_SPACE.sub(_NO_BREAK, whole),
        max(width, _NARROWEST),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_NO_BREAK, " ")


def labelled(label: str, text: str, width: int | None, chars: int) -> str:
    """A fact behind its label, whose lines begin in the column after ``chars``."""
    indent = " " * chars
    return f"{label:<{chars}}{wrapped(text, width, indent=indent)[chars:]}"


def joined(facts: Sequence[str], between: str, width: int | None) -> list[str]:
    """Lines of at most ``width`` cells, broken between the facts; None is one line."""
    lines: list[str] = []
    for fact in facts:
        if lines and (width is None or len(lines[-1]) + len(between) + len(fact) <= width):
            lines[-1] += between + fact
        else:
            lines.append(fact)
    return lines


def listed(names: Sequence[str]) -> str:
    """["a", "b", "c"] → "a, b and c"."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Columns two spaces apart; those in ``right`` aligned right. Plain text, so that it pipes well."""
    cells = [list(header), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    to_right = set(right)
    lines = [
        "  ".join(
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)
