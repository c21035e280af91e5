"""Text that comes in pieces of any size, for grammars that read it once wherever the pieces end. Pure.

A grammar is a generator: it takes what it is sure of, and yields if it needs more text. What it may look at
without taking it is as short as the longest word it looks for, so that the work of a text grows as the text
does; ``looked`` counts it, and a text that takes more than it may fails.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

import msgspec

from fleetd import limits
from fleetd.errors import EngineError

T = TypeVar("T")
#: Yields wherever more text is needed, and returns what was read.
Reading: TypeAlias = Generator[None, None, T]

BLANKS = re.compile(r"\s*")


class Words(msgspec.Struct, frozen=True):
    """Texts to look for."""

    #: Finds the longest text at a place.
    pattern: re.Pattern[str]
    #: Characters of the longest text.
    longest: int
    #: Every beginning of one of the texts.
    begun: frozenset[str]


@functools.lru_cache(maxsize=1024)
def words(*texts: str) -> Words:
    found = sorted({text for text in texts if text}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, found)) or r"(?!)")
    begun = frozenset(text[:size] for text in found for size in range(len(text)))
    return Words(pattern, max(map(len, found), default=0), begun)


class TextFeed:
    """A text as far as it has come, and the place up to which a grammar has taken it."""

    def __init__(self) -> None:
        #: Characters that were taken.
        self.read = 0
        #: The text has ended where a grammar looked for more.
        self.lacking = False
        #: Characters that were looked at, each as often as it was.
        self.looked = 0
        #: The text ended before the model ended it.
        self.cut = False
        self._text = ""
        self._at = 0
        self._given = 0
        self._ended = False
        self._marks: list[list[str]] = []

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self._given += len(text)

    def end(self, *, cut: bool = False) -> None:
        self._ended, self.cut = True, cut

    def take(self, count: int) -> str:
        """The next ``count`` characters of what was looked at."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self.read += len(text)
        if self._marks:
            self._marks[-1].append(text)
        return text

    def drain(self) -> str:
        """Take all text that has come."""
        return self.take(len(self._text) - self._at)

    def mark(self) -> None:
        """Remember the text that is taken from here on, until ``taken``."""
        self._marks.append([])

    def taken(self) -> str:
        """The text that was taken since the last mark. Removes the mark."""
        text = "".join(self._marks.pop())
        if self._marks:
            self._marks[-1].append(text)
        return text

    def peek(self) -> Reading[str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        self._look(1)
        return self._text[self._at]

    def starts(self, wanted: Words) -> Reading[str]:
        """The one of some words that comes next; "" if none does. Does not take it."""
        while True:
            rest = self._text[self._at : self._at + wanted.longest]
            self._look(len(rest))
            if found := wanted.pattern.match(rest):
                return found[0]
            if rest not in wanted.begun or not (yield from self._more()):
                return ""

    def skip(self, wanted: Words) -> Reading[str]:
        """Take the word that ``starts`` finds, and return it. If a text was cut inside of one, its
        beginning is taken and not returned."""
        found = yield from self.starts(wanted)
        if not found and self.cut and (rest := self._text[self._at :]) in wanted.begun:
            self.take(len(rest))
        return self.take(len(found))

    def span(self, chars: re.Pattern[str], most: int | None = None) -> Reading[str]:
        """Take the characters that come next and belong to a class, written as ``[…]*``; at most ``most``."""
        parts: list[str] = []
        size = 0
        while True:
            end = len(self._text) if most is None else min(len(self._text), self._at + most - size)
            found = chars.match(self._text, self._at, end)
            text = self.take(found.end() - self._at if found else 0)
            self._look(len(text))
            parts.append(text)
            size += len(text)
            if size == most or self._at < len(self._text) or not (yield from self._more()):
                return "".join(parts)

    def until(self, wanted: Words, tell: Callable[[str], None], *, whole: bool = False) -> Reading[str]:
        """Take the text before the first of some words, telling it as soon as it is certain. Returns the
        word, which is not taken; "" if there is none up to the end.

        Args:
            whole: if the text is cut, an end of it that may have become one of the words is not taken.
        """
        while True:
            size = len(self._text)
            found = wanted.pattern.search(self._text, self._at)
            self._look((found.end() if found else size) - self._at)
            certain = self._certain(wanted, found.start() if found else size, whole)
            if certain > self._at:
                tell(self.take(certain - self._at))
            if found and certain == found.start():
                return found[0]
            if not self._ended and not (yield from self._more()):
                continue  # what was held back is certain now
            if self._ended and certain == self._at:
                return ""

    def _certain(self, wanted: Words, end: int, whole: bool) -> int:
        """How far the text up to ``end`` cannot be the beginning of a word that is not whole yet."""
        size = len(self._text)
        first = max(self._at, size - wanted.longest + 1)
        if end < first or (self._ended and not (whole and self.cut)):
            return end
        return next((at for at in range(first, end) if self._text[at:] in wanted.begun), end)

    def _more(self) -> Reading[bool]:
        """Wait for more text. False if none will come."""
        if not self._ended:
            yield
        self.lacking = self._ended
        return not self._ended

    def _look(self, chars: int) -> None:
        self.looked += chars
        if self.looked > limits.LOOKS_PER_CHAR * (self._given + limits.ANSWER_HEAD_CHARS):
            raise EngineError(
                "The text of this answer takes too long to read.", hint="Please report this with the answer."
            )
