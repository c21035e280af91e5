"""Signs in what people write: of a task that needs all of a text, and of a question about one thing in it.

``gate_signs.txt`` has the patterns, by kind and in five languages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

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
# How the answer is to look, "in one word": left out before signs are counted.
_ANSWER = "answer"

_KIND = re.compile(r"^\[(\w+)\].*$", re.MULTILINE)
# What a pattern in the file writes, and what it means.
_SHORTHAND = (("_", r"\s"), ("~", r".{0,40}?"), ("$", r"(?!\w)"))
# Chinese is written without spaces: its signs begin anywhere.
_ANYWHERE = re.compile(r"[(\[?<!^|]*[\u3400-\u9fff]")


class SignCounts(msgspec.Struct, frozen=True):
    """How many signs of each kind there are; ``rest``: the words that are no signs.

    ``own``: signs of tasks for the whole text that the text itself has, which are not in ``counts``: what is
    asked about may be called a total or a letter.
    """

    counts: Mapping[str, int]
    own: int
    rest: str


def count_signs(task: str, text: str) -> SignCounts:
    # Runs of spaces as one: patterns take time that grows with the square of theirs.
    said, low = " ".join(task.lower().split()), text.lower()
    said = _signs()[_ANSWER].sub(lambda match: " " * len(match.group()), said)
    counts, own, rest = {}, 0, list(said)
    for kind in (*WHOLE, ONE):
        found = [match.span() for match in _signs()[kind].finditer(said)]
        theirs = sum(kind in WHOLE and _has(low, said[start:end].strip()) for start, end in found)
        counts[kind] = len(found) - theirs
        own += theirs
        for start, end in found:
            rest[start:end] = " " * (end - start)
    return SignCounts(counts, own, "".join(rest))


def _has(text: str, sign: str) -> bool:
    """Whether a word of the text begins with the sign; in Chinese, whether it stands anywhere."""
    begins = "" if _ANYWHERE.match(sign) else r"(?<!\w)"
    return re.search(begins + re.escape(sign), text) is not None


@cache
def _signs() -> Mapping[str, re.Pattern[str]]:
    text = files(__package__).joinpath("gate_signs.txt").read_text(encoding="utf-8")
    _, *parts = _KIND.split(text)
    return {kind: _compiled(patterns) for kind, patterns in zip(parts[::2], parts[1::2], strict=True)}


def _compiled(patterns: str) -> re.Pattern[str]:
    anywhere = [pattern for pattern in patterns.split() if _ANYWHERE.match(pattern)]
    at_words = [pattern for pattern in patterns.split() if not _ANYWHERE.match(pattern)]
    joined = "|".join([rf"(?<!\w)(?:{'|'.join(at_words)})", *anywhere])
    for written, meant in _SHORTHAND:
        joined = joined.replace(written, meant)
    return re.compile(joined)
