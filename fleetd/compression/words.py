"""Plain text: words, sentences, and how many tokens a model will make of it, roughly."""

from __future__ import annotations

import math
import re
import string

Range = tuple[int, int]

# Characters per token of today's vocabularies: words are long, digits and signs short, and other scripts have
# hardly more than one.
_PLAIN, _MARKS, _WIDE = 4.8, 1.6, 1.5
_PLAIN_BYTES = (string.ascii_letters + string.whitespace).encode()

# Ends of sentences: with a space behind in scripts that have them, without one in those that do not. A full
# stop inside a number, a name or an abbreviation of one letter ends nothing.
_SHORT = "Mr|Ms|Mrs|Dr|Prof|St|No|Nr|Fig|vs|cf|ca|approx|e.g|i.e|z.B"
_NOT_AFTER = r"(?<!\b[^\W\d])" + "".join(rf"(?<!\b{re.escape(word)})" for word in _SHORT.split("|"))
_SENTENCE_END = re.compile(
    _NOT_AFTER + r"[.!?\u2026][\"'\u201d\u2019)\]]*(?=\s)\s*"
    r"|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f]*\s*"
    r"|\n+"
)
# A blank line, and what more of them follow it.
PARAGRAPH_END = re.compile(r"\r?\n[ \t]*\r?\n\s*")
_WORD = re.compile(r"[^\W_]+(?:[.'\u2019_-][^\W_]+)*|[\u3040-\u30ff\u3400-\u9fff]")


def estimate_tokens(text: str) -> int:
    """Estimated token count of ``text``; at least 1 unless it is empty."""
    ascii_bytes = text.encode("ascii", "ignore")
    marks = len(ascii_bytes.translate(None, _PLAIN_BYTES))
    wide = len(text) - len(ascii_bytes)
    return math.ceil((len(ascii_bytes) - marks) / _PLAIN + marks / _MARKS + wide / _WIDE)


def sentences(text: str, start: int, end: int) -> list[Range]:
    """Ranges that tile ``[start, end)``, each a sentence or a line with the spaces behind it."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text, start, end)]
    if not ends or ends[-1] < end:
        ends.append(end)
    return list(zip([start, *ends], ends, strict=False)) if end > start else []


def lines(text: str, start: int, end: int) -> list[Range]:
    """Ranges that tile ``[start, end)``, each a line with its line feed."""
    found = []
    while start < end:
        stop = text.find("\n", start, end) + 1 or end
        found.append((start, stop))
        start = stop
    return found


def words(text: str) -> list[str]:
    """Lower-case words; identifiers, numbers and names with dots or hyphens in them stay whole."""
    return _WORD.findall(text.lower())


def merged(ranges: list[Range]) -> list[Range]:
    """Sorted and disjoint, with ranges that touch joined into one; empty ones are left out."""
    joined: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
