"""A job on another machine: both ends of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import msgspec

from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import Aside, Event, Failed, Finished, Loading, Tokenized
from fleetd.errors import ModelNotFound, ProtocolError
from fleetd.p2p.session.transport import PeerStream
from fleetd.requests.concurrency import with_heartbeats
from fleetd.requests.job import Job, Planned
from fleetd.requests.remote import messages
from fleetd.requests.remote.answer_check import AnswerCheck
from fleetd.requests.remote.answer_deadline import AnswerDeadline
from fleetd.requests.remote.message_codec import ALIVE
from fleetd.requests.remote.peer_stream import drained, next_message, own_id


class RemoteJob:
    """A job on another machine, seen from the one that asks.

    Args:
        request: begins a request at that machine.
        model: its canonical name.
        planned: how it runs, as its client knows.
        context_tokens: of the model there, by that machine's card; 0 if unknown.
        busy: by its card it has no free stream, or has to load the model.
        prefill_s: how long its prefill takes by the plan; None if it was not priced.
        load_within_s: a load there that stands still for so long is given up.
        unaided: no other machine may help there.
    """

    def __init__(
        self,
        request: Callable[[str, bytes], PeerStream],
        job: Job,
        model: str,
        digest: str,
        planned: Planned,
        context_tokens: int = 0,
        *,
        busy: bool = True,
        prefill_s: float | None = None,
        load_within_s: float = limits.ENGINE_LOAD_S,
        unaided: bool = False,
    ) -> None:
        self._request = request
        self.busy = busy
        self.prefill_s = prefill_s
        self._load_within_s = load_within_s
        self._method = messages.method(job.request, unaided=unaided)
        self._context_tokens, self._images = context_tokens, job.images
        self._asked = messages.RunJob(
            model, job.request, job.route, digest, where=True, trace=True, tokenized=True
        )
        self._planned = planned
        self._stream: PeerStream | None = None
        # Seconds in which its events lay with the client: they say nothing of that machine.
        self.client_s = 0.0

    async def events(self) -> AsyncGenerator[Planned | Loading | Event, None]:
        """Run it there and yield its events; closing the generator before the last one cancels it there.

        ``planned`` is yielded anew when that machine says more.

        Raises:
            PeerLost: the machine went away, said nothing for ``limits.JOB_SILENCE_S``, or gets no further.
            ProtocolError: what it sends cannot be the answer to this job.
            FleetError: what the job failed with there.
        """
        clock = asyncio.get_running_loop().time
        async with aclosing(self._events(clock)) as events:
            async for event in events:
                given_s = clock()
                yield event
                self.client_s += clock() - given_s

    async def _events(self, clock: Callable[[], float]) -> AsyncGenerator[Planned | Loading | Event, None]:
        planned = self._planned
        stream = self._request(self._method, messages.encode(self._asked))
        check = AnswerCheck(self._asked.request, self._context_tokens)
        ended = False
        deadline = AnswerDeadline(
            clock(),
            busy=self.busy,
            prefill_s=self.prefill_s,
            load_within_s=self._load_within_s,
            images=self._images,
        )
        try:
            stream.end()
            while True:
                # Its time stands still while the client reads what has come.
                body = await next_message(stream, "the job", lambda: deadline.due_s + self.client_s)
                if body is None:
                    ended = True
                    raise ProtocolError("A peer ended an answer without finishing it.")
                event = messages.decode_event(body)
                check(event)
                deadline.on_event(event, clock() - self.client_s)
                if isinstance(event, messages.RanAt):
                    nodes = (planned.nodes[0], *event.helpers)
                    exactness = planned.exactness if event.exact else "equivalent"
                    reason = event.reason or planned.reason
                    yield Planned(planned.kind, nodes, exactness, reason, wire_bits=event.wire_bits)
                    continue
                if isinstance(event, Finished):
                    ended, self._stream = True, stream
                    yield event
                    return
                yield event
        finally:
            if not ended:
                stream.cancel()

    async def trace(self) -> Trace | None:
        """What that machine wrote down of the job, after its last event; None if it tells nothing.

        Earlier versions end the stream instead. Raises FleetError, and TimeoutError for a machine that says
        only that it is alive.
        """
        if (stream := self._stream) is None:
            return None
        ended = False
        try:
            async with asyncio.timeout(limits.JOB_SILENCE_S):
                body = await next_message(stream, "the trace")
            trace = messages.decode_trace(body) if body is not None else None
            ended = True
        finally:
            if not ended:
                stream.cancel()
        return trace


class JobServer:
    """Runs what peers ask for, here and nowhere else.

    Args:
        has: whether this machine has told others that it has a model of this digest. Finding a digest may
            take minutes of reading, and is nothing that others may start here.
        name_of: the name of a member, by its node id.
        unaided: no other machine helps with these jobs.
    """

    def __init__(
        self,
        run: Callable[[Job], AsyncGenerator[Planned | Loading | Event, None]],
        has: Callable[[str], bool],
        name_of: Callable[[str], str] = lambda node_id: node_id,
        *,
        unaided: bool = False,
    ) -> None:
        self._run = run
        self._has = has
        self._name_of = name_of
        self._unaided = unaided

    async def __call__(self, peer: str, body: bytes, stream: PeerStream) -> None:
        """The handler of both methods. Raises FleetError: what the other side is told."""
        asked = messages.decode_run(body)
        if asked.digest and not self._has(asked.digest):
            raise ModelNotFound(f"This machine does not have these files of {asked.model} (any more).")
        # Whether the prefill is shared is this machine's to decide: a prompt that waits for helpers must
        # have them.
        request = msgspec.structs.replace(asked.request, id=own_id(asked.request.id), shared=False)
        traced: asyncio.Future[Trace] = asyncio.get_running_loop().create_future()
        job = Job(
            asked.model,
            request,
            "peer",
            asked.route,
            local_only=True,
            digest=asked.digest,
            asked_by=self._name_of(peer),
            traced=traced.set_result,
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
                        ran = messages.RanAt(event.helpers, reason, exact, event.wire_bits)
                        stream.send(messages.encode(ran))
                elif isinstance(event, Tokenized) and not asked.tokenized:
                    continue
                elif not isinstance(event, Failed | Aside):
                    stream.send(messages.encode(event))
                    await drained(stream)
        if asked.trace:
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.JOB_TRACE_S):
                    trace = await asyncio.shield(traced)
                stream.send(messages.encode(messages.told_trace(trace)))
                await drained(stream)
