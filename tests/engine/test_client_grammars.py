"""Grammars that clients write: what the library takes long for is refused, schemas in them are checked."""

from __future__ import annotations

import miniature_tokenizers
import pytest

from fleetd import limits
from fleetd.engine.grammar.answer_grammar import AnswerForm
from fleetd.engine.grammar.client_grammars import bounded, short
from fleetd.engine.grammar.grammars import Grammars
from fleetd.engine.sampling.constraint import Constraint
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


@pytest.mark.parametrize(
    "expression",
    ["a{4096}", "[0-9]{3}-([0-9]{1,40}x){0,99}", "(a{1,9}){1,9}{2}", r"\(a\)\{9999\}", "[a{9999}]"],
)
def test_repeats_of_moderate_length_are_taken(expression: str) -> None:
    assert short(expression, "guided_regex") == expression


@pytest.mark.parametrize(
    "expression", ["a{4097}", "a{1,5000}", "(ab){3000}", "(a{1,99}){1,99}", "((a{20}){20}){20}"]
)
def test_repeats_that_stand_for_a_very_long_text_are_refused(expression: str) -> None:
    with pytest.raises(UnsupportedParameter, match="repeats") as caught:
        short(expression, "guided_regex")
    assert caught.value.param == "guided_regex"
    with pytest.raises(UnsupportedParameter, match="repeats"):
        bounded(f"start: /{expression}/", "guided_grammar")


@pytest.mark.parametrize("rule", ['r{}: "a" r{}\n', 'T{}: "a" T{}\n'])
def test_a_chain_of_rules_that_would_end_the_librarys_stack_is_refused(rule: str) -> None:
    """Through all that a request passes: the library would end the process."""
    tokenizer = miniature_tokenizers.qwen3()
    tokenizer.add_eos_token("<|im_end|>")
    grammars = Grammars(tokenizer, len(tokenizer.get_vocab()))
    name = rule[0]
    lark = f"start: {name}0\n" + "".join(rule.format(n, n + 1) for n in range(5000)) + f'{name}5000: "b"\n'
    form = AnswerForm(
        Constraint("grammar", lark, "guided_grammar"), (), must_call=False, parallel=False, begins="content"
    )
    with pytest.raises(UnsupportedParameter, match="deep"):
        grammars.matcher(form, chat=False)
