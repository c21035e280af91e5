"""Long texts hide what is asked about them, and questions share what the scorer computes of a text."""

from __future__ import annotations

import pytest

from eval.long_texts import _SAID, HIDDEN, KINDS, QUESTIONS, long_text
from fleetd.compression.anchors import _STOP, _stem
from fleetd.compression.words import estimate_tokens, words


@pytest.mark.parametrize("seed", [10_000, 10_001], ids=["sentences", "documentation"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_fact_is_in_the_text_once(kind: str, seed: int) -> None:
    found = long_text(kind, 6000, seed, estimate_tokens)
    assert 5400 <= estimate_tokens(found.text) < 14_000
    assert len(found.asked) == (8 if kind == "code with a bug" else QUESTIONS)
    for asked in found.asked:
        assert [found.text.count(fact) for fact in asked.facts] == [1] * len(asked.facts)
    assert found == long_text(kind, 6000, seed, estimate_tokens)


@pytest.mark.parametrize("kind", HIDDEN)
def test_facts_are_spread_over_the_whole_text(kind: str) -> None:
    text = long_text(kind, 6000, 10_000, estimate_tokens)
    places = [text.text.find(fact) / len(text.text) for asked in text.asked for fact in asked.facts]
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert 0.4 < sum(places) / len(places) < 0.6


def test_the_other_questions_share_no_word_with_their_facts() -> None:
    common = {_stem(word) for word in _STOP}
    for said, direct, other in _SAID:
        has = {_stem(word) for word in words(said)} - common
        assert has & {_stem(word) for word in words(direct)}
        assert not has & {_stem(word) for word in words(other)}
