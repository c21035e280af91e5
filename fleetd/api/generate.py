"""Runs the choices of one request and sends what comes back, streamed or whole. Knows no endpoint's shapes.

A streamed request waits ``limits.HEADERS_GRACE_S`` for a first event, so that an early refusal (unknown
model, prompt too long) gets its own status. After that the headers go out, and a failure is a frame. The
headers name the plan as it stands then; if the job moves to another machine later, a comment says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import quote

import msgspec
from aiohttp import web

from fleetd import limits
from fleetd.api import failures, smart_prefill_reports
from fleetd.api.choices import Choices
from fleetd.api.context import REQUEST_ID, SERVICES, is_gone, is_trusted
from fleetd.api.progress_comments import ProgressComments
from fleetd.api.sse import EventStream
from fleetd.compression.policy import SmartPrefillPolicy
from fleetd.control.smart_prefill_result import SmartPrefillResult
from fleetd.engine.protocol import Event, Generate, Loading
from fleetd.errors import FleetError
from fleetd.requests.job import Job, Origin, Planned


class Streamer(Protocol):
    def feed(self, index: int, event: Planned | Event) -> Sequence[msgspec.Struct]: ...
    def closing(self) -> Sequence[msgspec.Struct]: ...


class Collector(Protocol):
    def feed(self, index: int, event: Planned | Event) -> None: ...
    def whole(self) -> msgspec.Struct: ...


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``id`` is the answer's id, as clients see it. ``smart``: how the prompts are to be shortened.
    ``per_prompt``: choices that answer each of them.
    """

    id: str
    model: str
    route: str
    generates: Sequence[Generate]
    local_only: bool = False
    smart: SmartPrefillPolicy | None = None
    per_prompt: int = 1


def _choices(request: web.Request, work: GenerationRequest) -> Choices:
    runner = request.app[SERVICES].runner
    origin: Origin = "socket" if is_trusted(request) else "http"
    jobs = [
        Job(work.model, generate, origin, work.route, local_only=work.local_only, smart=work.smart)
        for generate in work.generates
    ]
    return Choices([partial(runner.run, job) for job in jobs])


_LOSS: Mapping[str, int] = {"exact": 0, "plan": 1, "lossy": 2}


class _Plans:
    """Where the choices of one request run. Several may run on several machines."""

    def __init__(self) -> None:
        self._latest: dict[int, Planned] = {}

    def feed(self, index: int, planned: Planned) -> bool:
        """True if it differs from what was known of this choice or, at first, of another one."""
        before = self._latest.get(index) or next(iter(self._latest.values()), None)
        self._latest[index] = planned
        return before is None or str(before) != str(planned)

    @property
    def known(self) -> bool:
        return bool(self._latest)

    @property
    def smart(self) -> SmartPrefillResult | None:
        return next((planned.smart for planned in self._latest.values() if planned.smart), None)

    def _told(self, per_prompt: int) -> list[SmartPrefillResult]:
        """What came of each prompt, as one of its choices has it."""
        found = {
            index // per_prompt: planned.smart
            for index, planned in self._latest.items()
            if planned.smart is not None
        }
        return list(found.values())

    def headers(self, work: GenerationRequest) -> Mapping[str, str]:
        found = list(self._latest.values())
        if not found:
            undecided = {"X-Fleet-Request": work.id, "X-Fleet-Plan": "undecided; nodes="}
            # What may yet be left out is not promised to be whole.
            return undecided | ({"X-Fleet-Exactness": "lossy"} if work.smart is not None else {})
        nodes = dict.fromkeys(node for planned in found for node in planned.nodes)
        kind = found[0].kind if len({planned.kind for planned in found}) == 1 else "mixed"
        return {
            "X-Fleet-Request": work.id,
            # A machine's name is whatever its owner typed; a header holds one line of ASCII.
            "X-Fleet-Plan": f"{kind}; nodes={','.join(quote(node, safe=' ') for node in nodes)}",
            "X-Fleet-Exactness": max((planned.exactness for planned in found), key=_LOSS.__getitem__),
            **smart_prefill_reports.headers(self._told(work.per_prompt)),
        }


async def whole(request: web.Request, work: GenerationRequest, collector: Collector) -> web.StreamResponse:
    """Answer with one JSON body when every choice has ended. Raises FleetError."""
    plans = _Plans()
    async with _choices(request, work) as choices:
        while (item := await choices.next(None)) is not None:
            index, event = item
            if isinstance(event, Planned):
                plans.feed(index, event)
            if not isinstance(event, Loading):
                collector.feed(index, event)
    body = msgspec.json.encode(collector.whole())
    return web.Response(body=body, content_type="application/json", headers=plans.headers(work))


async def stream(request: web.Request, work: GenerationRequest, streamer: Streamer) -> web.StreamResponse:
    """Answer with a stream of events. Raises FleetError only while the headers have not gone out."""
    async with _choices(request, work) as choices:
        plans = _Plans()
        first = await _early(choices, plans, streamer)
        talk = _Conversation(EventStream(request, plans.headers(work)), streamer, plans)
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


async def _early(choices: Choices, plans: _Plans, streamer: Streamer) -> Item:
    """The first event besides plans, if it comes within the grace.

    The plan itself is waited for longer: a header that names a machine has to name the right one.
    """
    began = time.monotonic()
    try:
        while True:
            grace_s = limits.HEADERS_GRACE_S if plans.known else limits.HEADERS_PLAN_S
            item = await choices.next(max(0.0, began + grace_s - time.monotonic()))
            if item is None:
                break
            index, event = item
            if not isinstance(event, Planned):
                return index, event
            plans.feed(index, event)
            streamer.feed(index, event)
    except TimeoutError:
        pass
    return None


class _Conversation:
    """One stream being sent: events become frames, and comments fill any silence."""

    def __init__(self, out: EventStream, streamer: Streamer, plans: _Plans) -> None:
        self.out = out
        # Those that the headers tell.
        self._plans = plans
        self._streamer = streamer
        self._progress = ProgressComments()
        self._spoke = 0.0
        self._told = plans.smart

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
            index, event = item
            if isinstance(event, Planned):
                self._streamer.feed(index, event)
                if event.smart is not None and event.smart != self._told:
                    # The headers are out.
                    self._told = event.smart
                    await self._say(f"smart prefill {smart_prefill_reports.sentence(event.smart)}")
                if self._plans.feed(index, event) or event.reason:
                    await self._say(f"plan {event}" + (f": {event.reason}" if event.reason else ""))
                continue
            if self._progress.feed(index, event) and time.monotonic() - self._spoke >= limits.SSE_PROGRESS_S:
                await self._comment()
            await self._chunks((index, event))
        for chunk in self._streamer.closing():
            await self.out.data(msgspec.json.encode(chunk))

    async def _comment(self) -> None:
        await self._say(self._progress.comment())

    async def _say(self, comment: str) -> None:
        await self.out.comment(" ".join(comment.split()))
        self._spoke = time.monotonic()

    async def _chunks(self, item: tuple[int, Loading | Event]) -> None:
        index, event = item
        if isinstance(event, Loading):
            return
        for chunk in self._streamer.feed(index, event):
            await self.out.data(msgspec.json.encode(chunk))
            self._spoke = time.monotonic()
