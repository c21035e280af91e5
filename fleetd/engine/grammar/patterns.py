"""Regular expressions of JSON schemas, written anew for the library that enforces them. Pure.

Schemas write regular expressions as ECMAScript has them; the library reads Rust's. They differ in what
``.``, ``\\s`` and brackets mean. A pattern is therefore parsed here, and written in the few constructs that
mean the same in both: characters by their numbers, groups, alternatives, counted repeats. Control characters,
which JSON text can only write by their numbers, are in no class: held answers never write them.

Validators differ in whether ``\\d``, ``\\w`` and ``\\s`` mean more than ASCII. What is written here allows
what all of them allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from fleetd import limits

#: First and last code point of each run of characters.
Ranges = tuple[tuple[int, int], ...]

#: Characters that JSON text can hold as themselves or as an escape with a letter.
_SPELLED: Ranges = ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
# fmt: off
_SPACES: Ranges = (
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)
# fmt: on
#: Letters, digits and what no validator takes for either, beyond ASCII.
_WIDE_WORD: Ranges = (*_WORD, (0x80, 0x200F), (0x205F, 0x209F), (0x20C0, 0x218F), (0x2400, 0x10FFFF))
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
#: Classes of Unicode that mean the same in both notations.
_PROPERTIES = frozenset({"L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "Nd", "Nl", "No", "P", "S", "Z", "Zs"})
_NESTING = 32


class PatternError(ValueError):
    """A pattern that is malformed, or has a construct that cannot be enforced."""

    def __init__(self, message: str, *, malformed: bool = False) -> None:
        super().__init__(message)
        self.malformed = malformed


@dataclass(frozen=True)
class Pattern:
    """A pattern for whole strings, in the library's notation."""

    #: Without anchors: it stands for the whole of a string.
    text: str
    #: Fewest and most characters of a string that matches; None if nothing bounds them.
    least: int
    most: int | None
    #: The class, if the pattern is one class repeated ``least`` to ``most`` times; else "".
    repeated: str = ""

    def anchored(self) -> str:
        return f"^(?:{self.text})$"

    def of_length(self, low: int, high: int | None) -> Pattern:
        """The same pattern for strings of ``low`` to ``high`` characters; only if one class is repeated."""
        least = max(low, self.least)
        most = self.most if high is None else high if self.most is None else min(high, self.most)
        return Pattern(self.repeated + _repeats(least, most), least, most, self.repeated)


# ---- What a pattern is made of --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Characters:
    ranges: Ranges
    properties: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Edge:
    end: bool


@dataclass(frozen=True)
class _Repeat:
    part: _Part
    low: int
    high: int | None


@dataclass(frozen=True)
class _Group:
    """Alternatives, each a sequence of parts."""

    options: tuple[tuple[_Part, ...], ...]


_Part = _Characters | _Edge | _Repeat | _Group


def translated(pattern: str) -> Pattern:
    """A pattern of a schema in the library's notation.

    Raises:
        PatternError: it is malformed, or has a construct that cannot be enforced.
    """
    group = _Parser(pattern).parsed()
    if _size(group) > limits.SCHEMA_PATTERN_SIZE:
        raise PatternError(f"its repeats stand for more than {limits.SCHEMA_PATTERN_SIZE:,} characters")
    writer = _PatternWriter()
    text = writer.group(group, left=True, right=True)
    least, most = _lengths(group)
    if writer.searched:
        return Pattern(text, least, None)
    return Pattern(text, least, most, _only_class(group))


def _only_class(group: _Group) -> str:
    parts = [part for part in group.options[0] if not isinstance(part, _Edge)]
    if len(group.options) > 1 or len(parts) != 1:
        return ""
    part = parts[0].part if isinstance(parts[0], _Repeat) else parts[0]
    return _class_text(part) if isinstance(part, _Characters) else ""


def _size(part: _Part) -> int:
    if isinstance(part, _Repeat):
        return _size(part.part) * max(part.low, part.high or 1, 1)
    if isinstance(part, _Group):
        return sum(_size(each) for option in part.options for each in option) + len(part.options)
    return 1


def _lengths(part: _Part) -> tuple[int, int | None]:
    if isinstance(part, _Characters):
        return 1, 1
    if isinstance(part, _Edge):
        return 0, 0
    if isinstance(part, _Repeat):
        low, high = _lengths(part.part)
        return low * part.low, None if high is None or part.high is None else high * part.high
    sums = [[_lengths(each) for each in option] for option in part.options]
    highs = [[high for _, high in each if high is not None] for each in sums]
    bounded = all(len(high) == len(each) for high, each in zip(highs, sums, strict=True))
    least = min(sum(low for low, _ in each) for each in sums)
    return least, max(sum(high) for high in highs) if bounded else None


# ---- Writing --------------------------------------------------------------------------------------------


class _PatternWriter:
    def __init__(self) -> None:
        #: True once a part was not anchored, so that any text may stand beside it.
        self.searched = False

    def group(self, group: _Group, *, left: bool = False, right: bool = False) -> str:
        """Text of a group. On a side that is given, any text may stand before or behind it, except where an
        anchor says otherwise."""
        options = [self._option(option, left=left, right=right) for option in group.options]
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _option(self, option: tuple[_Part, ...], *, left: bool, right: bool) -> str:
        parts = list(option)
        while left and parts and parts[0] == _Edge(end=False):
            parts.pop(0)
            if not parts or parts[0] != _Edge(end=False):
                left = False
        while right and parts and parts[-1] == _Edge(end=True):
            parts.pop()
            if not parts or parts[-1] != _Edge(end=True):
                right = False
        if not parts:
            return self._anything() if left or right else ""
        last = len(parts) - 1
        written = []
        for i, part in enumerate(parts):
            before, behind = left and i == 0, right and i == last
            if isinstance(part, _Group):
                written.append(f"(?:{self.group(part, left=before, right=behind)})")
            else:
                text = self._part(part)
                written.append(
                    (self._anything() if before else "") + text + (self._anything() if behind else "")
                )
        return "".join(written)

    def _anything(self) -> str:
        self.searched = True
        return _class_text(_Characters(_SPELLED)) + "*"

    def _part(self, part: _Part) -> str:
        if isinstance(part, _Characters):
            return _class_text(part)
        if isinstance(part, _Repeat):
            inner = part.part
            text = _class_text(inner) if isinstance(inner, _Characters) else f"(?:{self._part(inner)})"
            return text + _repeats(part.low, part.high)
        if isinstance(part, _Group):
            return self.group(part)
        raise PatternError("it has an anchor inside")


def _repeats(low: int, high: int | None) -> str:
    if (low, high) == (1, 1):
        return ""
    return {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (low, high), f"{{{low},{'' if high is None else high}}}"
    )


def _class_text(characters: _Characters) -> str:
    (first, *more) = characters.ranges or ((-1, -1),)
    if not more and not characters.properties and first[0] == first[1]:
        return _character(first[0])
    runs = [
        _character(low) if low == high else f"{_character(low)}-{_character(high)}"
        for low, high in characters.ranges
    ]
    runs += [f"\\p{{{name}}}" for name in characters.properties]
    return f"[{''.join(runs)}]"


def _character(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 128 else f"\\u{{{code:x}}}"


# ---- Reading --------------------------------------------------------------------------------------------


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parsed(self) -> _Group:
        group = self._group()
        if self._at < len(self._text):
            raise PatternError("it has a ) too many", malformed=True)
        return group

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _took(self, text: str) -> bool:
        if self._peek(text):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early", malformed=True)
        self._at += 1
        return self._text[self._at - 1]

    def _group(self) -> _Group:
        self._depth += 1
        if self._depth > _NESTING:
            raise PatternError(f"its groups nest more than {_NESTING} deep")
        options = [self._option()]
        while self._took("|"):
            options.append(self._option())
        self._depth -= 1
        return _Group(tuple(options))

    def _option(self) -> tuple[_Part, ...]:
        parts: list[_Part] = []
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            parts.append(self._quantified(self._atom()))
        return tuple(parts)

    def _atom(self) -> _Part:
        taken = self._next()
        if taken == "(":
            return self._parenthesis()
        if taken == "[":
            return self._class()
        if taken == "\\":
            return self._escape()
        if taken == ".":
            return _Characters(_without(_LINE_ENDS))
        if taken in "^$":
            return _Edge(end=taken == "$")
        if taken in "*+?" or (
            taken == "{" and (self._at == len(self._text) or self._text[self._at] in "0123456789,")
        ):
            raise PatternError(f"nothing stands before {taken!r}", malformed=True)
        return _Characters(_spelled(((ord(taken), ord(taken)),)))

    def _parenthesis(self) -> _Part:
        for start, name in (
            ("?=", "a lookahead"),
            ("?!", "a lookahead"),
            ("?<=", "a lookbehind"),
            ("?<!", "a lookbehind"),
        ):
            if self._peek(start):
                raise PatternError(f"it has {name}")
        if self._took("?<"):
            while (taken := self._next()) != ">":
                if not (taken.isalnum() or taken in "_$"):
                    raise PatternError("the name of a group is malformed", malformed=True)
        elif not self._took("?:") and self._peek("?"):
            raise PatternError("it has a group of a kind that ECMAScript does not have", malformed=True)
        group = self._group()
        if not self._took(")"):
            raise PatternError("a ) is missing", malformed=True)
        return group

    def _quantified(self, part: _Part) -> _Part:
        low: int
        high: int | None
        if self._took("*"):
            low, high = 0, None
        elif self._took("+"):
            low, high = 1, None
        elif self._took("?"):
            low, high = 0, 1
        elif self._peek("{") and self._text[self._at + 1 : self._at + 2].isdigit():
            low, high = self._counts()
        else:
            return part
        self._took("?")
        if isinstance(part, _Edge):
            raise PatternError("it repeats an anchor", malformed=True)
        if high is not None and low > high:
            raise PatternError(f"{{{low},{high}}} counts backwards", malformed=True)
        return _Repeat(part, low, high)

    def _counts(self) -> tuple[int, int | None]:
        text, closed, _ = self._text[self._at + 1 : self._at + 32].partition("}")
        low, comma, high = text.partition(",")
        if not closed or not low.isdecimal() or not (high.isdecimal() or not high) or not text.isascii():
            raise PatternError("the counts of a repeat are malformed", malformed=True)
        self._at += len(text) + 2
        if not comma:
            return int(low), int(low)
        return int(low), int(high) if high else None

    def _escape(self) -> _Part:
        taken = self._next()
        if taken in "bB":
            raise PatternError(f"it has the word border \\{taken}")
        if taken in "123456789k":
            raise PatternError("it refers back to a group")
        return self._escaped(taken)

    def _escaped(self, taken: str, *, widest: bool = False) -> _Characters:
        """The characters of an escape with the letter ``taken``: those on which all validators agree, or, if
        ``widest``, those that any of them takes."""
        if taken in "dws":
            return _Characters(_set_of(taken, widest=widest))
        if taken in "DWS":
            return _Characters(_without(_set_of(taken.lower(), widest=not widest)))
        if taken in "pP":
            return self._property(taken)
        if taken in _CONTROLS:
            code = _CONTROLS[taken]
        elif taken == "c":
            code = ord(self._next()) % 32
        elif taken == "x":
            code = self._hex(2)
        elif taken == "u":
            code = self._unicode()
        elif taken.isalnum():
            raise PatternError(f"ECMAScript has no \\{taken}", malformed=True)
        else:
            code = ord(taken)
        return _Characters(_spelled(((code, code),)))

    def _property(self, taken: str) -> _Characters:
        end = self._text.find("}", self._at)
        name = self._text[self._at + 1 : end] if self._peek("{") and end >= 0 else ""
        if taken == "P" or name not in _PROPERTIES:
            raise PatternError(f"it has the class \\{taken}{{{name[:16]}}}")
        self._at = end + 1
        return _Characters((), (name,))

    def _hex(self, digits: int) -> int:
        text = self._text[self._at : self._at + digits]
        if len(text) < digits or any(each not in "0123456789abcdefABCDEF" for each in text):
            raise PatternError("an escape by number is malformed", malformed=True)
        self._at += digits
        return int(text, 16)

    def _unicode(self) -> int:
        if self._took("{"):
            text, closed, _ = self._text[self._at : self._at + 8].partition("}")
            if not closed or not text:
                raise PatternError("an escape by number is malformed", malformed=True)
            code = self._hex(len(text))
            self._at += 1
            if code > 0x10FFFF:
                raise PatternError("an escape by number is malformed", malformed=True)
            return code
        code = self._hex(4)
        if 0xD800 <= code < 0xDC00 and self._took("\\u"):
            return 0x10000 + (code - 0xD800) * 1024 + (self._hex(4) - 0xDC00) % 1024
        return code

    def _class(self) -> _Characters:
        negated = self._took("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._took("]"):
            first = self._member(widest=negated)
            if self._peek("-") and not self._peek("-]") and len(first.ranges) <= 1:
                self._at += 1
                ranges.append(self._run(first, self._member(widest=negated)))
                continue
            ranges.extend(first.ranges)
            properties.extend(first.properties)
        if negated and properties:
            raise PatternError("it has a class of Unicode in a class that leaves out")
        if negated:
            return _Characters(_without(ranges))
        return _Characters(
            _spelled(ranges) if not properties else _merged(_common(ranges, _SPELLED)), tuple(properties)
        )

    def _member(self, *, widest: bool) -> _Characters:
        """One member of a class. Control characters are kept: they may be the end of a run."""
        taken = self._next()
        if taken != "\\":
            return _Characters(((ord(taken), ord(taken)),))
        taken = self._next()
        if taken == "b":
            return _Characters(((8, 8),))
        if taken in _CONTROLS:
            return _Characters(((_CONTROLS[taken], _CONTROLS[taken]),))
        if taken in "xu":
            code = self._hex(2) if taken == "x" else self._unicode()
            return _Characters(((code, code),))
        return self._escaped(taken, widest=widest)

    @staticmethod
    def _run(first: _Characters, last: _Characters) -> tuple[int, int]:
        if len(first.ranges) != 1 or len(last.ranges) != 1:
            raise PatternError("a class has a run without an end", malformed=True)
        (low, low_end), (high, high_end) = first.ranges[0], last.ranges[0]
        if low != low_end or high != high_end or low > high:
            raise PatternError("a class has a run that counts backwards", malformed=True)
        return low, high


# ---- Sets of characters ---------------------------------------------------------------------------------


@cache
def _set_of(letter: str, *, widest: bool) -> Ranges:
    """What an escape means: to all validators, or to any of them."""
    if letter == "d":
        others = ((code, code) for code in range(0x80, 0x20000) if chr(code).isdecimal())
        return _merged([*_DIGITS, *others]) if widest else _DIGITS
    if letter == "w":
        return _WIDE_WORD if widest else _WORD
    return _merged([*_SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]) if widest else _spelled(_SPACES)


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _common(ranges: Iterable[tuple[int, int]], others: Ranges) -> list[tuple[int, int]]:
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return [(low, high) for low, high in pairs if low <= high]


def _spelled(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Those of the characters that held answers can write; raises PatternError if there are none."""
    found = _merged(_common(ranges, _SPELLED))
    if not found:
        raise PatternError("it asks for a control character or for none at all")
    return found


def _without(ranges: Iterable[tuple[int, int]]) -> Ranges:
    left, at = [], 0
    for low, high in _merged(ranges):
        left.append((at, low - 1))
        at = high + 1
    left.append((at, 0x10FFFF))
    return _spelled((low, high) for low, high in left if low <= high)
