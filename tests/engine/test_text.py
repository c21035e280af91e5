"""What a client sees does not depend on where tokens end."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from call_formats import WordDetokenizer
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from fleetd.engine.answer.logprobs import Logprobs, PromptLogprobs
from fleetd.engine.answer.output_text import AnswerText, StopFilter
from fleetd.engine.answer.token_bytes import token_bytes
from fleetd.engine.protocol import Delta, TokenLogprob, ToolCall

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def pieces(text: str, cuts: list[int]) -> list[str]:
    at = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def cut_letter_by_letter(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read on until some stop string is complete."""
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


# Few letters, so that stop strings overlap, nest and almost match all the time.
WORDS = st.text("ab<", min_size=1, max_size=5)


@given(st.text("ab<", max_size=30), st.lists(WORDS, max_size=4), st.lists(st.integers(0, 99), max_size=12))
def test_stop_filter_cuts_at_the_first_complete_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, hit = cut_letter_by_letter(text, stops)
    keep = StopFilter(stops)
    shown = ""
    fed = ""
    for piece in pieces(text, cuts):
        shown += keep.feed(piece)
        fed += piece
        if keep.hit is None:
            held = fed[len(shown) :]
            assert fed.startswith(shown)
            # Everything held begins a stop string, and nothing longer at the end does.
            assert held == "" or any(s.startswith(held) for s in stops)
            assert not any(
                s.startswith(fed[i:]) and len(s) > len(fed[i:]) for i in range(len(shown)) for s in stops
            )
        else:
            assert shown == expected
    shown += keep.flush()
    assert (shown, keep.hit) == (expected, hit)


def test_stop_filter_shows_nothing_after_a_hit() -> None:
    keep = StopFilter(["x"])
    assert keep.feed("axb") == "a"
    assert keep.feed("more") == ""
    assert keep.flush() == ""


def test_empty_stop_strings_stop_nothing() -> None:
    keep = StopFilter([""])
    assert keep.feed("text") + keep.flush() == "text"
    assert keep.hit is None


# ---- answers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(chain_path: Path) -> Any:
    return load(chain_path)


class Letters:
    """A tokenizer whose tokens are given pieces of text, with the chain model's markers and parser."""

    def __init__(self, real: Any, words: list[str]) -> None:
        self._real, self._words = real, words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def detokenizer(self) -> Any:
        return WordDetokenizer(self._words)


class ReadText:
    def __init__(self, events: list[Delta | ToolCall], answer: AnswerText) -> None:
        self.content = "".join(e.text for e in events if isinstance(e, Delta) and e.channel == "content")
        self.reasoning = "".join(e.text for e in events if isinstance(e, Delta) and e.channel == "reasoning")
        self.calls = [(e.index, e.name, e.arguments) for e in events if isinstance(e, ToolCall)]
        self.deltas = [e for e in events if isinstance(e, Delta)]
        self.hit = answer.stopped_by
        self.visible = (self.content, self.reasoning, self.calls, self.hit)


def read(tokenizer: Any, words: list[str], stops: tuple[str, ...] = (), **fields: Any) -> ReadText:
    answer = AnswerText("r", Letters(tokenizer, words), list(stops), **fields)
    events: list[Delta | ToolCall] = []
    for token in range(len(words)):
        events += answer.push(token)
        if answer.stopped_by is not None:
            break
    return ReadText(events + answer.finish(), answer)


ANSWERS = {
    "plain": ("Hello\n\nthere ", {}),
    "reasoning": ("<think>\nFirst,\n\nthen.</think>\n\nSo:\n\n42. ", {}),
    "reasoning with tools at hand": ("<think>why</think>\n\nOne\n\nTwo\n  three\n", {"tools": TOOLS}),
    "reasoning the template opened": ("because</think>\n\n a\n\nb", {"initial": "reasoning", "tools": TOOLS}),
    "reasoning cut off": ("<think>First, I won", {}),
    "a call": (f"Let me look.\n\n{CALL}", {"tools": TOOLS}),
    "reasoning, then a call": (f"<think>hm</think>\n\n{CALL}\n", {"tools": TOOLS}),
    "a call out of the reasoning": (f"<think>hm{CALL}", {"tools": TOOLS}),
    "two calls with words between": (f"A\n{CALL}\n and \n\n{CALL}\nB\n\nC", {"tools": TOOLS}),
    "no call": ("x \n<tool_call>not json</tool_call>\n\ny\nz", {"tools": TOOLS}),
    "a call cut off": ('x\n<tool_call>{"name": "get_', {"tools": TOOLS}),
    "blank": (" \n ", {"tools": TOOLS}),
    "almost a marker": ("a <thin <tool_cal", {"tools": TOOLS}),
}


@pytest.mark.parametrize("name", ANSWERS)
@given(
    cuts=st.lists(st.integers(0, 999), max_size=30), stop=st.sampled_from(["", "42", "n <", "\n\nT", "<th"])
)
def test_where_tokens_end_changes_nothing(tokenizer: Any, name: str, cuts: list[int], stop: str) -> None:
    text, fields = ANSWERS[name]
    whole = read(tokenizer, [text], (stop,), **fields)
    split = read(tokenizer, pieces(text, cuts), (stop,), **fields)
    assert split.visible == whole.visible
    assert "</think>" not in whole.content
    assert not stop or stop not in whole.content + whole.reasoning


@pytest.mark.parametrize(
    ("name", "content", "reasoning", "calls"),
    [
        ("plain", "Hello\n\nthere ", "", 0),
        ("reasoning", "So:\n\n42. ", "\nFirst,\n\nthen.", 0),
        ("reasoning with tools at hand", "One\n\nTwo\n  three\n", "why", 0),
        ("reasoning the template opened", " a\n\nb", "because", 0),
        ("reasoning cut off", "", "First, I won", 0),
        ("a call", "Let me look.", "", 1),
        ("reasoning, then a call", "", "hm", 1),
        ("a call out of the reasoning", "", "hm", 1),
        ("two calls with words between", "A andB\n\nC", "", 2),
        ("no call", "x \n<tool_call>not json</tool_call>\n\ny\nz", "", 0),
        ("a call cut off", 'x\n<tool_call>{"name": "get_', "", 0),
        ("blank", " \n ", "", 0),
        ("almost a marker", "a <thin <tool_cal", "", 0),
    ],
)
def test_each_kind_of_answer(tokenizer: Any, name: str, content: str, reasoning: str, calls: int) -> None:
    text, fields = ANSWERS[name]
    seen = read(tokenizer, [text], **fields)
    assert (seen.content, seen.reasoning) == (content, reasoning)
    assert [c[:2] for c in seen.calls] == [(i, "get_weather") for i in range(calls)]
    assert all(isinstance(json.loads(c[2]), dict) for c in seen.calls)


def test_text_before_a_stop_is_shown_even_where_it_began_like_a_marker(tokenizer: Any) -> None:
    for tools in (None, TOOLS):
        assert read(tokenizer, ["a<", "STOP"], ("STOP",), tools=tools).content == "a<"


def test_every_token_is_counted_and_its_logprob_reported_once(tokenizer: Any) -> None:
    words = ["<th", "ink>", "a", "</think>", "\n", "\n", "So", " ", "4", "2"]
    answer = AnswerText("r", Letters(tokenizer, words), [], TOOLS)
    events: list[Delta | ToolCall] = []
    for token, word in enumerate(words):
        events += answer.push(token, TokenLogprob(word, -float(token), word.encode()))
    events += answer.finish()
    deltas = [e for e in events if isinstance(e, Delta)]
    assert sum(e.tokens for e in deltas) == len(words)
    assert [p.token for e in deltas for p in e.logprobs or []][-4:] == ["So", " ", "4", "2"]
    assert answer.reasoning_tokens == 2


@pytest.mark.parametrize("name", ANSWERS)
@given(st.lists(st.integers(0, 999), max_size=30), st.sampled_from(["", "42", "\n\nT", "<th"]), st.booleans())
def test_every_token_is_in_some_event_however_the_answer_ends(
    tokenizer: Any, name: str, cuts: list[int], stop: str, cut: bool
) -> None:
    text, fields = ANSWERS[name]
    words = pieces(text, cuts)
    for pushed in range(len(words) + 1):
        answer = AnswerText("r", Letters(tokenizer, words), [stop], call_pieces=cut, **fields)
        events: list[Any] = []
        for token, word in enumerate(words[:pushed]):
            events += answer.push(token, TokenLogprob(word, -1.0, word.encode()))
        events += answer.finish(cut=cut)
        told = sum(e.tokens for e in events if not isinstance(e, ToolCall))
        assert told == pushed
        assert all(e.text or e.tokens or e.logprobs for e in events if isinstance(e, Delta))
        # Those of an answer without reasoning and calls are there, too, once each.
        if name in ("plain", "blank") or (name == "almost a marker" and not cut):
            entries = [entry.token for e in events if isinstance(e, Delta) for entry in e.logprobs or []]
            # Those of a stop string are not: content lacks it.
            assert entries == words[: pushed if answer.stopped_by is None else len(entries)]


def test_every_text_of_five_letters_in_all_cuts_into_tokens_stops_where_it_should() -> None:
    letters = ["".join(each) for each in itertools.product("ab", repeat=5)]
    words = ["".join(each) for size in (1, 2, 3) for each in itertools.product("ab", repeat=size)]
    for stops in itertools.combinations(words, 2):
        expected = {text: cut_letter_by_letter(text, list(stops)) for text in letters}
        for text, cut in itertools.product(letters, range(1 << 4)):
            keep = StopFilter(list(stops))
            at = [0, *(n + 1 for n in range(4) if cut >> n & 1), 5]
            shown = "".join([keep.feed(text[a:b]) for a, b in itertools.pairwise(at)]) + keep.flush()
            assert (shown, keep.hit) == expected[text], (text, at, stops)


def test_code_points_are_whole(tokenizer: Any) -> None:
    tokens = tokenizer.encode("aé€😀", add_special_tokens=False)
    assert len(tokens) > 4  # a byte each
    answer = AnswerText("r", tokenizer, [])
    shown = [e.text for t in tokens for e in answer.push(t) if isinstance(e, Delta)]
    assert shown == ["a", "é", "€", "😀"]
    assert answer.finish() == []


@pytest.mark.parametrize("at", range(5))
def test_log_probabilities_come_in_the_order_of_their_tokens(tokenizer: Any, at: int) -> None:
    """Also if a token without a text comes while the text before it is held back."""
    tokens = tokenizer.encode("ST€z", add_special_tokens=False)
    answer, silent = AnswerText("r", tokenizer, ["STOP"], plain=True), -1
    entries: list[TokenLogprob] = []
    for number, token in enumerate([*tokens[:at], silent, *tokens[at:]]):
        entry = TokenLogprob("", 0.0, b"", text_offset=number)
        for piece in answer.push(token, entry, silent=token == silent):
            assert isinstance(piece, Delta)
            entries += piece.logprobs or []
    for piece in answer.finish():
        assert isinstance(piece, Delta)
        entries += piece.logprobs or []
    assert [entry.text_offset for entry in entries] == list(range(len(tokens) + 1))


def test_token_bytes_join_to_the_text(tokenizer: Any) -> None:
    text = "a é€😀\n<hello>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, t) for t in tokens) == text.encode()
    assert token_bytes(tokenizer, 10**6) == b""


@pytest.mark.parametrize("text", ["aé€😀b", "日本", "a  b \n c", "<think>x</think> <tool_call>"])
def test_offsets_are_where_each_token_begins_in_the_text(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    answer = AnswerText("r", tokenizer, [], plain=True, follows=tokenizer.encode("x")[-1])
    entries: list[TokenLogprob] = []
    shown = ""
    for token in tokens:
        raw = token_bytes(tokenizer, token)
        entry = TokenLogprob("", 0.0, raw, text_offset=answer.length)
        for piece in answer.push(token, entry):
            assert isinstance(piece, Delta)
            shown += piece.text
            entries += piece.logprobs or []
    assert (shown, answer.finish()) == (text, [])
    assert b"".join(entry.raw for entry in entries) == text.encode()
    read = 0
    for entry in entries:
        before = text.encode()[:read].decode("utf-8", "ignore")
        assert entry.text_offset == len(before)
        read += len(entry.raw)


def test_a_prompts_offsets_are_those_of_its_text(tokenizer: Any) -> None:
    text = "日本 é"
    scored = PromptLogprobs(Logprobs(tokenizer, 0), tokenizer.encode(text, add_special_tokens=False))
    scored.add(mx.zeros((len(scored.tokens) - 1, 600)))
    offsets = [entry.text_offset for entry in scored.entries]
    whole = [entry.raw for entry in scored.entries]
    assert offsets == [len(b"".join(whole[:i]).decode("utf-8", "ignore")) for i in range(len(whole))]


@pytest.mark.parametrize("name", ANSWERS)
@given(cuts=st.lists(st.integers(0, 999), max_size=30))
def test_logprobs_are_those_of_the_content_and_of_no_marker(
    tokenizer: Any, name: str, cuts: list[int]
) -> None:
    text, fields = ANSWERS[name]
    for words in (list(text), pieces(text, cuts)):
        answer = AnswerText("r", Letters(tokenizer, words), [], **fields)
        events: list[Any] = []
        for token, word in enumerate(words):
            events += answer.push(token, TokenLogprob(word, 0.0, word.encode()))
        deltas = [e for e in [*events, *answer.finish()] if isinstance(e, Delta)]
        content = "".join(e.text for e in deltas if e.channel == "content")
        told = [entry.token for e in deltas for entry in e.logprobs or []]
        if words == list(text):
            assert "".join(told) == content
        assert all(any(letter in content for letter in word) for word in told)


def test_a_completion_is_text_to_the_letter_whatever_it_spells(tokenizer: Any) -> None:
    for text in (f"<think>why</think>\n\n{CALL}\n", "<tool_call>", "</think> \n"):
        assert read(tokenizer, list(text), plain=True).visible == (text, "", [], None)


@pytest.mark.parametrize(
    ("text", "fields", "content", "reasoning"),
    [
        ("Write <think> first.", {}, "Write <think> first.", ""),
        (" \n<think>a</think>b", {}, "b", "a"),
        ("<think>a</think><think>b</think>c", {}, "c", "ab"),
        ("<think>again</think>c", {"initial": "reasoning"}, "c", "again"),
        ("</think>private</think>answer", {"initial": "reasoning"}, "answer", "private"),
        ("</think>Use\n</think> so.", {"initial": "reasoning"}, "Use\n</think> so.", ""),
        (f"</think>{'x' * 300}</think>", {"initial": "reasoning"}, f"{'x' * 300}</think>", ""),
        ("</think>\n\nYes </think>.", {"initial": "reasoning"}, "Yes </think>.", ""),
        ("So.</think>Yes </think>.", {"initial": "reasoning"}, "Yes </think>.", "So."),
        ("a</think>b", {}, "a</think>b", ""),
        (
            "<think>I write <tool_call> and <tool_call>{}.</think>b",
            {"tools": TOOLS},
            "b",
            "I write <tool_call> and <tool_call>{}.",
        ),
        (f"<think>hm{CALL} Done.</think>b", {"tools": TOOLS}, " Done.b", "hm"),
    ],
)
@given(cuts=st.lists(st.integers(0, 99), max_size=9))
def test_thoughts_begin_where_an_answer_begins(
    tokenizer: Any, text: str, fields: dict[str, Any], content: str, reasoning: str, cuts: list[int]
) -> None:
    for words in ([text], list(text), pieces(text, cuts)):
        seen = read(tokenizer, words, **fields)
        assert (seen.content, seen.reasoning) == (content, reasoning)
