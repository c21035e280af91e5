"""Answers as each family writes them come out as they are meant, wherever tokens and the answer end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from corpus import FILE, CorpusAnswer, CorpusCase, Family, families, tools

from fleetd import limits
from fleetd.engine.answer.call_formats import CALL_FORMATS
from fleetd.engine.answer.object_text import escaped
from fleetd.engine.protocol import Delta, ToolCall, ToolCallPiece

FAMILIES = families()
CASES = [
    pytest.param(family, case, id=f"{name}: {case.name}")
    for name, family in FAMILIES.items()
    for case in family.case
]
every_case = pytest.mark.parametrize(("family", "case"), CASES)
ALL = tools()
# Characters that wait for what follows: those of a number, and the signs before it.
HELD = len(", -2500.0")


def read(
    family: Family, case: CorpusCase, pieces: list[bytes], offered: Any = ALL, **fields: Any
) -> CorpusAnswer:
    return CorpusAnswer(family, pieces, offered, opened=case.opened, **fields)


def by_byte(case: CorpusCase) -> list[bytes]:
    return [bytes([byte]) for byte in case.bytes]


EVERY_BYTE = pytest.param(1, marks=pytest.mark.long)


def places(case: CorpusCase) -> Iterator[int]:
    """Every byte; in the text of a file only some."""
    raw, file = case.bytes, FILE[:10].encode()
    at = raw.find(file)
    yield from (i for i in range(len(raw) + 1) if at < 0 or not at < i < len(raw) - 60 or i % 53 == 0)


def test_each_format_has_answers() -> None:
    assert {family.parser for family in FAMILIES.values()} == CALL_FORMATS.keys() - {"laguna"}, "GLM's way"


@every_case
@pytest.mark.parametrize("step", [5, EVERY_BYTE])
def test_an_answer_is_the_same_wherever_its_tokens_end(family: Family, case: CorpusCase, step: int) -> None:
    """A byte a token, and in two pieces."""
    raw, bytewise = case.bytes, read(family, case, by_byte(case))
    assert bytewise.parts == case.expected
    calls = [each for each in bytewise.events if isinstance(each, ToolCall)]
    written = [part for part in bytewise.told if part[0] == "writes"]
    assert written == [("writes", index, each.arguments) for index, each in enumerate(calls)]
    ids = {each.call_id for each in bytewise.events if isinstance(each, ToolCall | ToolCallPiece)}
    assert len(ids) == len(calls), "one id for all pieces of a call"
    told = bytewise.told
    for at in [*places(case)][::step]:
        seen = read(family, case, [raw[:at], raw[at:]])
        assert (seen.told, seen.state.cut_call) == (told, False), at


@every_case
@pytest.mark.parametrize("streams", [True, False])
def test_the_tokens_of_calls_are_told_while_they_are_written(
    family: Family, case: CorpusCase, streams: bool
) -> None:
    """Without that, a machine that writes a long call could not be told from one that hangs."""
    seen = read(family, case, by_byte(case), streams=streams)
    assert seen.parts == case.expected
    assert streams or not seen.streamed
    told, most = 0, 0
    for at, events in enumerate(seen.by_piece, 1):
        told += sum(each.tokens for each in events if isinstance(each, Delta | ToolCallPiece))
        most = max(most, at - told)
    assert 0 <= most < limits.UNTOLD_TOKENS


@every_case
@pytest.mark.parametrize("step", [2, EVERY_BYTE])
def test_an_answer_that_is_cut_at_any_byte_tells_nothing_else(
    family: Family, case: CorpusCase, step: int
) -> None:
    """Calls that were whole stay whole, half of one is neither a call nor text, and no marker is text."""
    raw, whole = case.bytes, read(family, case, [case.bytes])
    made = 0
    for at in [*places(case)][::-step][::-1]:
        seen = read(family, case, [raw[:at]], cut=True)
        calls = [part for part in seen.parts if part[0] == "calls"]
        assert calls == [part for part in case.expected if part[0] == "calls"][: len(calls)]
        assert len(calls) >= made
        made = len(calls)
        for kind in ("says", "thinks"):
            told, all_of_it = (
                "".join(part[1] for part in parts if part[0] == kind) for parts in (seen.parts, case.expected)
            )
            assert all_of_it.startswith(told.rstrip()), (at, raw[:at], told)
        streamed, fully = seen.streamed, whole.streamed
        assert all(fully[index].startswith(text) for index, text in streamed.items())
        assert seen.state.cut_call >= (len(streamed) > made), (at, raw[:at])
    assert made == len([part for part in case.expected if part[0] == "calls"])


def toolless(family: Family, case: CorpusCase) -> str:
    """What an answer says to which no tool was offered: all of it but thoughts and silent markers."""
    if case.toolless is not None:
        return case.toolless
    text = case.bytes.decode()
    if family.think is not None and any(part[0] == "thinks" for part in case.parts):
        text = text.partition(family.think[1])[2].lstrip("\n")
    for marker in family.dropped:
        text = text.replace(marker, "")
    if family.heads == "header":
        text = re.sub(
            r"(to=self<\|message\|>.*?)?(<\|eom\|><\|start\|>assistant )?to=(\w+)<\|message\|>|<\|eot\|>$",
            "",
            text,
        )
    return text


@every_case
@pytest.mark.parametrize("offered", [None, tools("other")], ids=["without tools", "with another tool"])
def test_calls_of_tools_that_were_not_offered_are_text_to_the_letter(
    family: Family, case: CorpusCase, offered: Any
) -> None:
    for pieces in ([case.bytes], by_byte(case)):
        seen = read(family, case, pieces, offered)
        assert not seen.state.cut_call
        assert "".join(part[1] for part in seen.parts if part[0] == "says") == toolless(family, case)
        assert [part for part in seen.parts if part[0] == "thinks"] == [
            part for part in case.expected if part[0] == "thinks"
        ]


@every_case
def test_arguments_are_told_as_they_are_written(family: Family, case: CorpusCase) -> None:
    """A number, the signs between values and what may begin a marker wait for what follows; no more does."""
    seen = read(family, case, by_byte(case))
    lengths = told_lengths(seen)
    checked = 0
    for call in (each for each in seen.events if isinstance(each, ToolCall)):
        for text, shown in written(case, call):
            at = case.bytes.index(text.encode())
            begun = call.arguments.index(shown)
            for size in range(len(text)):
                certain = text[: max(0, size - HELD)]
                told = begun + len(certain if text == shown else escaped(certain)) if certain else begun > 0
                assert lengths[call.index, at + len(text[:size].encode()) - 1] >= told
                checked += 1
    assert checked >= len(FILE) or case.name != "a file"


def told_lengths(seen: CorpusAnswer) -> dict[tuple[int, int], int]:
    """The characters of arguments that were told, by call and byte."""
    lengths: dict[int, int] = {}
    found = {}
    for at, events in enumerate(seen.by_piece):
        for each in events:
            if isinstance(each, ToolCallPiece):
                lengths[each.index] = lengths.get(each.index, 0) + len(each.text)
        found |= {(index, at): lengths.get(index, 0) for index in range(seen.state.tool_calls + 2)}
    return found


def written(case: CorpusCase, call: ToolCall) -> Iterator[tuple[str, str]]:
    """Texts that stand in an answer and, maybe escaped, in the arguments of its call: its strings, and all of
    the arguments. Not those with a marker in them, behind which a text waits for the end of its string."""
    strings = [each for each in json.loads(call.arguments).values() if isinstance(each, str)]
    if "in a string" in case.name:
        return
    for text, shown in [*((each, escaped(each)) for each in strings), (call.arguments, call.arguments)]:
        for form in {text, shown}:
            if form in case.bytes.decode() and shown in call.arguments and not case.late:
                yield form, shown
