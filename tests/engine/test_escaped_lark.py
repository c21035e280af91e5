"""Grammars of texts and the grammars of the same texts inside of JSON strings; patterns as Lark has them."""

from __future__ import annotations

import random
import re

import pytest
from grammar_walks import ByteTable, accepts
from llguidance import LLMatcher

from fleetd.engine.grammar.escaped_lark import escaped_lark
from fleetd.engine.grammar.regexes import escaped_text, regex, search_regex

TABLE = ByteTable()
CHARACTERS = 'ab1 "\\\n\t/.-{}[]^é_'


def made(lark: str) -> LLMatcher:
    found = LLMatcher(TABLE.llg, lark, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def texts(count: int, size: int) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices(CHARACTERS, k=rng.randint(0, size))) for _ in range(count)]


PATTERNS = [
    *(r".", r"(.+)", r"[^a]*", r"\w+\s", r"[\s\S]{1,3}", r'a|b"|\n', r'"[^"\\]*"', r"\W", r"[^\w]", r"\D"),
    *(r'[a\-\]\\^"]+', r"(?i:A)b", r"\t", r'[\n"]', r"(?s:.)b?", r"[^\n]", r'[^\s"]', r"/", r"[/]", r"a{2}"),
    *(r"a*?b", r"\.", r"é", r"[{}]+", r"[&~-]", r""),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("escaped", [False, True])
def test_an_expression_allows_the_same_texts(pattern: str, escaped: bool) -> None:
    matcher = made(f"start: T\nT: {regex(pattern, escaped=escaped)}")
    for text in texts(100, 3):
        written = escaped_text(text) if escaped else text
        assert accepts(matcher, TABLE.spelled(written)) is bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", [r"^a+$", r"a", r"\d{2}$", r"^[ab]+\s", r"", r"(a|b)1"])
def test_a_pattern_of_a_schema_may_be_anywhere_in_a_text(pattern: str) -> None:
    matcher = made(f"start: T\nT: {search_regex(pattern)}")
    for text in texts(100, 4):
        if not text.endswith("\n"):
            assert accepts(matcher, TABLE.spelled(text)) is bool(re.search(pattern, text, re.ASCII)), text


@pytest.mark.parametrize("pattern", [r"^a|b$", r"(?=a)b", r"(", r"\bx", r"(a)\1"])
def test_a_pattern_that_has_no_such_form_is_left_to_the_tool(pattern: str) -> None:
    assert search_regex(pattern) == ""
    with pytest.raises(ValueError, match="regular expression"):
        regex(pattern)


GRAMMARS = [
    (
        'start: A ("," A)*\nA: "a".."c" "x\\n"i\n%ignore WS\n%import common.WS',
        ["ax\n, bX\n\t,cx\n"],
        ["ax,", "dx\n"],
    ),
    ("start: S\n%import common (ESCAPED_STRING, INT)\nS: ESCAPED_STRING INT", ['"a\\"b"12'], ['"a"', '"a1']),
    ('%import common.NEWLINE -> NL\nstart: "q" NL "r"~2 // so', ["q\n\r\nrr"], ["qrr", "q\nr"]),
    (
        'start: "k=" LINE "\\n" ITEM X\nLINE: /[^\\n]*/\nITEM: "- " /.+/\nX: /\\n.*/ "q" # so',
        ['k=a\tb"\n- x\\y\nzzq', "k=\n- x\nq"],
        ["k=\n- \nq", "k=\n- x"],
    ),
    ('start: line ("\\n" line)*\nline: /.*/\nline_: "x"', ["", "a\n\n\\n\n"], []),
]


@pytest.mark.parametrize(("lark", "right", "wrong"), GRAMMARS)
def test_a_grammar_allows_the_same_texts_inside_of_a_string(
    lark: str, right: list[str], wrong: list[str]
) -> None:
    plain, escaped = made(lark), made(escaped_lark(lark))
    for text in right:
        assert accepts(escaped, TABLE.spelled(escaped_text(text))), text
    for text in wrong:
        assert not accepts(plain, TABLE.spelled(text)), text
        assert not accepts(escaped, TABLE.spelled(escaped_text(text))), text
    for text in texts(100, 4):
        allowed = accepts(escaped, TABLE.spelled(escaped_text(text)))
        assert allowed or not accepts(plain, TABLE.spelled(text)), text


@pytest.mark.parametrize(
    "lark",
    [
        "start: <x>",
        "start: <[12]>",
        "start: @other",
        'start: A\nA: ~"x"',
        "start: %json {}",
        "start: /(?=a)/",
        "start: A\n%import common.FOO",
        "%import other.FOO\nstart: FOO",
        "start: /^a$/",
        r'start: "\q"',
    ],
)
def test_what_cannot_stand_in_a_string_is_refused(lark: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        escaped_lark(lark)
