from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.compression.words import estimate_tokens, lines, merged, sentences, words


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two! Three?", ["One. ", "Two! ", "Three?"]),
        ("Mr. Cobalt met J. S. Bach, e.g. twice. It was 5. Then 3.5 more.", None),
        ('He said "no." Then he left.', ['He said "no." ', "Then he left."]),
        ("a line\nanother\n\nlast", ["a line\n", "another\n\n", "last"]),
        ("\u4eca\u65e5\u3002\u660e\u65e5\uff01", ["\u4eca\u65e5\u3002", "\u660e\u65e5\uff01"]),
    ],
)
def test_sentences(text: str, parts: list[str] | None) -> None:
    wanted = parts or ["Mr. Cobalt met J. S. Bach, e.g. twice. ", "It was 5. ", "Then 3.5 more."]
    assert [text[a:b] for a, b in sentences(text, 0, len(text))] == wanted


@given(st.text(alphabet="aB1. !?\n\u3002", max_size=60))
def test_sentences_and_lines_tile(text: str) -> None:
    for cut in (sentences, lines):
        assert "".join(text[a:b] for a, b in cut(text, 0, len(text))) == text


def test_words_keep_names_and_numbers_whole() -> None:
    assert words("The open_cellar() of v1.2 isn't Foo-Bar.") == [
        "the", "open_cellar", "of", "v1.2", "isn't", "foo-bar",
    ]  # fmt: skip


def test_estimates_grow_with_what_tokens_are_made_of() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("a") == 1
    prose, digits, wide = (estimate_tokens(100 * char) for char in "a5\u4e00")
    assert prose < digits
    assert prose < wide


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_merged_ranges_cover_the_same_and_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    found = merged(ranges)
    assert {i for a, b in found for i in range(a, b)} == {i for a, b in ranges for i in range(a, b)}
    assert all(found[i][1] < found[i + 1][0] for i in range(len(found) - 1))
