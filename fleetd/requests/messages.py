"""How a job travels to another machine: one request on a session, its events as messages.

    → RUN or RUN_UNAIDED    RunJob
    ← (b"" | Where | Loading | Accepted | Prefill | Delta | ToolCall)*, Finished

An empty message says that the job still waits or computes; errors and cancellation are the stream's own.
Where comes only to who asked for it, as earlier versions do not know it.
"""

from __future__ import annotations

from collections.abc import Callable
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
from fleetd.p2p.message_reader import reader
from fleetd.requests import message_codec

RUN = "job.run"
# The same for a prompt that no third machine may see. Versions that do not know it refuse it.
RUN_UNAIDED = "job.run_unaided"

_Name = Annotated[str, Meta(max_length=limits.CARD_TEXT_CHARS)]


class RanAt(msgspec.Struct, frozen=True, tag="where", omit_defaults=True):
    """How the job runs there: who helps, by the names that machine knows; ``reason`` where that changed.

    ``exact``: with the bytes of that machine alone.
    """

    helpers: Annotated[tuple[_Name, ...], Meta(max_length=limits.SHARE_MACHINES)] = ()
    reason: Annotated[str, Meta(max_length=limits.ERROR_TEXT_CHARS)] = ""
    exact: bool = False


JobEvent = RanAt | Loading | Accepted | Prefill | Delta | ToolCall | Finished


class RunJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """``digest``: of the model that is meant; "" where the sender knows only its name.

    ``where``: True if the answer shall say which machines help.
    """

    model: message_codec.ModelName
    request: Generate
    route: Annotated[str, Meta(max_length=32)]
    digest: Annotated[str, Meta(max_length=64)] = ""
    where: bool = False


_read_run: Callable[[bytes], RunJob] = reader(RunJob, "A peer's job")
# Raises ProtocolError.
decode_event: Callable[[bytes], JobEvent] = reader(JobEvent, "A peer's event")


def encode(message: RunJob | JobEvent) -> bytes:
    return message_codec.encode(message)


def decode_run(body: bytes) -> RunJob:
    """Raises ProtocolError, also for what only this machine's own user may ask for."""
    run = _read_run(body)
    message_codec.check_name(run.model)
    prompt = run.request.prompt
    if isinstance(prompt, ChatPrompt) and RESERVED_TEMPLATE_KWARGS & prompt.template_kwargs.keys():
        raise ProtocolError("A peer sent a chat template of its own.")
    return run
