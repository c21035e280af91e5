"""Runs the choices of one request and sends what comes back, streamed or whole. Knows no endpoint's shapes.

A streamed request waits ``limits.HEADERS_GRACE_S`` for a first event, so that an early refusal (unknown
model, prompt too long) gets its own status. After that the headers go out, and a failure is a frame.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api import failures
from fleetd.api.choices import Choices
from fleetd.api.context import REQUEST_ID, SERVICES, is_gone, is_trusted
from fleetd.api.progress import Progress
from fleetd.api.sse import EventStream
from fleetd.engine.protocol import Event, Generate, Loading
from fleetd.errors import FleetError
from fleetd.jobs.job import Job


class Streamer(Protocol):
    def feed(self, index: int, event: Event) -> Sequence[msgspec.Struct]: ...
    def closing(self) -> Sequence[msgspec.Struct]: ...


class Collector(Protocol):
    def feed(self, index: int, event: Event) -> None: ...
    def whole(self) -> msgspec.Struct: ...


@dataclass(frozen=True, slots=True)
class Work:
    """``id`` is the answer's id, as clients see it."""

    id: str
    model: str
    route: str
    generates: Sequence[Generate]


def _choices(request: web.Request, work: Work) -> Choices:
    runner = request.app[SERVICES].runner
    origin: Literal["socket", "http"] = "socket" if is_trusted(request) else "http"
    jobs = [Job(work.model, generate, origin, work.route) for generate in work.generates]
    return Choices([partial(runner.run, job) for job in jobs])


def _headers(work: Work) -> Mapping[str, str]:
    return {"X-Fleet-Request": work.id, "X-Fleet-Plan": "local; nodes=this", "X-Fleet-Exactness": "exact"}


async def whole(request: web.Request, work: Work, collector: Collector) -> web.StreamResponse:
    """Answer with one JSON body when every choice has ended. Raises FleetError."""
    async with _choices(request, work) as choices:
        while (item := await choices.next(None)) is not None:
            index, event = item
            if not isinstance(event, Loading):
                collector.feed(index, event)
    body = msgspec.json.encode(collector.whole())
    return web.Response(body=body, content_type="application/json", headers=_headers(work))


async def stream(request: web.Request, work: Work, streamer: Streamer) -> web.StreamResponse:
    """Answer with a stream of events. Raises FleetError only while the headers have not gone out."""
    async with _choices(request, work) as choices:
        first = await _early(choices)
        talk = _Conversation(EventStream(request, _headers(work)), streamer)
        await talk.open(first)
        try:
            await talk.relay(first, choices)
        except FleetError as exc:
            await talk.out.fail(exc)
        except Exception as exc:  # the request's boundary, when its status is already out
            if isinstance(exc, ConnectionError) and is_gone(request):
                raise
            await talk.out.fail(failures.unexpected(exc, request[REQUEST_ID]))
        else:
            await talk.out.done()
    return talk.out.response


Item = tuple[int, Loading | Event] | None


async def _early(choices: Choices) -> Item:
    try:
        return await choices.next(limits.HEADERS_GRACE_S)
    except TimeoutError:
        return None


class _Conversation:
    """One stream being sent: events become frames, and comments fill any silence."""

    def __init__(self, out: EventStream, streamer: Streamer) -> None:
        self.out = out
        self._streamer = streamer
        self._progress = Progress()
        self._spoke = 0.0

    async def open(self, first: Item) -> None:
        if first is not None:
            self._progress.feed(*first)
        await self.out.start(self._progress.comment())
        self._spoke = time.monotonic()

    async def relay(self, first: Item, choices: Choices) -> None:
        if first is not None:
            await self._chunks(first)
        while True:
            try:
                item = await choices.next(max(0.0, self._spoke + limits.SSE_KEEPALIVE_S - time.monotonic()))
            except TimeoutError:
                await self._comment()
                continue
            if item is None:
                break
            if self._progress.feed(*item) and time.monotonic() - self._spoke >= limits.SSE_PROGRESS_S:
                await self._comment()
            await self._chunks(item)
        for chunk in self._streamer.closing():
            await self.out.data(msgspec.json.encode(chunk))

    async def _comment(self) -> None:
        await self.out.comment(self._progress.comment())
        self._spoke = time.monotonic()

    async def _chunks(self, item: tuple[int, Loading | Event]) -> None:
        index, event = item
        if isinstance(event, Loading):
            return
        for chunk in self._streamer.feed(index, event):
            await self.out.data(msgspec.json.encode(chunk))
            self._spoke = time.monotonic()
