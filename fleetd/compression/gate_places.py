"""Where in a text the words of a question stand: a question points at few places, a task at none or at all.

    "When did Marta sell the mill?"     marta 3 places, sell 2, mill 4; one place has all three ──► it points
    "Boil it down for me."              boil 0, down 11 ──► it points nowhere

Nothing is known of a language. A word counts by how few places have it, inflected or not; scripts that write
words together are read by pairs of characters.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict

import msgspec

# Places overlap by half, so that two words side by side have one in common. Of a long text they are longer.
_PLACE_CHARS, _PLACES = 240, 2000
_TERMS = 60
# What is left of a word without its ending; long ones are looked for inside of words too.
_STEM_SHARE, _STEM_CHARS, _INSIDE_CHARS = 0.6, 4, 6
_LEAST_CHARS = 3
_JOINED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[^\W_{_JOINED}]+(?:[.'\u2019_/-][^\W_{_JOINED}]+)*|[{_JOINED}]+")
_IS_JOINED = re.compile(rf"[{_JOINED}]")
# A text has a script if so many of its letters are of it, of those that are looked at.
_SCRIPT_SHARE, _SCRIPT_LETTERS = 0.1, 2000


class Pointing(msgspec.Struct, frozen=True):
    """``words``: how many of the question's words the best place has. A word that stands in one place only
    counts 1, one that stands everywhere 0. ``foreign``: the text is in another script, and no word can be
    in it."""

    words: float = 0.0
    foreign: bool = False


def pointing(question: str, text: str) -> Pointing:
    low = text.lower()
    step = max(_PLACE_CHARS, len(low) // _PLACES)
    places = len(low) // step + 1
    found: defaultdict[int, float] = defaultdict(float)
    for pattern in _patterns(question.lower()):
        at = {match.start() // step for match in re.finditer(pattern, low)}
        worth = max(0.0, 1 - math.log(len(at) + 0.5) / math.log(places + 1))
        for place in at | {place - 1 for place in at}:
            found[place] += worth
    return Pointing(max(found.values(), default=0.0), _foreign(question, text))


def _foreign(question: str, text: str) -> bool:
    asked, has = _scripts(question), _scripts(text)
    if not asked:
        return False
    return has[asked.most_common(1)[0][0]] < _SCRIPT_SHARE * has.total()


def _scripts(text: str) -> Counter[str]:
    """How many letters are of each script, by their Unicode names: LATIN, CJK, CYRILLIC."""
    letters = [c for c in text[:_SCRIPT_LETTERS] if c.isalpha()]
    return Counter(unicodedata.name(c, "").partition(" ")[0] for c in letters)


def _patterns(question: str) -> list[str]:
    """A pattern for each of the question's words, the last ones if there are many."""
    found: dict[str, None] = {}
    for word in _WORD.findall(question):
        if _IS_JOINED.match(word):
            found.update(dict.fromkeys(re.escape(word[i : i + 2]) for i in range(max(1, len(word) - 1))))
        elif any(c.isdigit() for c in word):
            found[rf"(?<!\w){re.escape(word)}(?!\w)"] = None
        elif len(word) >= _LEAST_CHARS:
            stem = word[: max(_STEM_CHARS, math.ceil(len(word) * _STEM_SHARE))]
            found[re.escape(stem) if len(stem) >= _INSIDE_CHARS else rf"(?<!\w){re.escape(stem)}"] = None
    return list(found)[-_TERMS:]
