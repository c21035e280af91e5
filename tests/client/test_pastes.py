"""Long pastes are folded at the prompt and whole when they are sent; raw input becomes text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.chat.pastes import Pastes
from fleetctl.chat.quiet_terminal import edited


@given(st.lists(st.text(max_size=40), max_size=30), st.integers(1, 80))
def test_what_is_folded_unfolds_to_itself(lines: list[str], times: int) -> None:
    pastes = Pastes()
    text = "\n".join(lines * times).replace("\r", "")
    shown = pastes.fold(text)
    assert pastes.unfold(f"so: {shown}?") == f"so: {text}?"
    assert len(shown) <= 1500


def test_short_pastes_are_shown_as_they_are() -> None:
    pastes = Pastes()
    assert pastes.fold("a\r\nb") == "a\nb"
    assert pastes.fold("x" * 2000) == "[paste 1: 2,000 characters]"
    assert pastes.fold("a\n" * 11) == "[paste 2: 11 lines]"


def test_a_mark_that_stands_for_nothing_is_text() -> None:
    assert Pastes().unfold("[paste 1: 11 lines]") == "[paste 1: 11 lines]"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("abc", "abc"),
        ("abx\x7fc", "abc"),
        ("\x7fa", "a"),
        ("one\rtwo", "one\ntwo"),
        ("a\x1b[Ab\x1b[1;5Cc\x1bOAd", "abcd"),
        ("\x1b[200~pasted\x1b[201~", "pasted"),
        ("a\x1b", "a"),
        ("a\x04b\x01", "ab"),
        ("äöü 你好", "äöü 你好"),
    ],
)
def test_raw_input_becomes_text(raw: str, text: str) -> None:
    assert edited(raw) == text
