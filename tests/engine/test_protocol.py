"""Frames: any split of the stream gives the same messages, and nothing hostile is taken in."""

from __future__ import annotations

import struct
import typing
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd import limits
from fleetd.compression.packed import PackedScores
from fleetd.control.model_facts import MeasuredSpeed, ModelShape, StateSizes
from fleetd.engine import protocol
from fleetd.engine.protocol import (
    Accepted,
    Arithmetic,
    Assisted,
    AssistPrefill,
    Cancel,
    ChatPrompt,
    Command,
    Delta,
    DraftFor,
    DraftReport,
    EmbedTexts,
    Failed,
    FetchBlocks,
    Finished,
    ForgetOrigins,
    FrameTooLong,
    FreeMemory,
    Generate,
    Heartbeat,
    IdleTime,
    Keep,
    KvFetched,
    KvMissing,
    KvStored,
    LoadFailed,
    Loading,
    MeasuredAgain,
    Prefill,
    PrefillAlone,
    PrefillReport,
    PrefillWithHelpers,
    Profile,
    PromptsRead,
    Ready,
    Report,
    RerankTexts,
    Sampling,
    Score,
    Scored,
    ScoringState,
    ServeStage,
    Shutdown,
    StepTime,
    TakenElsewhere,
    TextPrompt,
    TextsEmbedded,
    TextsReranked,
    Timings,
    Tokenized,
    TokenLogprob,
    TokenPrompt,
    ToolCall,
    ToolCallPiece,
    TopLogprob,
    Usage,
    WriteNow,
)
from fleetd.plan.prefill.split import Split

SPLIT = Split("layers", (0, 3, 8), 8, 16, 400, 128)
COMMANDS: list[Any] = [
    Generate("a", ChatPrompt([{"role": "user", "content": "hé"}], [{"x": [1, None]}], {"name": "f"})),
    Generate(
        "b", TextPrompt("text"), Sampling(0.5, seed=-(1 << 63), logit_bias={3: -1.5}), 7, ["s"], 3, True
    ),
    Generate("c", TokenPrompt([0, 1, (1 << 31) - 1])),
    Generate("d", TextPrompt("text"), keep=Keep({0: [(0, 2), (3, 4)]})),
    Score("e", "text", [(0, 2)], (1, 3), 4, Profile([(0, 1)], 3)),
    DraftFor("f", 3),
    EmbedTexts("g", ["text", [3, 4]], "query", 2, "find it", truncate=True, background=True),
    RerankTexts("h", "query", ["hé", ""]),
    FetchBlocks("a", 3, 0.5, within_s=2.5, since_s=0.1),
    PrefillWithHelpers("a", SPLIT, 1.5, True),
    PrefillWithHelpers("a", SPLIT, 1.5, wire_bits=8),
    PrefillAlone("a", "no helper"),
    AssistPrefill("d", SPLIT, 0),
    AssistPrefill("d", SPLIT, 0, wire_bits=8, exact=False),
    ServeStage("d", 2, 4, 4096),
    Cancel("a"),
    IdleTime(2.5),
    FreeMemory(True),
    TakenElsewhere(1 << 40),
    ForgetOrigins(["0123456789abcdef"]),
    WriteNow(),
    PromptsRead(True),
    Shutdown(),
]
SHAPE = ModelShape("llama", 1 << 40, 64, "float32", 8, StateSizes(3))
REPORTS: list[Any] = [
    Loading("reading", 3, 9),
    Ready("cpu", SHAPE, 8, 4, True, False, True, 0.5, {"mlx": "1"}),
    LoadFailed("out_of_memory", "no", "hint"),
    MeasuredAgain(MeasuredSpeed(500.0, 40.0, 1e-6, 0.01, "other programs had 60% of the processor")),
    msgspec.structs.replace(
        Ready("cpu", SHAPE, 8, 4, False, False, False, 0.5, {}),
        first_layer=3,
        last_layer=8,
        arithmetic=Arithmetic("avx512", "float32", {"mlx": "1"}, 3, [b"12345678"] * 5, "any"),
    ),
    Tokenized("a", 3),
    Accepted("a", 3, 1, 128, True),
    Accepted("a", 3, kept=2),
    Accepted("a", 3, dense_reason="why"),
    Prefill("a", 1, 3, 1),
    PrefillReport("a", [StepTime("computed", 0.5, 3)], "peer_lost", "gone", 7),
    Assisted("d", [StepTime("computed", 0.5)]),
    Delta(
        "a",
        "\U0001f600",
        "reasoning",
        2,
        [TokenLogprob("t", -0.5, b"\xff", [TopLogprob("u", -1.0, b"u")], 4)],
    ),
    ToolCallPiece("a", 0, "id", "f", "{", 2),
    ToolCall("a", 0, "id", "f", "{}"),
    Finished("a", "length", Usage(1, 2, 3, 4), Timings(0.1, 0.2, 0.3), "stop"),
    Failed("a", "bad_request", "no", "hint", "param"),
    Scored("e", PackedScores(1, 1, b"s", b"e", b"p", b"l", b"q"), Profile([(0, 1)], 3), 9, 0.5),
    DraftReport("f", 3, 2, 1),
    TextsEmbedded("g", 2, b"12345678" * 2, [3, 4]),
    TextsReranked("h", [0.25, 1.0], [7, 5]),
    KvMissing("a", [b"n" * 32], [0.5], 4096),
    KvFetched("a", 1, 4096, 0.5, "peer_lost", "gone"),
    KvStored("a", [b"n" * 32]),
    Heartbeat(3, 1, 2, 3, 4, True, 5, 6, 7, 8),
    Heartbeat(3, scoring=ScoringState("unmeasured", 5000)),
]


def kinds(union: Any) -> set[Any]:
    return set(typing.get_args(union))


def test_every_message_has_an_example_here() -> None:
    assert {type(m) for m in COMMANDS} == kinds(Command)
    assert {type(m) for m in REPORTS} == kinds(Report)


@pytest.mark.parametrize("message", COMMANDS)
def test_commands_arrive_as_sent(message: Any) -> None:
    assert list(protocol.commands().feed(protocol.encode(message))) == [message]


@pytest.mark.parametrize("message", REPORTS)
def test_reports_arrive_as_sent(message: Any) -> None:
    assert list(protocol.reports().feed(protocol.encode(message))) == [message]


@given(st.lists(st.sampled_from(REPORTS), max_size=6), st.lists(st.integers(0, 5000), max_size=20))
def test_any_split_of_the_stream_gives_the_same_messages(messages: list[Any], cuts: list[int]) -> None:
    stream = b"".join(protocol.encode(m) for m in messages)
    at = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts)})
    decoder = protocol.reports()
    got = [m for a, b in zip(at, [*at[1:], len(stream)], strict=True) for m in decoder.feed(stream[a:b])]
    assert got == messages


def test_one_byte_at_a_time() -> None:
    decoder = protocol.commands()
    stream = b"".join(protocol.encode(m) for m in COMMANDS)
    assert [m for i in range(len(stream)) for m in decoder.feed(stream[i : i + 1])] == COMMANDS


def test_a_frame_at_the_limit_passes_and_one_byte_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = protocol.encode(Cancel("x" * 50))
    monkeypatch.setattr(limits, "ENGINE_FRAME_BYTES", len(frame) - 4)
    assert list(protocol.commands().feed(protocol.encode(Cancel("x" * 50)))) == [Cancel("x" * 50)]
    with pytest.raises(FrameTooLong):
        protocol.encode(Cancel("x" * 51))
    monkeypatch.setattr(limits, "ENGINE_FRAME_BYTES", len(frame) - 5)
    with pytest.raises(FrameTooLong):
        list(protocol.commands().feed(frame))


def test_a_too_long_frame_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameTooLong):
        list(protocol.reports().feed(struct.pack(">I", limits.ENGINE_FRAME_BYTES + 1)))


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode({"type": "nonsense"}),
        msgspec.msgpack.encode({"type": "cancel"}),
        msgspec.msgpack.encode({"type": "cancel", "id": 3}),
        msgspec.msgpack.encode(["cancel", "a"]),
        b"",
        b"\xc1",
        b"\x81\xa4type\xa3\xff\xfe\xfd",
        b"\x91" * 5000 + b"\x90",
    ],
)
def test_what_is_no_message_is_a_decode_error(body: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError, UnicodeDecodeError)):
        list(protocol.commands().feed(struct.pack(">I", len(body)) + body))


def test_a_report_out_of_range_names_its_request() -> None:
    wrong = Finished("a", "stop", Usage(1, -128))
    right = Heartbeat(3)
    unfit, after = protocol.reports().feed(protocol.encode(wrong) + protocol.encode(right))
    assert (unfit.id, after) == ("a", right)
    assert "-128" not in unfit.id
    assert "cached_tokens" in unfit.reason


def test_a_report_about_no_request_cannot_be_out_of_range() -> None:
    with pytest.raises(msgspec.ValidationError):
        list(protocol.reports().feed(protocol.encode(Heartbeat(-1.5))))  # type: ignore[arg-type]


def test_reports_are_no_commands() -> None:
    with pytest.raises(msgspec.ValidationError):
        list(protocol.commands().feed(protocol.encode(Heartbeat(1))))


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_wait_or_raise(data: bytes) -> None:
    try:
        got = list(protocol.commands().feed(data))
    except (FrameTooLong, msgspec.DecodeError, UnicodeDecodeError):
        return
    assert all(isinstance(m, Generate | Cancel | Shutdown) for m in got)


@pytest.mark.parametrize("question", protocol.Question.__subclasses__())
def test_a_question_names_its_answer_for_the_type_checker_and_for_who_waits_for_it(question: Any) -> None:
    ((_, answer),) = [(base, get_args(base)[0]) for base in question.__orig_bases__]
    assert question.answer is answer
    assert question in get_args(protocol.Command)
    assert answer in get_args(protocol.Event)
