"""Patterns of schemas mean here what they mean to the validators."""

from __future__ import annotations

import random
import re
import warnings
from contextlib import suppress

import pytest

from fleetd.engine.grammar.patterns import PatternError, translated

PATTERNS = [
    *(
        "",
        "a",
        "^a",
        "a$",
        "^a$",
        "^$",
        "^a|b$",
        "(^a|b)",
        "(a|b$)",
        "^(a|b)$",
        "(^a$|^b$)",
        "a|^$",
        "x*",
        "^x+?$",
    ),
    *(
        "^a{2}$",
        "^a{2,}$",
        "^a{1,3}b?$",
        "^(ab|c){2}$",
        "((a|b)(c|d))$",
        "^[abc]$",
        "^[^abc]$",
        "[a-c-]",
    ),
    *(
        r"^\d+$",
        r"^\D$",
        r"^\w+$",
        r"^\W$",
        r"^\s$",
        r"^\S$",
        r"^[\d.-]+$",
        r"^[^\s\d]+$",
        r"^[\w-]+@[\w.]+$",
        "^.$",
    ),
    *(
        r"^\x41\u0042$",
        r"^\t|\n$",
        r"^\/\.\-\[\]\{\}$",
        "^[a&&b]$",
        "^[[a]$",
        "^[a-]$",
        "^(?:a|b)$",
        r"^\\$",
    ),
]
TEXTS = [
    "",
    "a",
    "b",
    "c",
    "ab",
    "abc",
    "aa",
    "aaa",
    "aab",
    "ccab",
    "x",
    "xx",
    "xax",
    "bd",
    "A",
    "AB",
    "1",
    "12.5-",
    "_",
]
TEXTS += [
    "\n",
    "\t",
    " ",
    "\r",
    "-",
    "&",
    "[",
    "]",
    "/.-[]{}",
    "me@x.org",
    "é",
    "\\",
    "a b",
    "aabb",
    "ac",
    "\u2028",
    ".",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_validators_match(pattern: str) -> None:
    """Python's expressions differ in ``$`` before a last line end and in ``.``; the texts leave those out."""
    ours = re.compile(
        re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: python_escape(found[1]), translated(pattern).text)
    )
    with warnings.catch_warnings(action="ignore"):  # brackets in brackets, which mean themselves
        theirs = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    texts = TEXTS if pattern != "^.$" else [text for text in TEXTS if text not in "\r\u2028"]
    texts = [text for text in texts if text.isascii() or "\\" not in pattern]
    assert [text for text in texts if bool(ours.fullmatch(text)) != bool(theirs.search(text))] == []


def python_escape(code: str) -> str:
    return f"\\U{int(code, 16):08x}"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)", "lookahead"),
        ("(?!a)", "lookahead"),
        ("(?<=a)", "lookbehind"),
        ("(?<!a)", "lookbehind"),
        (r"(a)\1", "refers back"),
        (r"(?<n>a)\k<n>", "refers back"),
        (r"\bword\b", "word border"),
        ("a^b", "an anchor inside"),
        ("(a$)b", "an anchor inside"),
        (r"\P{L}", "the class"),
        (r"\p{Script=Greek}", "the class"),
        (r"[^\p{L}]", "a class of Unicode"),
        (r"^\x01$", "a control character"),
        ("[]", "none at all"),
        ("(" * 40 + ")" * 40, "nest more than"),
        ("(a{1,1000}){1,1000}", "stand for more"),
    ],
)
def test_what_cannot_be_enforced_is_named(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why) as refused:
        translated(pattern)
    assert not refused.value.malformed


MALFORMED = [
    *("(", ")", "a)", "[a", "*", "a**", "a{2,1}", "a{1", "a{1,", "{1}", "a{,3}{2}", "(?i)a", "(?P<n>a)"),
    *(r"\a", r"\A", r"\Z", r"\x4", r"\u12", r"\u{110000}", "[b-a]", "^*", "\\", "(?<n", r"[\d-z]"),
]


@pytest.mark.parametrize("pattern", MALFORMED)
def test_a_malformed_pattern_is_told(pattern: str) -> None:
    with pytest.raises(PatternError) as refused:
        translated(pattern)
    assert refused.value.malformed


def test_lengths_of_what_a_pattern_matches_are_known() -> None:
    lengths = {"^a{2,5}$": (2, 5), "a": (1, None), "^(ab|c)+$": (1, None), "^(ab|c)$": (1, 2), "^$": (0, 0)}
    assert {each: (translated(each).least, translated(each).most) for each in lengths} == lengths


def test_the_length_of_one_repeated_class_can_be_set() -> None:
    pattern = translated("^[a-z]+$")
    assert pattern.of_length(3, 20).text == "[a-z]{3,20}"
    assert pattern.of_length(0, None).text == "[a-z]+"


def test_classes_that_validators_read_differently_are_read_so_that_all_agree() -> None:
    greek, wide_digit, mark = "\u03b1", "\u0663", "\ufeff"
    for pattern in (r"^\w$", r"^\W$", r"^[^\w]$"):
        assert not matches(pattern, greek), pattern
    for pattern in (r"^\d$", r"^\D$", r"^[^\d]$"):
        assert not matches(pattern, wide_digit), pattern
    for pattern in (r"^\s$", r"^\S$", r"^[^\S]$"):
        assert not matches(pattern, mark), pattern


def matches(pattern: str, text: str) -> bool:
    ours = re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: python_escape(found[1]), translated(pattern).text)
    return re.fullmatch(ours, text) is not None


def test_text_by_chance_is_read_or_refused() -> None:
    rng = random.Random(5)
    read = 0
    for _ in range(3000):
        pattern = "".join(
            rng.choice(r"ab^$()[]{}|\?*+.,-0123dwsuxpP<:=!é") for _ in range(rng.randint(0, 12))
        )
        with suppress(PatternError):
            assert translated(pattern).least >= 0
            read += 1
    assert read > 100
