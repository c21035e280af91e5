"""A job on another machine: both ends of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from fleetd import limits
from fleetd.engine.protocol import Assisted, Event, Failed, Finished, Followed, Loading, Scored, Shared
from fleetd.errors import FleetError, ModelNotFound, PeerLost, ProtocolError, from_code
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests import messages
from fleetd.requests.answer_check import AnswerCheck
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.job import Job, Planned
from fleetd.requests.message_codec import ALIVE


async def next_message(stream: PeerStream, of: str = "life") -> bytes | None:
    """The next message that says more than that the other side is alive; None at the end.

    Raises PeerLost for silence, of what: ``of``.
    """
    while True:
        try:
            async with asyncio.timeout(limits.JOB_SILENCE_S):
                body = await stream.receive()
        except TimeoutError:
            raise PeerLost(f"No sign of {of} for {limits.JOB_SILENCE_S:.0f} s.") from None
        if body != ALIVE:
            return body


async def run(
    request: Callable[[str, bytes], PeerStream],
    job: Job,
    model: str,
    digest: str,
    planned: Planned,
    context_tokens: int = 0,
    *,
    unaided: bool = False,
) -> AsyncGenerator[Planned | Loading | Event, None]:
    """Run a job there and yield its events; closing the generator cancels it there.

    Args:
        request: begins a request at that machine.
        model: its canonical name.
        planned: how it runs, as its client knows; yielded anew when that machine says more.
        context_tokens: of the model there, by that machine's card; 0 if unknown.
        unaided: no other machine may help there.

    Raises:
        PeerLost: the machine went away, or said nothing for ``limits.JOB_SILENCE_S``.
        ProtocolError: what it sends cannot be the answer to this job.
        FleetError: what the job failed with there.
    """
    asked = messages.RunJob(model, job.request, job.route, digest, where=True)
    stream = request(messages.RUN_UNAIDED if unaided else messages.RUN, messages.encode(asked))
    ended = False
    check = AnswerCheck(job.request, context_tokens)
    try:
        stream.end()
        while True:
            body = await next_message(stream, "the job")
            if body is None:
                ended = True
                raise ProtocolError("A peer ended an answer without finishing it.")
            event = messages.decode_event(body)
            check(event)
            if isinstance(event, messages.RanAt):
                nodes = (planned.nodes[0], *event.helpers)
                exactness = planned.exactness if event.exact else "plan"
                yield Planned(planned.kind, nodes, exactness, event.reason or planned.reason)
                continue
            if isinstance(event, Finished):
                ended = True
                yield event
                return
            yield event
    finally:
        if not ended:
            stream.cancel()


class JobServer:
    """Runs what peers ask for, here and nowhere else.

    Args:
        has: whether this machine has told others that it has a model of this digest. Finding a digest may
            take minutes of reading, and is nothing that others may start here.
        unaided: no other machine helps with these jobs.
    """

    def __init__(
        self,
        run: Callable[[Job], AsyncGenerator[Planned | Loading | Event, None]],
        has: Callable[[str], bool],
        *,
        unaided: bool = False,
    ) -> None:
        self._run = run
        self._has = has
        self._unaided = unaided

    async def __call__(self, _peer: str, body: bytes, stream: PeerStream) -> None:
        """The handler of both methods. Raises FleetError: what the other side is told."""
        asked = messages.decode_run(body)
        if asked.digest and not self._has(asked.digest):
            raise ModelNotFound(f"This machine does not have these files of {asked.model} (any more).")
        # Whether the prefill is shared is this machine's to decide: a prompt that waits for helpers must
        # have them.
        request = msgspec.structs.replace(asked.request, id=own_id(asked.request.id), shared=False)
        job = Job(
            asked.model,
            request,
            "peer",
            asked.route,
            local_only=True,
            digest=asked.digest,
            unaided=self._unaided,
        )
        async with (
            aclosing(self._run(job)) as run,
            aclosing(with_heartbeats(run, limits.JOB_ALIVE_S)) as events,
        ):
            async for event in events:
                if event is None:
                    stream.send(ALIVE)
                elif isinstance(event, Planned):
                    exact = event.exactness == "exact"
                    if asked.where and (event.shared or event.reason or not exact):
                        reason = event.reason[: limits.ERROR_TEXT_CHARS]
                        stream.send(messages.encode(messages.RanAt(event.helpers, reason, exact)))
                elif not isinstance(event, Failed | Shared | Assisted | Scored | Followed):
                    stream.send(messages.encode(event))
                    await drained(stream)


def own_id(asked: str) -> str:
    """An id of this machine's: what others call their jobs must not meet what runs here already."""
    return f"{asked[: limits.JOB_ID_CHARS]}.{secrets.token_hex(6)}"


def said_by(name: str, error: FleetError) -> FleetError:
    """The same error, naming the machine it came from."""
    return from_code(error.code, f"{name}: {error.message}", hint=error.hint, param=error.param)


async def drained(stream: PeerStream) -> None:
    """Wait until what was sent is on its way. Raises PeerLost for a reader that takes nothing."""
    try:
        async with asyncio.timeout(limits.JOB_READ_STALL_S):
            await stream.drained()
    except TimeoutError:
        raise PeerLost(f"Nothing of it was read for {limits.JOB_READ_STALL_S:.0f} s.") from None
