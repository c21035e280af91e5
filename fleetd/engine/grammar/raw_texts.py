"""Terminals of strings that stand in an answer as they are, without quotes or escapes. Pure.

The lengths and the pattern of a string are held to. Its ``format`` is not, and neither is a pattern that
regular expressions without look-around cannot say: what does not fit is for the tool's own checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleetd.engine.grammar.lark_rules import LarkRules, trimmed
from fleetd.engine.grammar.regexes import search_regex


def raw_text(rules: LarkRules, schema: dict[str, Any], closes: Iterable[str], *, trims: bool) -> str:
    """The name of a terminal of the strings that a schema allows.

    Args:
        closes: what ends the string, which does not stand in it.
        trims: blanks at its ends are no part of it when it is read.
    """
    also = []
    least, most = _count(schema.get("minLength")), _count(schema.get("maxLength"))
    if least or most is not None:
        also.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(pattern := schema.get("pattern"), str) and (regex := search_regex(pattern)):
        also.append(regex)
    if also and trims:
        also.append(trimmed())
    return rules.text(closes, also=also)


def _count(value: Any) -> int | None:
    return (
        int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None
    )
