"""The state of an answer in its grammar: masks, forced tokens, drafts, ends; over kinds of tokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import miniature_tokenizers
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from mlx_lm.tokenizer_utils import load as load_tokenizer

from fleetd.engine.grammar.matcher import AnswerMatcher
from fleetd.engine.grammar.token_table import TokenTable
from fleetd.errors import EngineError

PERSON = 'start: "{\\"name\\": " NAME ", \\"age\\": " AGE "}"\nNAME: /"[a-z ]*"/\nAGE: /[1-9][0-9]?/'
TEXT = '{"name": "bob", "age": 42}'
KINDS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: ending(miniature_tokenizers.qwen3(), "<|im_end|>"),
    "pieces": lambda: ending(miniature_tokenizers.gemma2(), "<end_of_turn>"),
    "llama": lambda: ending(miniature_tokenizers.llama3(), "<|eot_id|>"),
}


def ending(tokenizer: Any, end: str) -> Any:
    tokenizer.add_eos_token(end)
    return tokenizer


@pytest.fixture(params=KINDS)
def table(request: pytest.FixtureRequest) -> TokenTable:
    tokenizer = KINDS[request.param]()
    return TokenTable(tokenizer, max(tokenizer.get_vocab().values()) + 1, ["<think>", "</think>"])


def matcher(table: TokenTable, grammar: str = PERSON, **limits: int) -> AnswerMatcher:
    made = LLMatcher(table.llg, LLMatcher.grammar_from_lark(grammar), limits=LLParserLimits(**limits))
    assert not made.is_error(), made.get_error()
    return AnswerMatcher(made, len(table))


def tokens_of(table: TokenTable, text: str) -> list[int]:
    found: list[int] = table.llg.tokenize_str(text)
    assert table.llg.decode_bytes(found) == text.encode()
    return found


def end_of(table: TokenTable) -> int:
    return int(table.llg.eos_tokens[0])


def test_masks_are_those_of_the_tokens_before_them(table: TokenTable) -> None:
    """Whether the tokens are committed one by one, drafted, or drafted and refused in between."""
    tokens = [*tokens_of(table, TEXT), end_of(table)]
    plain, drafted = matcher(table), matcher(table)
    wrong = tokens_of(table, '{"name": "q')
    expected = []
    for at, token in enumerate(tokens):
        expected.append(plain.masks()[0])
        assert expected[-1][token]
        plain.consume([token])
        assert plain.held == at + 1
    assert np.array_equal(np.stack(drafted.masks(tokens[:-1])), np.stack(expected))
    drafted.masks(wrong)
    for at in range(0, len(tokens), 2):
        masks = drafted.masks(tokens[at : at + 2])
        assert np.array_equal(masks[0], expected[at])
        drafted.consume(tokens[at : at + 2])
    assert (plain.failure, drafted.failure) == ("", "")


def test_no_row_comes_behind_a_draft_that_is_forbidden(table: TokenTable) -> None:
    held = matcher(table)
    good, bad = tokens_of(table, '{"name": "a'), tokens_of(table, "7")
    assert held.allowed([*good, *bad]) == len(good)
    assert len(held.masks([*good, *bad, *good])) == len(good) + 1
    assert held.allowed([*good, 10**9]) == 0
    assert held.allowed([-1]) == 0
    assert (held.held, held.failure) == (0, "")


def test_forced_tokens_spell_the_one_text_that_can_follow(table: TokenTable) -> None:
    held = matcher(table)
    forced = held.forced(64)
    assert b'{"name": "'.startswith(table.llg.decode_bytes(forced))
    assert forced
    assert held.forced(1) == forced[:1]
    assert held.allowed(forced) == len(forced)
    # Inside of the name nothing is forced, and most letters are open.
    held.consume(tokens_of(table, '{"name": "b'))
    assert held.forced(64) == []
    assert held.held == len(tokens_of(table, '{"name": "b'))


def test_a_whole_answer_can_only_end(table: TokenTable) -> None:
    held = matcher(table)
    held.consume(tokens_of(table, TEXT))
    ends = {int(end) for end in table.llg.eos_tokens}
    assert set(np.flatnonzero(held.masks()[0])) <= ends
    assert held.masks()[0].any()
    held.consume([end_of(table)])
    assert held.failure == ""


def test_a_token_that_the_grammar_forbids_fails_the_answer_and_raises_nothing(table: TokenTable) -> None:
    held = matcher(table)
    held.consume(tokens_of(table, "no"))
    assert held.failure
    assert (held.forced(8), held.allowed(tokens_of(table, "{"))) == ([], 0)
    assert held.masks()[0].all()


def test_a_grammar_that_takes_too_long_fails_the_answer(table: TokenTable) -> None:
    held = matcher(table, "start: /(a|b|ab|ba|aab|abb)*c/", step_lexer_fuel=1, initial_lexer_fuel=10**6)
    for token in tokens_of(table, "abab"):
        held.masks()
        held.consume([token])
    assert held.failure
    assert held.masks()[0].all()


def test_text_has_no_control_token_in_it(table: TokenTable) -> None:
    held = matcher(table, "start: /(?s:.*)/")
    controls = [number for number in range(len(table)) if table.llg.is_special_token(number)]
    assert controls
    ends = {int(end) for end in table.llg.eos_tokens}
    allowed = held.masks()[0]
    assert {number for number in controls if allowed[number]} <= ends


def test_markers_are_named_by_their_tokens() -> None:
    tokenizer = KINDS["bytes"]()
    table = TokenTable(tokenizer, max(tokenizer.get_vocab().values()) + 1, ["<think>", "</think>"])
    think = tokenizer.get_vocab()["<think>"]
    assert table.is_token("<think>")
    assert not table.is_token("<thought>")
    assert table.lark('<think>\n"x"') == f'<[{think}]> "\\n\\"x\\""'
    held = matcher(table, f"start: {table.lark('<think>ok')}")
    assert set(np.flatnonzero(held.masks()[0])) == {think}


@pytest.mark.parametrize("more", [-2, 10**5])
def test_a_model_may_have_fewer_tokens_than_its_tokenizer_or_more(more: int) -> None:
    tokenizer = KINDS["bytes"]()
    known = max(tokenizer.get_vocab().values()) + 1
    table = TokenTable(tokenizer, known + more, [])
    assert len(table) == known + min(more, 0)
    assert len(matcher(table, "start: /[a-z]*/").masks()[0]) == len(table)


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_over_allowed_tokens_spells_what_the_grammar_says(table: TokenTable, seed: int) -> None:
    dice, held, answer = random.Random(seed), matcher(table), []
    ends = {int(end) for end in table.llg.eos_tokens}
    for _ in range(200):
        allowed = [int(token) for token in np.flatnonzero(held.masks()[0])]
        answer.append(dice.choice(allowed))
        held.consume(answer[-1:])
        if answer[-1] in ends:
            break
    assert answer[-1] in ends
    text = table.llg.decode_bytes(answer[:-1]).decode()
    assert LLMatcher(table.llg, LLMatcher.grammar_from_lark(PERSON)).validate_tokens(answer) == len(answer)
    assert text.startswith('{"name": "')
    assert text.endswith("}")


def test_a_publishers_tokenizer_has_the_bytes_of_its_tokens(chain_path: Path) -> None:
    tokenizer = load_tokenizer(chain_path)
    table = TokenTable(tokenizer, len(tokenizer.get_vocab()), [])
    for text in ("a b", "naïve 😀", '{"a": [1, 2]}'):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert table.llg.decode_bytes(tokens) == text.encode()


def test_without_a_token_that_ends_an_answer_none_is_held() -> None:
    tokenizer = miniature_tokenizers.qwen3()
    with pytest.raises(EngineError, match="no token that ends"):
        TokenTable(tokenizer, len(tokenizer.get_vocab()), [])


def test_what_a_tokenizer_cannot_spell_is_known_before() -> None:
    whole, few = (
        TokenTable(made, len(made.get_vocab()), []) for made in (KINDS["bytes"](), KINDS["pieces"]())
    )
    assert whole.unspelled("naïve 😀 <|im_end|>") == ""
    assert few.unspelled('{"name": "bob"}') == ""
    assert few.unspelled("a 😀") == "😀"


def test_an_answer_that_no_token_can_go_on_fails() -> None:
    tokenizer = KINDS["pieces"]()
    table = TokenTable(tokenizer, len(tokenizer.get_vocab()), [])
    held = matcher(table, 'start: "a" /😀/')
    held.masks()
    held.consume(tokens_of(table, "a"))
    assert held.masks()[0].all()
    assert "No token" in held.failure


def test_a_very_long_forced_text_is_not_drafted(table: TokenTable) -> None:
    short, long = matcher(table, "start: /a{2000}b/"), matcher(table, "start: /a{3000}b/")
    assert len(short.forced(5)) == 5
    assert long.forced(5) == []
    assert long.masks()[0][tokens_of(table, "a")[0]]
