"""A Lark grammar of a text → the grammar of the same text as it stands inside a JSON string. Pure.

Each character has one form: its escape if JSON asks for one, and itself otherwise. A terminal that ends with
any number of such characters becomes a rule (``regexes.escaped_line``) wherever it stands in a rule.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import warnings

from fleetd.engine.grammar.lark_rules import quoted
from fleetd.engine.grammar.regexes import escaped_line, escaped_text, regex

_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_REGEX = r"/(?:[^/\\\n]|\\.)+/"
_DEFINITION = re.compile(r"^(?=[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\.\d+)?(\[[^\]\n]*\])?[ \t]*:)", re.MULTILINE)
_NAME = re.compile(rf"{_TEXT}|{_REGEX}|([A-Za-z_][\w-]*)")
# A terminal that is literals and one regular expression, which may become a rule.
_ONE_LINE = re.compile(rf"\s*[A-Z_][A-Z_0-9-]*\s*:(\s*(?:{_TEXT}\s*)*{_REGEX}[imslux]*\s*)")
_COMMENT = re.compile(rf"({_TEXT}|{_REGEX})|(?://|\#)[^\n]*")
_PART = re.compile(
    rf"""
      (?P<first> {_TEXT} ) \s* \.\. \s* (?P<last> {_TEXT} )
    | (?P<text> {_TEXT} ) (?P<no_case> i? )
    | (?P<regex> {_REGEX} ) (?P<flags> [imslux]* )
    | (?P<refused> %(?!ignore|declare|llguidance|import)\w* | [<@] | ~(?!\s*\d) )
    """,
    re.VERBOSE,
)
_IMPORT = re.compile(
    r"^[ \t]*%import\b(?:\s+common\s*(?:\.\s*(\w+)(?:\s*->\s*(\w+))?|\(([\w\s,]+)\)))?", re.MULTILINE
)
# Terminals of Lark's "common" that need no escapes, and the others as regular expressions.
_PLAIN = frozenset(
    [
        *("DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER"),
        *("SIGNED_NUMBER", "LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME"),
    ]
)
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "l": 0, "u": 0}


def escaped_lark(lark: str) -> str:
    """The grammar of the escaped text.

    Raises ValueError for what cannot be written so: control tokens, other grammars, complements, look-around.
    """
    lark = _IMPORT.sub(_imported, _COMMENT.sub(lambda found: found[1] or "", lark))
    starts = [found.start() for found in _DEFINITION.finditer(lark)]
    parts = [lark[a:b] for a, b in itertools.pairwise([0, *starts, len(lark)])]
    # Blanks that may stand anywhere between two terminals of a rule would come into what was one terminal.
    lines = "%ignore" not in lark
    rules, made = _line_rules(parts) if lines else ({}, "")
    for part in parts:
        found = _DEFINITION.match(part)
        in_rule = lines and found is not None and found[1].islower() and not found[2]
        written = _PART.sub(functools.partial(_part, lines=in_rule), part)
        made += _NAME.sub(lambda name: rules.get(name[0], name[0]), written) if in_rule else written
    return made


def _line_rules(parts: list[str]) -> tuple[dict[str, str], str]:
    """The names of rules for terminals that may become some, and these rules."""
    known = {found[1] for part in parts for found in _NAME.finditer(part)}
    rules: dict[str, str] = {}
    made = ""
    for part in parts:
        found, body = _DEFINITION.match(part), _ONE_LINE.fullmatch(part)
        if found is None or body is None:
            continue
        plain, written = (_PART.sub(functools.partial(_part, lines=each), body[1]) for each in (False, True))
        if written != plain:
            name = found[1].lower()
            while name in known:
                name += "_"
            known.add(name)
            rules[found[1]] = name
            made += f"{name}: {written.strip()}\n"
    return rules, made


def _part(found: re.Match[str], *, lines: bool) -> str:
    if found["refused"]:
        raise ValueError(f"{found['refused']} in a grammar whose text stands inside a JSON string")
    if found["first"]:
        ends = [_decoded(found[name]) for name in ("first", "last")]
        return regex("[{}-{}]".format(*map(re.escape, ends)), escaped=True)
    if found["text"]:
        text = _decoded(found["text"])
        if found["no_case"] and text:
            return regex(re.escape(text), re.IGNORECASE, escaped=True)
        return quoted(escaped_text(text))
    pattern, flags = found["regex"][1:-1], 0
    for sign in found["flags"]:
        flags |= _FLAGS[sign]
    line = escaped_line(pattern, flags) if lines else ""
    return f"({line})" if line else regex(pattern, flags, escaped=True)


def _imported(found: re.Match[str]) -> str:
    name, alias, several = found.groups()
    if several:
        return "\n".join(_common(each.strip(), each.strip()) for each in several.split(","))
    return _common(name or "", alias or name or "")


def _common(name: str, alias: str) -> str:
    if name in _PLAIN:
        return f"%import common.{name}" + (f" -> {alias}" if alias != name else "")
    if name not in _COMMON:
        raise ValueError(f"a grammar imports what is not known here: {name}")
    return f"{alias}: /{_COMMON[name]}/"


def _decoded(literal: str) -> str:
    """The text that a literal of Lark means."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return str(ast.literal_eval(literal))
        except (SyntaxError, ValueError, Warning):
            raise ValueError(f"not a literal: {literal}") from None
