"""Prompt lookup and the suffix automaton against brute force."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.engine.speculation.assistant_source import AssistantSource
from fleetd.engine.speculation.automaton import Automaton
from fleetd.engine.speculation.block_source import BlockSource
from fleetd.engine.speculation.local_sources import (
    GRAMMAR,
    HIDDEN_NAMES,
    LOCAL_NAMES,
    SOURCE_NAMES,
    local_sources,
)
from fleetd.engine.speculation.lookup import LONGEST, SHORTEST, PromptLookup
from fleetd.engine.speculation.mtp_source import MtpSource
from fleetd.engine.speculation.remote_source import RemoteSource
from fleetd.engine.speculation.sources import Context
from fleetd.engine.speculation.suffix import SuffixSource

# Few different tokens, so that much is repeated.
texts = st.lists(st.integers(0, 3), max_size=60)


def brute_lookup(text: list[int], width: int) -> list[int]:
    for n in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[end - n : end] == text[-n:]:
                return text[end : end + width]
    return []


def brute_matched(text: list[int]) -> int:
    """Length of the longest end of the text that also ends earlier."""
    for n in range(len(text) - 1, 0, -1):
        if any(text[i : i + n] == text[-n:] for i in range(len(text) - n)):
            return n
    return 0


@given(texts, st.integers(1, 8))
def test_lookup_is_the_longest_match_and_of_those_the_newest(text: list[int], width: int) -> None:
    grown = PromptLookup()
    for end in range(len(text) + 1):
        assert grown.propose(Context(text[:end], width)) == brute_lookup(text[:end], width)
    assert PromptLookup().propose(Context(text, width)) == brute_lookup(text, width)


@given(texts)
def test_the_automaton_knows_the_longest_end_that_was_there_before(text: list[int]) -> None:
    automaton = Automaton()
    for end, token in enumerate(text, 1):
        automaton.append(token)
        assert automaton.matched == brute_matched(text[:end])
        n, after = automaton.matched, automaton.matched_end
        if n:
            assert after < end
            assert text[after - n : after] == text[end - n : end]


@given(texts, st.integers(1, 8))
def test_a_suffix_draft_is_no_longer_than_its_match(text: list[int], width: int) -> None:
    drafts = SuffixSource().propose(Context(text, width))
    matched = brute_matched(text)
    assert len(drafts) <= min(width, matched)
    assert drafts == [] or matched >= 3
    assert bool(drafts) == (matched >= 3)


def test_states_grow_with_the_tokens_even_where_all_are_equal() -> None:
    automaton = Automaton()
    for _ in range(5000):
        automaton.append(7)
    assert automaton.matched == 4999
    assert len(automaton._next) <= 2 * 5000


@pytest.mark.parametrize("source", [PromptLookup, SuffixSource])
def test_a_long_prompt_is_taken_up_bit_by_bit_and_only_its_end(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SPEC_INDEX_TOKENS", 40)
    monkeypatch.setattr(limits, "SPEC_INDEX_STEP", 16)
    text = [1, 2, 3, 4, 5, *range(100, 130), 6, 7, 8, 9, 10, *range(200, 210)]
    drafting = source()
    for _ in range(2):
        assert drafting.propose(Context([*text, 6, 7, 8], 2)) == []
    assert drafting.propose(Context([*text, 6, 7, 8], 2)) == [9, 10]
    # What is older than the bound is not found.
    assert drafting.propose(Context([*text, 6, 7, 8, 1, 2, 3], 2)) == []


def test_the_names_of_sources_are_those_that_requests_may_give() -> None:
    held: Any = object()
    local = [source.name for source in local_sources(held)]
    assert tuple(source.name for source in local_sources()) == LOCAL_NAMES
    assert local == [GRAMMAR, *LOCAL_NAMES]
    hidden = {MtpSource.name, BlockSource.name, AssistantSource.name}
    assert {*local, RemoteSource.name, *hidden} == set(SOURCE_NAMES)
    assert hidden == set(HIDDEN_NAMES)
