"""The signs in what people write: for a task that needs all of a text, and for a question about one thing in it.

``gate_signs.txt`` has the patterns, by kind and in five languages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

# What a task that needs all of the text is about, by kind.
WHOLE: Mapping[str, str] = {
    "short": "summarise",
    "form": "translate, rewrite",
    "edit": "correct, quote",
    "every": "count, list, compare",
    "text": "judge, explain",
}
# The kind of a question about a part.
ONE = "one"

_KIND = re.compile(r"^\[(\w+)\].*$", re.MULTILINE)
# What a pattern in the file writes, and what it means.
_SHORTHAND = (("_", r"\s"), ("~", r".{0,40}?"), ("$", r"(?!\w)"))
_CHINESE = re.compile(r"[(\[]*[\u3400-\u9fff]")


def plain(text: str) -> str:
    """Lower case, runs of spaces as one: patterns take time that grows with the square of theirs."""
    return " ".join(text.lower().split())


def found_signs(said: str) -> dict[str, list[tuple[int, int]]]:
    """Where the signs of each kind stand in text that is ``plain``."""
    return {kind: [match.span() for match in pattern.finditer(said)] for kind, pattern in _signs().items()}


@cache
def _signs() -> Mapping[str, re.Pattern[str]]:
    text = files(__package__).joinpath("gate_signs.txt").read_text(encoding="utf-8")
    _, *parts = _KIND.split(text)
    return {kind: _compiled(patterns) for kind, patterns in zip(parts[::2], parts[1::2], strict=True)}


def _compiled(patterns: str) -> re.Pattern[str]:
    anywhere = [pattern for pattern in patterns.split() if _CHINESE.match(pattern)]
    at_words = [pattern for pattern in patterns.split() if not _CHINESE.match(pattern)]
    joined = "|".join([rf"(?<!\w)(?:{'|'.join(at_words)})", *anywhere])
    for written, meant in _SHORTHAND:
        joined = joined.replace(written, meant)
    return re.compile(joined)
