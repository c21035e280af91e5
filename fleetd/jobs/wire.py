"""How a job travels to another machine: one request on a session, its events as messages.

    → RUN    Run
    ← (b"" | Where | Loading | Accepted | Prefill | Delta | ToolCall)*, Finished

An empty message says that the job still waits or computes; errors and cancellation are the stream's own.
Where comes only to who asked for it, as earlier versions do not know it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fleetd import limits
from fleetd.engine.protocol import (
    RESERVED_TEMPLATE_KWARGS,
    Accepted,
    ChatPrompt,
    Delta,
    Finished,
    Generate,
    Loading,
    Prefill,
    ToolCall,
)
from fleetd.errors import ProtocolError
from fleetd.models import names

RUN = "job.run"
ALIVE = b""

_Name = Annotated[str, Meta(max_length=limits.CARD_TEXT_CHARS)]


class Where(msgspec.Struct, frozen=True, tag="where", omit_defaults=True):
    """How the job runs there: who helps, by the names that machine knows; ``reason`` where that changed.

    ``exact``: with the bytes of that machine alone.
    """

    helpers: Annotated[tuple[_Name, ...], Meta(max_length=limits.SHARE_MACHINES)] = ()
    reason: Annotated[str, Meta(max_length=limits.ERROR_TEXT_CHARS)] = ""
    exact: bool = False


JobEvent = Where | Loading | Accepted | Prefill | Delta | ToolCall | Finished


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """``digest``: of the model that is meant; "" where the sender knows only its name.

    ``where``: whoever asks wants to be told who helps.
    """

    model: Annotated[str, Meta(min_length=1, max_length=limits.MODEL_NAME_CHARS)]
    request: Generate
    route: Annotated[str, Meta(max_length=32)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    where: bool = False


_encode = msgspec.msgpack.Encoder().encode
_run = msgspec.msgpack.Decoder(Run).decode
_event = msgspec.msgpack.Decoder(JobEvent).decode
_BROKEN = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def encode(message: Run | JobEvent) -> bytes:
    return _encode(message)


def decode_run(body: bytes) -> Run:
    """Raises ProtocolError, also for what only this machine's own user may ask for."""
    try:
        run = _run(body)
    except _BROKEN as error:
        raise ProtocolError(f"A peer sent a job that cannot be read: {error}.") from None
    if names.is_path(run.model):
        raise ProtocolError("A peer asked for a model by a path on this machine.")
    prompt = run.request.prompt
    if isinstance(prompt, ChatPrompt) and RESERVED_TEMPLATE_KWARGS & prompt.template_kwargs.keys():
        raise ProtocolError("A peer sent a chat template of its own.")
    return run


def decode_event(body: bytes) -> JobEvent:
    """Raises ProtocolError."""
    try:
        found: JobEvent = _event(body)
    except _BROKEN as error:
        raise ProtocolError(f"A peer sent an event that cannot be read: {error}.") from None
    return found
