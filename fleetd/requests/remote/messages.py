"""How a job travels to another machine: one request on a session, its events as messages.

    → one of METHODS    RunJob
    ← (b"" | RanAt | Loading | Tokenized | Accepted | Prefill | Delta | ToolCallPiece | ToolCall)*,
      Finished, JobTrace?

An empty message says that the job still waits or computes; errors and cancellation are the stream's own.
RanAt, Tokenized and JobTrace come only to a machine that asked for them, as earlier versions do not know
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.control.model_facts import WireBits
from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import (
    RESERVED_TEMPLATE_KWARGS,
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Loading,
    Prefill,
    Tokenized,
    ToolCall,
    ToolCallPiece,
)
from fleetd.errors import ProtocolError
from fleetd.p2p.message_reader import reader
from fleetd.requests.remote import message_codec
from fleetd.text.bounded import is_deeper

RUN = "job.run"
# What of a job a machine has to know, or it must not run it: versions that do not know the method refuse it.
# SEEN: the prompt has images. HELD: the answer, or calls of tools, are held to a form. UNAIDED: no third
# machine may see the prompt.
_SEEN, _HELD, _UNAIDED = "seen", "held", "unaided"


def _name(*, seen: bool, held: bool, unaided: bool) -> str:
    marks = ((_SEEN, seen), (_HELD, held), (_UNAIDED, unaided))
    return "_".join([RUN, *(mark for mark, needed in marks if needed)])


METHODS = {
    _name(seen=seen, held=held, unaided=unaided): unaided
    for seen, held, unaided in itertools.product((False, True), repeat=3)
}
"""Each method, and whether its jobs are unaided."""

# Of a number in a trace: a Unix time, tokens, bytes.
_MOST = 2.0**53

_Name = Annotated[str, Meta(max_length=limits.CARD_TEXT_CHARS)]


def method(request: Generate, *, unaided: bool) -> str:
    """The method by which another machine is asked for an answer."""
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else ChatPrompt([])
    held = request.constraint is not None or bool(chat.strict_tools)
    return _name(seen=chat.images > 0, held=held, unaided=unaided)


class RanAt(msgspec.Struct, frozen=True, tag="where", omit_defaults=True):
    """How the job runs there: who helps, by the names that machine knows; ``reason`` if that changed.

    ``exact``: with the bytes of that machine alone. ``wire_bits``: in how many bits its helpers send rows; 0
    is as they are held.
    """

    helpers: Annotated[tuple[_Name, ...], Meta(max_length=limits.SHARE_MACHINES)] = ()
    reason: Annotated[str, Meta(max_length=limits.ERROR_TEXT_CHARS)] = ""
    exact: bool = False
    wire_bits: WireBits = 0


class JobTrace(msgspec.Struct, frozen=True, tag="trace"):
    """What the machine that answered wrote down of the job: its plan, its helpers, its steps; no text."""

    trace: Trace


JobEvent = RanAt | Loading | Tokenized | Accepted | Prefill | Delta | ToolCallPiece | ToolCall | Finished


class RunJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """``digest``: of the model that is meant; "" if the sender knows only its name.

    ``where``: True if the answer shall say which machines help. ``trace``: True if a JobTrace shall follow.
    ``tokenized``: True if Tokenized shall come as soon as the prompt's length is known.
    """

    model: message_codec.ModelName
    request: Generate
    route: Annotated[str, Meta(max_length=32)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    where: bool = False
    trace: bool = False
    tokenized: bool = False


_read_run: Callable[[bytes], RunJob] = reader(RunJob, "A peer's job")
# Raises ProtocolError.
decode_event: Callable[[bytes], JobEvent] = reader(JobEvent, "A peer's event", limits.JOB_EVENT_BYTES)
_read_trace: Callable[[bytes], JobTrace] = reader(JobTrace, "A peer's trace", limits.JOB_TRACE_BYTES)


def encode(message: RunJob | JobEvent | JobTrace) -> bytes:
    return message_codec.encode(message)


def decode_run(body: bytes) -> RunJob:
    """Raises ProtocolError, also for what only this machine's own user may ask for."""
    run = _read_run(body)
    message_codec.check_name(run.model)
    prompt = run.request.prompt
    if isinstance(prompt, ChatPrompt) and RESERVED_TEMPLATE_KWARGS & prompt.template_kwargs.keys():
        raise ProtocolError("A peer sent a chat template of its own.")
    if isinstance(prompt, ChatPrompt) and any(
        is_deeper(each, limits.CONVERSATION_DEPTH)
        for each in (prompt.messages, prompt.tools or [], prompt.template_kwargs)
    ):
        raise ProtocolError("A peer's job is nested without end.")
    return run


def told_trace(trace: Trace) -> JobTrace:
    """The part of a trace that another machine is told: only what ran, and the steps that fit."""
    chosen = msgspec.structs.replace(trace.chosen, steps=trace.chosen.steps[: limits.JOB_TRACE_STEPS])
    steps = trace.steps[: limits.JOB_TRACE_STEPS]
    reason = trace.reason[: limits.ERROR_TEXT_CHARS]
    short = msgspec.structs.replace(trace, chosen=chosen, losers=[], steps=steps, reason=reason)
    return JobTrace(msgspec.structs.replace(short, earlier=[], capped=[], kept_where="", summary=""))


def decode_trace(body: bytes) -> Trace:
    """Raises ProtocolError, also for texts, lists or numbers that no honest machine writes down."""
    trace = _read_trace(body).trace
    if trace.there is not None or trace.earlier or not _plausible(msgspec.to_builtins(trace)):
        raise ProtocolError("A peer's trace makes no sense.")
    return trace


def _plausible(value: Any, name: str = "") -> bool:
    """Whether each part of a trace, as builtins, is within its bounds. People are shown it later."""
    match value:
        case bool() | None:
            return True
        case str():
            return len(value) <= limits.ERROR_TEXT_CHARS
        case int() | float():
            # NaN fails every comparison. Drafts can lose time, nothing else is below zero.
            return (-_MOST if name == "saved_s" else 0) <= value <= _MOST
        case list():
            return len(value) <= limits.JOB_TRACE_STEPS and all(_plausible(each) for each in value)
        case dict():
            return all(_plausible(key) and _plausible(each, key) for key, each in value.items())
        case _:
            return False
