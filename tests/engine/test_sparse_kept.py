"""Which tokens a Keep leaves: found through real templates and tokenizers, or not followed at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from fleetd.engine.prompt.contents import NotShown
from fleetd.engine.prompt.kept_tokens import dropped_of_messages, gaps_of, kept_tokens
from fleetd.engine.prompt.prompt_encoding import PreparedPrompt, prepare
from fleetd.engine.protocol import ChatPrompt, Generate, Keep, TextPrompt, TokenPrompt
from fleetd.models.folder import ModelFolder


@pytest.fixture(scope="module")
def smol(embedded_model: ModelFolder) -> Any:
    return load_tokenizer(embedded_model.path)


CODE = """Here is the module:

```python
def first(x):
    return x + 1


def second(größe):
\treturn größe * "😀"
```

The budget for 안녕 is 42."""
ROWS = '{"rows": [{"id": 1, "name": "apple"}, {"id": 2, "name": "pear"}]}'
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": CODE},
    {"role": "assistant", "content": "Fine.", "tool_calls": []},
    {"role": "tool", "content": ROWS},
    {"role": "user", "content": "What is the budget for 안녕?"},
]


def prepared(
    tokenizer: Any, messages: list[dict[str, Any]], parts: dict[int, list[tuple[int, int]]]
) -> PreparedPrompt:
    return prepare(Generate("k", ChatPrompt(messages), keep=Keep(parts)), tokenizer, 1 << 20)


def shown(tokenizer: Any, found: PreparedPrompt) -> str:
    """The text of the tokens that are kept."""
    assert found.dense_reason == ""
    assert found.kept is not None
    return str(tokenizer.decode([found.tokens[i] for i in found.kept]))


def span(text: str, part: str) -> tuple[int, int]:
    return text.index(part), text.index(part) + len(part)


def test_markers_other_messages_and_kept_lines_are_kept(smol: Any) -> None:
    second = 'def second(größe):\n\treturn größe * "😀"\n```'
    found = prepared(
        smol, MESSAGES, {1: [span(CODE, "Here is the module:\n\n```python\n"), span(CODE, second)]}
    )
    text = shown(smol, found)
    whole = smol.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    # A fence stays closed: nothing is lost but the lines that were dropped.
    assert text.startswith(whole[: whole.index("def first")].rstrip("\n"))
    for piece in (second, ROWS, "Answer in one word.", "<|im_start|>tool\n", "What is the budget for 안녕?"):
        assert piece in text
    assert text.endswith("안녕?<|im_end|>\n<|im_start|>assistant\n")
    assert "first" not in text
    assert "42" not in text


def test_a_tool_message_loses_only_what_is_dropped(smol: Any) -> None:
    found = prepared(
        smol, MESSAGES, {3: [span(ROWS, '{"rows": ['), span(ROWS, '{"id": 2, "name": "pear"}]}')]}
    )
    text = shown(smol, found)
    assert "pear" in text
    assert "apple" not in text
    assert CODE in text


def test_a_message_that_keeps_nothing_keeps_its_markers(smol: Any) -> None:
    text = shown(smol, prepared(smol, MESSAGES, {1: []}))
    assert "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nFine." in text


def test_of_two_messages_with_the_same_text_the_right_one_goes(smol: Any) -> None:
    messages = [{"role": "user", "content": "user"}, {"role": "user", "content": "user"}]
    found = prepared(smol, messages, {1: []})
    assert found.kept is not None
    gone = sorted(set(range(len(found.tokens))) - set(found.kept))
    users = [i for i, token in enumerate(found.tokens) if smol.decode([token]) == "user"]
    # System prompt, then marker and content of both.
    assert gone == users[3:4]


def test_everything_kept_is_every_token(smol: Any) -> None:
    found = prepared(smol, MESSAGES, {1: [(0, len(CODE))], 3: [(0, 10), (5, 10_000)]})
    assert found.kept == list(range(len(found.tokens)))


def test_a_text_prompt_is_message_0(smol: Any) -> None:
    request = Generate("k", TextPrompt(CODE), keep=Keep({0: [span(CODE, "The budget for 안녕 is 42.")]}))
    found = prepare(request, smol, 1 << 20)
    assert shown(smol, found).strip() == "The budget for 안녕 is 42."


def test_without_a_keep_nothing_is_said(smol: Any) -> None:
    found = prepare(Generate("k", TextPrompt(CODE)), smol, 1 << 20)
    assert (found.kept, found.dense_reason) == (None, "")


def test_what_cannot_be_followed_is_prefilled_whole_and_says_why(smol: Any) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Hello"}]
    assert (
        "Token ids" in prepare(Generate("k", TokenPrompt([1, 2]), keep=Keep({0: []})), smol, 9).dense_reason
    )
    assert "Message 9" in prepared(smol, MESSAGES, {9: []}).dense_reason
    slow = SimpleNamespace(encode=lambda text: [1, 2], _tokenizer=SimpleNamespace(is_fast=False))
    found = prepare(Generate("k", TextPrompt("Hello"), keep=Keep({0: []})), slow, 9)
    assert (found.kept, found.tokens) == (None, [1, 2])
    assert "does not tell" in found.dense_reason
    with pytest.raises(NotShown, match="Message 0"):
        dropped_of_messages("Hello", [{"content": parts}], {0: []}, lambda _: "Hello")


# ---- Templates -------------------------------------------------------------------------------------------


def trimming(messages: list[dict[str, Any]]) -> str:
    return "".join(f"[{m['content'].strip()}]" for m in messages)


def test_a_template_may_trim() -> None:
    messages = [{"content": "  abc "}, {"content": "\nxyz\n"}]
    # Of "  abc " the characters [3, 4) are kept: b.
    dropped = dropped_of_messages("[abc][xyz]", messages, {0: [(3, 4)], 1: [(0, 2)]}, trimming)
    assert dropped == [(1, 2), (3, 4), (7, 9)]


def shouting(messages: list[dict[str, Any]]) -> str:
    return "".join(m["content"].upper() for m in messages)


def twice(messages: list[dict[str, Any]]) -> str:
    return "".join(2 * m["content"] for m in messages)


def forgetful(messages: list[dict[str, Any]]) -> str:
    return str(messages[-1]["content"])


def thoughtful(messages: list[dict[str, Any]]) -> str:
    return "".join(m["content"].split("</think>")[-1] for m in messages)


def counting(messages: list[dict[str, Any]]) -> str:
    return f"{len(messages[0]['content'])} characters: {messages[0]['content']}"


@pytest.mark.parametrize("render", [shouting, twice, forgetful, thoughtful, counting])
def test_a_template_that_changes_what_it_is_given_is_not_guessed_at(render: Any) -> None:
    messages = [{"content": "<think>no</think>yes"}, {"content": "no"}]
    with pytest.raises(NotShown):
        dropped_of_messages(render(messages), messages, {0: [(0, 3)]}, render)


# ---- Tokens ----------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(SIZES, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5))
def test_a_token_goes_only_if_all_its_characters_do(sizes: list[int], ranges: list[tuple[int, int]]) -> None:
    offsets, at = [], 0
    for size in sizes:
        offsets.append((at, at + size))
        at += size
    gaps = gaps_of([(a, b) for a, b in ranges if a < b], at)
    gone = {i for a, b in gaps for i in range(a, b)}
    assert gone == set(range(at)) - {i for a, b in ranges for i in range(a, b)}
    kept = kept_tokens(offsets, gaps)
    for index, (start, end) in enumerate(offsets):
        if start < end:
            assert (index not in kept) == set(range(start, end)).issubset(gone)


def test_the_space_before_a_word_goes_with_the_word() -> None:
    # "ab cd ef": the tokenizer does not claim the spaces.
    assert kept_tokens([(0, 2), (3, 5), (6, 8)], [(2, 5)]) == [0, 2]
    assert kept_tokens([(0, 2), (3, 5), (6, 8)], [(3, 5)]) == [0, 1, 2]


def test_a_token_without_characters_is_kept_unless_it_lies_within_a_gap() -> None:
    assert kept_tokens([(0, 0), (0, 3), (3, 3), (3, 6), (6, 6)], [(0, 6)]) == [0, 4]
