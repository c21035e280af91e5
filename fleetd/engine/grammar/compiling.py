"""From the text of a grammar to the matcher that holds an answer to it, within bounds of time and memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fleetd import limits
from fleetd.errors import InvalidValue, UnsupportedParameter

#: How held answers write JSON. Without ``u`` among the escapes each string has one spelling: with it, the
#: library lets a closed object repeat one of its keys as ``\u0061``.
JSON_STYLE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}

_LIMITS = LLParserLimits(
    max_items_in_row=limits.GRAMMAR_ROW_ITEMS,
    initial_lexer_fuel=limits.GRAMMAR_LEXER_FUEL,
    step_lexer_fuel=limits.GRAMMAR_STEP_FUEL,
    step_max_items=limits.GRAMMAR_STEP_ITEMS,
    max_lexer_states=limits.GRAMMAR_LEXER_STATES,
    max_grammar_size=limits.GRAMMAR_SYMBOLS,
    verbose_errors=False,
)
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_][A-Za-z0-9_]*)[^\n:\"/]*:", re.M)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What the library's errors are about, by the words at their beginning.
_PANIC = re.compile(r"panic\b")
_EMPTY = re.compile(r"unsatisfiable|regex is empty", re.I)
_UNDECIDED = re.compile(r"determine if regex is empty", re.I)
_TOO_LARGE = re.compile(r"too (large|big|many|complex)|exceed|limit|fuel|max is \d", re.I)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The part of a Lark rule that stands for JSON by a schema, in the style of held answers.

    Args:
        schema: of ``schemas.enforceable`` or ``schemas.lenient``.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE}, ensure_ascii=False)}"


def validated(grammar: str, tokenizer: LLTokenizer, where: str) -> LLMatcher:
    """A matcher at its beginning, whose first mask is known to be computable.

    Args:
        grammar: in Lark's notation.
        where: the field of the request that asks for it, for errors.

    Raises:
        UnsupportedParameter: it takes more time or memory than is allowed.
        InvalidValue: no answer fits it, or it is malformed.
    """
    if max(map(_rule_depth, _parts(grammar))) > limits.GRAMMAR_RULE_DEPTH:
        raise UnsupportedParameter(
            f"{where}: its rules refer to each other more than {limits.GRAMMAR_RULE_DEPTH} deep.",
            hint="Write chains of rules as one rule, with repeats.",
            param=where,
        )
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), limits=_LIMITS, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(matcher.get_error(), where)
    return matcher


def _parts(grammar: str) -> list[str]:
    """The grammars of a whole one that is JSON."""
    if not grammar.startswith("{"):
        return [grammar]
    return [each["lark_grammar"] for each in json.loads(grammar)["grammars"]]


def _rule_depth(grammar: str) -> int:
    """Most rules that are open at once if each is followed where it is first named. The library recurses with
    them, and ends the process if its stack ends. Words in texts count as names, too."""
    found = list(_RULE.finditer(grammar))
    ends = [*(each.start() for each in found[1:]), len(grammar)]
    bodies = {each[1]: grammar[each.end() : end] for each, end in zip(found, ends, strict=False)}
    seen, deepest = set[str](), 0
    for root in bodies:
        if root in seen:
            continue
        seen.add(root)
        rules = [_WORD.finditer(bodies[root])]
        while rules:
            deepest = max(deepest, len(rules))
            name = next((each[0] for each in rules[-1] if each[0] in bodies and each[0] not in seen), None)
            if name is None:
                rules.pop()
                continue
            seen.add(name)
            rules.append(_WORD.finditer(bodies[name]))
    return deepest


def _refusal(error: str, where: str) -> InvalidValue | UnsupportedParameter:
    lines = (line.strip() for line in error.splitlines())
    line = next(filter(None, lines), "")[: limits.GRAMMAR_ERROR_CHARS]
    if _UNDECIDED.search(line):
        return UnsupportedParameter(
            f"{where}: a 'pattern' with another, or with 'minLength' or 'maxLength', takes too long.",
            hint="Say the length in the pattern: {1,20} in place of +.",
            param=where,
        )
    if _EMPTY.search(line):
        return InvalidValue(f"{where}: no answer can fit it.", param=where)
    if _PANIC.match(line) or _TOO_LARGE.search(line):
        return UnsupportedParameter(
            f"{where}: it takes more time or memory than an answer may.",
            hint="Make repeats, patterns and lists of alternatives shorter, or fewer.",
            param=where,
        )
    return InvalidValue(f"{where} is malformed: {line}", param=where)
