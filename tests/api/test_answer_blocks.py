"""An answer as blocks, whatever pieces it comes in."""

from __future__ import annotations

import json

import pytest

from fleetd.api.generation.answer_blocks import AnswerSoFar, BlockClosed, BlockOpened, BlockText
from fleetd.engine.protocol import Delta, ToolCall, ToolCallPiece


@pytest.mark.parametrize("pieces", [[], ["{"], ['{"a"', ":1"], ['{"a":1}']])
def test_a_call_in_pieces_is_one_block_with_the_arguments_of_the_whole_call(pieces: list[str]) -> None:
    blocks = AnswerSoFar()
    steps = blocks.feed(Delta("r", "Hm."))
    for text in pieces:
        steps += blocks.feed(ToolCallPiece("r", 0, "c0", "f", text))
    steps += blocks.feed(ToolCall("r", 0, "c0", "f", '{"a":1}'))
    steps += blocks.feed(ToolCall("r", 1, "c1", "f", "{}"))
    assert [block.text for block in blocks.blocks] == ["Hm.", '{"a":1}', "{}"]
    assert sum(isinstance(step, BlockOpened) for step in steps) == 3
    assert sum(isinstance(step, BlockClosed) for step in steps) == 3
    told = [step.text for step in steps if isinstance(step, BlockText) and step.block.index == 1]
    assert all(told)
    assert told[: len(pieces)] == pieces


@pytest.mark.parametrize(
    "arguments", ["", "null", "[1]", '{"a": 1,}', '{"a"', '{"a": ' + "[" * 2000 + "]" * 2000 + "}"]
)
def test_arguments_of_another_machine_are_an_object_whatever_they_are(arguments: str) -> None:
    """One of another version may send what this one does not: no dialect fails for it."""
    blocks = AnswerSoFar()
    blocks.feed(ToolCall("r", 0, "c0", "f", arguments))
    (block,) = blocks.blocks
    assert block.whole
    assert block.arguments == json.loads(block.text)


@pytest.mark.parametrize("pieces", ["no JSON", '{"a": ', "[" * 2000])
def test_pieces_that_are_no_object_are_told_and_their_block_still_has_one(pieces: str) -> None:
    blocks = AnswerSoFar()
    blocks.feed(ToolCallPiece("r", 0, "c0", "f", pieces))
    blocks.feed(ToolCall("r", 0, "c0", "f", pieces))
    (block,) = blocks.blocks
    assert (block.text, block.arguments) == (pieces, {"arguments": pieces})


def test_a_call_that_is_not_whole_is_none() -> None:
    blocks = AnswerSoFar()
    blocks.feed(ToolCallPiece("r", 0, "c0", "f", '{"a": 1'))
    blocks.close()
    assert not blocks.blocks[0].whole
