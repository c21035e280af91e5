"""Grammars that clients write: what the library takes long for is refused, schemas in them are checked."""

from __future__ import annotations

import pytest

from fleetd import limits
from fleetd.engine.grammar.client_grammars import bounded
from fleetd.errors import InvalidValue, UnsupportedParameter


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a" /b&c~d/ // & & & & & & & & & &\n',
        'start: "%json {" x~2..3\nx: /[%~&]/  # ~~~~~~~~~~\n',
        "start: A\nA: /a/ & ~/b/\n%import common.LF\n%ignore /[ ]/\n",
    ],
)
def test_an_ordinary_grammar_stays_as_it_is(lark: str) -> None:
    assert bounded(lark, "guided_grammar") == lark


def test_schemas_in_a_grammar_are_checked_as_any_other() -> None:
    found = bounded('start: "a" x\nx: %json {"type": "integer", "title": "}"}\n', "g")
    assert found == 'start: "a" x\nx: %json {"type":"integer"}\n'
    with pytest.raises(UnsupportedParameter, match="uniqueItems") as caught:
        bounded('start: %json {"type": "array", "uniqueItems": true}', "guided_grammar")
    assert caught.value.param == "guided_grammar"


def test_the_librarys_own_options_are_left_out() -> None:
    assert bounded('%llguidance {"no_forcing": true}\nstart: "a"', "g") == '\nstart: "a"'


@pytest.mark.parametrize(
    "lark", ["start: %json {", "start: %json", "%llguidance [[[[", "start: %json " + "[" * 99999]
)
def test_what_is_no_json_behind_a_directive_is_refused(lark: str) -> None:
    with pytest.raises(InvalidValue, match="no JSON"):
        bounded(lark, "g")


@pytest.mark.parametrize("sign", ["&", "& ~"])
def test_many_terminals_that_are_joined_are_refused(sign: str) -> None:
    joined = f" {sign} ".join(f"/.*{n}.*/" for n in range(limits.GRAMMAR_OPERATORS + 2))
    with pytest.raises(UnsupportedParameter, match="operators"):
        bounded(f"start: A\nA: {joined}", "g")
