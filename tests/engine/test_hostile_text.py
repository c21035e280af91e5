"""Text that a model may write, of every form: it costs what its length says, and loses nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from call_formats import sample_call, spelling
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.engine.answer.answer_reader import AnswerReader
from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.answer.output_text import AnswerText
from fleetd.engine.answer.text_feed import TextFeed, words
from fleetd.engine.answer.tool_formats import markers
from fleetd.engine.protocol import Delta, ToolCall, ToolCallPiece
from fleetd.errors import EngineError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
FORMATS = list(CALL_FORMATS)
every_format = pytest.mark.parametrize("form", FORMATS)


def signs(form: str) -> list[str]:
    """What the markers, tags and quotes of a form are made of."""
    made, call = CALL_FORMATS[form], sample_call(form, {"city": "Paris", "n": 3})
    cuts = [0, len(call) // 3, len(call) // 2, 2 * len(call) // 3, len(call)]
    return [
        *(call[a:b] for a, b in itertools.combinations(cuts, 2)),
        *filter(None, (made.start, made.end, *made.begins, *made.inside, made.quote)),
        *made.style.closers,
    ]


# ---- What it costs ---------------------------------------------------------------------------------------

HOSTILE = {
    "blanks": lambda made, call: " ",
    "line ends": lambda made, call: "\n",
    "letters": lambda made, call: "x",
    "digits": lambda made, call: "1",
    "quotes": lambda made, call: '"',
    "backslashes": lambda made, call: "\\",
    "braces": lambda made, call: "{",
    "brackets": lambda made, call: "[",
    "openers": lambda made, call: made.start or made.begins[0],
    "closers": lambda made, call: made.end or "x ",
    "heads of calls": lambda made, call: call[: call.index("Paris")],
    "names": lambda made, call: "functions.look:0 ",
    "tags": lambda made, call: "<parameter=a>\n</param",
    "keys": lambda made, call: "<arg_key>a</arg_key> ",
    "half tags": lambda made, call: "<",
    "fences": lambda made, call: "```\n",
    "members": lambda made, call: '"a": 1, ',
    "surrogates": lambda made, call: "\\ud83d",
}


def work(form: str, text: str, step: int) -> int:
    reader = AnswerReader(markers(spelling(form, [])), TOOLS)
    for at in range(0, len(text), step):
        reader.feed(text[at : at + step])
    reader.end(cut=False)
    return reader.work


@every_format
@pytest.mark.parametrize("kind", HOSTILE)
def test_four_times_the_text_is_four_times_the_work(form: str, kind: str) -> None:
    made, call = CALL_FORMATS[form], sample_call(form, {"city": "Paris"})
    unit = HOSTILE[kind](made, call)
    middle = call[: call.index("Paris")]
    for head in ("", made.start, middle):
        works = [work(form, head + unit * (size // len(unit)), 5) for size in (300, 1_200)]
        assert works[1] <= 5 * works[0] + 10 * limits.ANSWER_HEAD_CHARS
        assert works[1] <= 60 * 1_200


def test_a_text_that_takes_too_long_fails_and_no_other_does() -> None:
    feed = TextFeed()
    feed.add("x" * 100)
    wanted = words("y" * 50)

    def for_ever() -> Any:
        while True:
            yield from feed.starts(wanted)

    with pytest.raises(EngineError, match="too long"):
        next(for_ever())


# ---- What it loses ---------------------------------------------------------------------------------------


def told(form: str, pieces: list[str], *, tools: Any = TOOLS, **fields: Any) -> dict[str, Any]:
    """All that clients are told of an answer, and what its streamed arguments make up."""
    cut = fields.pop("cut", False)
    pieces = [piece for piece in pieces if piece]
    state = AnswerText("r", spelling(form, pieces), [], tools, call_pieces=True, **fields)
    events = [e for token in range(len(pieces)) for e in state.push(token)] + state.finish(cut=cut)
    calls = [e for e in events if isinstance(e, ToolCall)]
    streamed: dict[int, str] = {}
    for each in events:
        if isinstance(each, ToolCallPiece):
            streamed[each.index] = streamed.get(each.index, "") + each.text
    for each in calls:
        assert streamed.get(each.index, each.arguments) == each.arguments
    return {
        "content": "".join(e.text for e in events if isinstance(e, Delta) and e.channel == "content"),
        "reasoning": "".join(e.text for e in events if isinstance(e, Delta) and e.channel == "reasoning"),
        "calls": [(e.name, e.arguments) for e in calls],
        "half": state.cut_call,
    }


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str]:
    form = draw(st.sampled_from(FORMATS))
    odd = [
        "<",
        ">",
        "{",
        "}",
        '"',
        "'",
        "\\",
        "\n",
        ", ",
        ":",
        "[",
        "]",
        "look",
        "é😀",
        "null",
        "1e999",
        "```",
        "\x01",
    ]
    parts = st.one_of(st.sampled_from([*signs(form), *odd]), st.text(max_size=4))
    return form, "".join(draw(st.lists(parts, max_size=12)))


@examples(300)
@given(made=texts(), data=st.data(), cut=st.booleans())
def test_any_text_is_the_same_however_it_is_cut_and_its_calls_are_objects(
    made: tuple[str, str], data: st.DataObject, cut: bool
) -> None:
    form, text = made
    whole = told(form, [text], cut=cut)
    at = [0, *sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9))), len(text)]
    assert told(form, [text[a:b] for a, b in itertools.pairwise(at)], cut=cut) == whole
    assert told(form, list(text), cut=cut) == whole
    for name, arguments in whole["calls"]:
        assert name == "look"
        found = strict(arguments)
        assert isinstance(found, dict)
        arguments.encode()  # no half of a character


@examples(150)
@given(made=texts(), data=st.data())
def test_without_tools_the_content_is_what_was_written(made: tuple[str, str], data: st.DataObject) -> None:
    form, text = made
    if form == "harmony":  # whose heads are no text
        text = "So: " + text.replace("<", "")
    plain = {"content": text, "reasoning": "", "calls": [], "half": False}
    assert told(form, list(text), tools=None) == plain
    assert told(form, list(text), tools=None, cut=True) == plain
    assert told(form, list(text), tools=TOOLS, plain=True) == plain


@every_format
def test_what_is_no_call_comes_back_with_its_markers(form: str) -> None:
    made = CALL_FORMATS[form]
    call = sample_call(form, {"city": "Paris"})
    other = call.replace("look", "delete_all")
    opener, closer = made.start or made.begins[0], made.end
    for text in (
        f"Write {opener} and {closer or 'so on'}.",
        f"`{opener}` begins a call.",
        f"It ends so: {opener}",
        f"{opener} {opener}",
        f"I would write {other} if I could.",
    ):
        for cut in (False, True):
            if cut and text.endswith(opener):
                continue  # where a call may have been cut
            seen = told(form, list(text), cut=cut)
            assert (seen["content"], seen["calls"]) == (text, [])


@every_format
def test_a_call_is_found_behind_a_text_that_names_its_marker(form: str) -> None:
    made = CALL_FORMATS[form]
    call = sample_call(form, {"city": "Paris"})
    text = f"I write {made.start or made.begins[0]} now.\n{call}"
    for pieces in ([text], list(text)):
        seen = told(form, pieces)
        assert [(name, strict(arguments)) for name, arguments in seen["calls"]] == [
            ("look", {"city": "Paris"})
        ]


@every_format
def test_markers_inside_of_strings_are_the_strings(form: str) -> None:
    every = {
        sign for each in CALL_FORMATS.values() for sign in (each.start, each.end, *each.inside, *each.begins)
    }
    for sign in (
        *sorted(filter(None, every)),
        "<think>",
        "</think>",
        "```json",
        "</parameter>",
        "</function>",
    ):
        value = f"the {sign} tag"
        if CALL_FORMATS[form].quote and CALL_FORMATS[form].quote in value:
            continue
        text = sample_call(form, {"city": value})
        for pieces in ([text], list(text)):
            seen = told(form, pieces)
            assert [(n, strict(a)) for n, a in seen["calls"]] == [("look", {"city": value})], sign
            assert seen["content"] == ""
