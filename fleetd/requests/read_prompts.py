"""The step that notes which machine has read how much of a prompt, for the requests that go on from there.

A prompt counts as read from the first token of its answer on: forks of it need not wait for the last one.
Before that it counts as being read: the same prompt goes to the same machine, whose engine reads it once. One
that is cancelled, perhaps to be sent again after its client's time-out, counts as far as it was read, since
the engine keeps that.
"""

from __future__ import annotations

import asyncio

from fleetd.engine.protocol import Event, Loading
from fleetd.errors import EngineDied
from fleetd.requests.members.members import Members
from fleetd.requests.pipeline import ANSWER, PipelineStep
from fleetd.requests.request import Request


class ReadPrompts(PipelineStep):
    events = ANSWER

    def __init__(self, members: Members) -> None:
        self._members = members

    def prepare(self, request: Request) -> None:
        self._members.reads(request.id, request.placement.node_id, request.model.name, request.job)

    def on_event(self, request: Request, event: Loading | Event) -> Loading | Event | None:
        if not request.answering:
            self._members.reads_no_more(request.id)
            self._note(request, 1.0)
        return event

    def closed(self, request: Request) -> asyncio.Task[None] | None:
        self._members.reads_no_more(request.id)
        if isinstance(request.attempt.error, EngineDied):
            self._members.lost_prompts(request.placement.node_id, request.model.name)
        elif not request.answering and request.attempt.error is None:
            self._note(request, request.attempt.read_share)
        return None

    def _note(self, request: Request, share: float) -> None:
        if share > 0:
            self._members.read(request.placement.node_id, request.model.name, request.job, share)
