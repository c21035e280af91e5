"""The step that notes what the machine which answers has read, how fast it was, and what it tells of that.

A prompt counts as read from the first token of its answer on: forks of it need not wait for the last one.
Before that it counts as being read: the same prompt goes to the same machine, whose engine reads it once. One
that is cancelled, perhaps to be sent again after its client's time-out, counts as far as it was read, since
the engine keeps that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fleetd import limits
from fleetd.control.prefill_trace import Trace
from fleetd.engine.protocol import Event, Finished, Loading
from fleetd.errors import EngineDied, FleetError
from fleetd.process.observe import get_logger
from fleetd.requests.concurrency import BackgroundTasks
from fleetd.requests.members.members import Members
from fleetd.requests.pipeline import ANSWER, PipelineStep
from fleetd.requests.placement.placement import AnswerTokens, Placer
from fleetd.requests.remote.remote import RemoteJob
from fleetd.requests.request import Attempt, Request

log = get_logger("fleetd.requests")


class AnsweringMachines(PipelineStep):
    """Args:
    placer: learns how fast other machines are; None if all requests run here.
    """

    events = (*ANSWER, Finished)

    def __init__(
        self,
        members: Members,
        placer: Placer | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._placer = placer
        self._monotonic = monotonic
        self._asking = BackgroundTasks()

    def prepare(self, request: Request) -> None:
        self._members.reads(request.id, request.placement.node_id, request.model.name, request.job)

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        if isinstance(event, Finished):
            self._answered(request, event)
        elif not request.answering:
            self._members.reads_no_more(request.id)
            self._has_read(request, 1.0)
        return event

    def attempt_ended(self, request: Request) -> asyncio.Task[None] | None:
        attempt = request.attempt
        self._members.reads_no_more(request.id)
        if isinstance(attempt.error, EngineDied):
            self._members.lost_prompts(request.placement.node_id, request.model.name)
        elif not request.answering and attempt.error is None:
            self._has_read(request, attempt.read_share)
        if attempt.remote is None:
            return None
        if request.finished is not None:
            return self._asking.start(self._trace_there(request, attempt, attempt.remote))
        if attempt.error is None:
            self._given_up(request, attempt.remote)
        return None

    async def close(self) -> None:
        """End what is still asked of other machines."""
        await self._asking.close()

    def _has_read(self, request: Request, share: float) -> None:
        if share > 0:
            self._members.read(request.placement.node_id, request.model.name, request.job, share)

    def _answered(self, request: Request, finished: Finished) -> None:
        """What the answer took, by this machine's clock."""
        placement, remote_job = request.placement, request.attempt.remote
        self._members.succeeded(placement.node_id, "answer", placement.digest)
        if (refusal := request.attempts.refusal) is not None:
            # It is left out: every request that it gets would end so.
            self._members.failed(refusal.node_id, "answer", refusal.untrue, refusal.digest)
        if remote_job is not None and _had_less(request, finished):
            # What it says of other prompts is not asked for a while, and draws none of them there.
            self._members.late(placement.node_id, "fetch")
        first_at_s = request.first_token_s
        alone = request.planned is not None and len(request.planned.nodes) == 1
        if self._placer is None or remote_job is None or first_at_s is None or request.kept_tokens:
            return
        if placement.asleep:
            return  # the time until it was awake says nothing of its speed
        first_s, decode_s = first_at_s - request.attempt.began_s, self._monotonic() - first_at_s
        usage, client_s = finished.usage, request.first_client_s
        # With helpers, with a queue there or with images, the time says little about how fast it reads.
        tells = alone and not remote_job.busy and not request.job.images
        tells = tells and not _client_was_slow(client_s, first_s)
        read = usage.prompt_tokens - usage.cached_tokens if tells else 0
        slow = _client_was_slow(remote_job.client_s - client_s, decode_s)
        tokens = AnswerTokens(usage.cached_tokens, read, 0 if slow else usage.completion_tokens - 1)
        self._placer.answered(placement, request.model.wanted, tokens, first_s, decode_s)

    def _given_up(self, request: Request, remote_job: RemoteJob) -> None:
        """The client has left: a machine that had sent nothing for long counts as late."""
        if request.answering or request.placement.asleep:
            return
        allowed_s = limits.JOB_CANCELLED_S + limits.JOB_LATE * (remote_job.prefill_s or 0.0)
        # The plan's figure has their tokens, not what an encoder takes.
        allowed_s += request.job.images * limits.JOB_IMAGE_S
        if not remote_job.busy and self._monotonic() - request.attempt.began_s > allowed_s:
            self._members.late(request.placement.node_id, "answer")

    async def _trace_there(self, request: Request, attempt: Attempt, remote: RemoteJob) -> None:
        """Its own trace belongs to the story of the request here. No client waits for it."""
        try:
            ended_s = self._monotonic()
            there = await remote.trace()
            if there is not None:
                offset_s = self._members.clock_offset_s(request.placement.node_id)
                attempt.there_arrived_s = _arrived_s(attempt, there, ended_s, offset_s)
            attempt.there = there
        except (FleetError, TimeoutError) as error:
            log.info("trace.not_told", request=request.id, node=request.answered_by, reason=str(error))


def _had_less(request: Request, finished: Finished) -> bool:
    """True if the machine that answered had clearly less of the prompt than it said before."""
    place = request.places.get(request.placement.node_id)
    said = max(place.memory_tokens, place.disk_tokens) if place is not None else 0
    return said >= limits.FETCH_LEAST_TOKENS and finished.usage.cached_tokens < said * limits.FETCH_BELIEVED


def _arrived_s(attempt: Attempt, there: Trace, ended_s: float, offset_s: float | None) -> float:
    """When a job arrived at another machine, by this machine's clock.

    Args:
        ended_s: when its last event came here.
        offset_s: the other machine's clock less this one's. If it is not known, the way there is taken to
            have been as long as the way back.
    """
    there_s = there.took_s or 0.0
    latest_s = max(attempt.began_s, ended_s - there_s)
    if offset_s is None or not there.clock_s:
        return (attempt.began_s + latest_s) / 2
    return min(max(attempt.began_s, there.clock_s - offset_s), latest_s)


def _client_was_slow(client_s: float, took_s: float) -> bool:
    """True if so much of the time passed while the client read that the rest says little of a machine."""
    return client_s > limits.ANSWER_CLIENT_SHARE * took_s
