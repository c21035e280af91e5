"""The parameters of a call one after another, in the order of their schema. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetd.engine.grammar.lark_rules import LarkRules


def listed(
    rules: LarkRules, bodies: Sequence[tuple[str, bool]], others: str = "", separator: str = ""
) -> str:
    """The body of a list: each that is required, any of the rest, and then any number of ``others``.

    Args:
        bodies: of each parameter, and whether it is required.
        others: the body of a parameter that was not declared; "" if there is none.
        separator: stands between two parameters, in Lark's notation.
    """
    more = f"({separator} {others})*" if others else ""
    # What may follow if nothing of the list is written yet, and if something is.
    first, rest = (f"({others} {more})?" if others else ""), more
    for body, required in reversed(bodies):
        going_on = f"{body} {rest}".strip()
        if required:
            first, rest = going_on, f"{separator} {going_on}".strip()
        else:
            first = f"({going_on} | {first})" if first else f"({going_on})?"
            rest = f"({separator} {body})? {rest}".strip()
        if not separator:
            first = rest
        first, rest = rules.rule(first), rules.rule(rest)
    return first
