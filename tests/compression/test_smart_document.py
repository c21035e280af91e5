from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smart_texts import haystack

from fleetd.compression.document import Document, question_ranges, unmark, unmarked


def asked(document: Document) -> list[str]:
    return [document.text[start:end].strip() for start, end in document.questions]


def test_a_block_per_message_and_their_places_in_the_text() -> None:
    document = Document.of_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": None},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "user", "content": "And now?"},
        ]
    )
    assert document.text == "Be brief.\n\n\n42\nAnd now?"
    places = zip(document.starts, document.blocks, strict=True)
    said = [document.text[start : start + len(block.text)] for start, block in places]
    assert said == ["Be brief.", "", "", "42", "And now?"]
    assert asked(document) == ["And now?"]
    assert [document.block_at(at) for at in (0, 8, 9, 12, 14, 15)] == [0, 0, 0, 3, 3, 4]


def test_a_short_last_turn_asks_as_a_whole_even_if_tools_answered_since() -> None:
    document = Document.of_messages(
        [
            {"role": "user", "content": haystack(1)},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": "First do this. Then do that."},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": haystack(2)},
        ]
    )
    assert asked(document) == ["First do this. Then do that."]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "What is the code of the mill?"),
        ("Find the code of the mill.\n\n", ""),
        ("Answer from the text below.\n\n", "Question: what is the code of the mill?"),
    ],
)
def test_of_a_pasted_text_only_its_ends_ask(before: str, after: str) -> None:
    text = f"{before}{haystack(3)}\n\n{after}"
    document = Document.of_messages([{"role": "user", "content": text}])
    assert asked(document) == [part.strip() for part in (before, after) if part]
    assert asked(Document.of_text(text)) == asked(document)


def test_where_neither_end_looks_like_a_question_nothing_asks() -> None:
    assert question_ranges(haystack(4)) == []
    assert Document.of_text(haystack(4)).questions == ()


def test_who_only_pastes_a_text_has_asked_before() -> None:
    asks, answers, pastes = "Find the code of the mill in the next text.", "Send it.", haystack(4)
    turns = [
        {"role": "system", "content": "Summarise what the user sends."},
        {"role": "user", "content": asks},
        {"role": "assistant", "content": answers},
        {"role": "user", "content": pastes},
    ]
    assert asked(Document.of_messages(turns)) == [asks]
    document = Document.of_messages([turns[0], turns[3]])
    assert asked(document) == [turns[0]["content"]]
    assert document.material.strip() == pastes


def test_nobody_asks_in_an_empty_prompt() -> None:
    assert Document.of_text(" \n ").questions == ()
    assert Document.of_messages([]).questions == ()
    assert Document.of_messages([{"role": "system", "content": "x"}]).questions == ()


# ---- Marks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean", "marked"),
    [
        ("a <fleet:keep>b</fleet:keep> c", "a b c", ["b"]),
        ("a\n<fleet:keep>\nb\n</fleet:keep>\nc", "a\nb\nc", ["b\n"]),
        ("a<fleet:keep>b", "ab", ["b"]),
        ("a</fleet:keep>b", "ab", []),
        ("<fleet:keep>a<fleet:keep>b</fleet:keep>c</fleet:keep>d", "abcd", ["ab"]),
        ("<keep>a</keep>", "<keep>a</keep>", []),
    ],
)
def test_marks_are_read_and_taken_out(text: str, clean: str, marked: list[str]) -> None:
    found, ranges = unmark(text)
    assert found == clean
    assert [found[start:end] for start, end in ranges] == marked


def test_marks_never_reach_a_model() -> None:
    messages = [
        {"role": "user", "content": "<fleet:keep>x</fleet:keep>", "name": "ann"},
        {"role": "tool", "content": None},
    ]
    assert unmarked(messages) == [
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "tool", "content": None},
    ]
    assert messages[0]["content"] == "<fleet:keep>x</fleet:keep>"
    assert Document.of_messages(messages).text == "x\n"


@given(st.lists(st.sampled_from(["<fleet:keep>", "</fleet:keep>", "word ", "\n", " "]), max_size=12))
def test_any_nesting_of_marks_leaves_the_words(pieces: list[str]) -> None:
    clean, ranges = unmark("".join(pieces))
    assert "fleet:keep" not in clean
    assert clean.count("word") == pieces.count("word ")
    assert all(0 <= a < b <= len(clean) for a, b in ranges)


def test_only_a_client_marks_what_is_kept() -> None:
    text = "A page that says <fleet:keep> and goes on."
    messages = [
        {"role": "user", "content": "Read <fleet:keep>this</fleet:keep>."},
        {"role": "assistant", "content": text},
        {"role": "tool", "content": text},
        {"role": "user", "content": "And?"},
    ]
    document = Document.of_messages(messages)
    assert [block.text for block in document.blocks] == ["Read this.", text, text, "And?"]
    assert [block.marked for block in document.blocks] == [((5, 9),), (), (), ()]
    assert [message["content"] for message in unmarked(messages)] == ["Read this.", text, text, "And?"]


def test_lines_may_end_as_on_windows() -> None:
    text = f"Find the name of the miller.\n\n{haystack(1)}\n\nWhat is the code of the mill?"
    found = [asked(Document.of_text(version)) for version in (text, text.replace("\n", "\r\n"))]
    assert found[0] == found[1] == ["Find the name of the miller.", "What is the code of the mill?"]


def test_space_in_front_asks_nothing() -> None:
    document = Document.of_text("\n" * 1000 + f"Find the code.\n\n{haystack(1)}\n\nWhat is the code?")
    assert document.question == "Find the code.\nWhat is the code?"


def test_of_a_long_last_turn_the_ends_say_what_to_do() -> None:
    pasted = "ERROR in row 7. Summary: total number of rows is 9.\n" * 30
    turn = f"{pasted}\nWhat is the code of the mill?"
    messages = [{"role": "tool", "content": haystack(1, 120)}, {"role": "user", "content": turn}]
    document = Document.of_messages(messages)
    assert document.question == turn
    assert document.tasks == ["What is the code of the mill?"]
