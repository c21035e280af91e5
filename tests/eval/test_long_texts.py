"""Long texts hide what is asked about them, and kinds share a text."""

from __future__ import annotations

from collections import Counter

import pytest

from eval.kept_facts import some
from eval.long_texts import _SAID, FACTS, HIDDEN, KINDS, STRUCTURED, groups, long_text
from fleetd.compression.anchors import _STOP, _stem
from fleetd.compression.words import estimate_tokens, words


@pytest.mark.parametrize("tokens", [4000, 16_000])
@pytest.mark.parametrize("seed", [10_000, 10_001])
def test_every_fact_is_in_its_text_once(tokens: int, seed: int) -> None:
    asked_facts: Counter[str] = Counter()
    for kinds in groups(tokens):
        found = long_text(kinds, tokens, seed, estimate_tokens)
        assert 0.85 * tokens <= estimate_tokens(found.text) < 1.15 * tokens
        assert {asked.kind for asked in found.asked} == set(kinds)
        for asked in found.asked:
            assert [found.text.count(fact) for fact in asked.facts] == [1] * len(asked.facts)
            asked_facts[asked.kind] += len(asked.facts)
        assert found == long_text(kinds, tokens, seed, estimate_tokens)
    assert set(asked_facts) == set(KINDS)
    assert min(asked_facts.values()) >= FACTS


@pytest.mark.parametrize("kind", HIDDEN)
def test_facts_are_spread_over_the_whole_text(kind: str) -> None:
    text = long_text((kind,), 6000, 10_000, estimate_tokens)
    places = [text.text.find(fact) / len(text.text) for asked in text.asked for fact in asked.facts]
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert 0.4 < sum(places) / len(places) < 0.6


@pytest.mark.parametrize("kind", STRUCTURED)
def test_what_is_asked_of_rows_is_spread_too(kind: str) -> None:
    text = long_text((kind,), 6000, 10_000, estimate_tokens)
    places = [text.text.find(asked.facts[-1]) / len(text.text) for asked in text.asked]
    assert min(places) < 0.15
    assert max(places) > 0.85


def test_a_part_of_the_questions_has_some_of_each_kind() -> None:
    text = long_text(HIDDEN, 16_000, 10_000, estimate_tokens)
    every, few = (Counter(asked.kind for asked in some(text, part).asked) for part in (1.0, 0.25))
    assert every == Counter(asked.kind for asked in text.asked)
    for kind, many in every.items():
        assert max(1, many // 4) <= few[kind] <= many // 4 + 1


def test_the_other_questions_share_no_word_with_their_facts() -> None:
    common = {_stem(word) for word in _STOP}
    for said, direct, other in _SAID:
        has = {_stem(word) for word in words(said)} - common
        assert has & {_stem(word) for word in words(direct)}
        assert not has & {_stem(word) for word in words(other)}
