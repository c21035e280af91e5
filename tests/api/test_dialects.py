"""A new dialect is a ``Dialect``, a handler and an entry in the table of routes: two are added here.

``LinesDialect`` writes a JSON object per line, numbered. ``EventsDialect`` writes server-sent events with
names and has no end marker. Both are defined here; the daemon has no code for them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from api_fakes import MODEL, FakeRunner, Site, Step, serve, services

from fleetd import errors
from fleetd.api.generation import generate
from fleetd.api.generation.streamer import Collector, Streamer
from fleetd.api.http.body import parse, read
from fleetd.api.http.dialect import Dialect, ServerSentEvents, StreamFormat
from fleetd.api.http.openapi import document
from fleetd.api.http.route_entry import Route
from fleetd.api.routes import ALL_ROUTES
from fleetd.engine import protocol as p
from fleetd.requests.job import Job, Planned


class AskBody(msgspec.Struct):
    text: str
    stream: bool = False


class Piece(msgspec.Struct):
    text: str
    kind: str = "piece"


class Last(msgspec.Struct):
    reason: str
    tokens: int
    kind: str = "last"


class Trouble(msgspec.Struct):
    code: str
    sentence: str
    kind: str = "trouble"


class Said(msgspec.Struct):
    text: str
    reason: str


class NumberedLines(StreamFormat):
    content_type = "application/x-ndjson"

    def __init__(self) -> None:
        self._number = 0

    def frame(self, item: object) -> bytes:
        self._number += 1
        return msgspec.json.encode([self._number, item]) + b"\n"

    def error(self, error: errors.FleetError) -> bytes:
        return self.frame(LINES.error(error))

    def end(self) -> bytes:
        return b"[0]\n"

    def schema(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"type": "array", "prefixItems": [{"type": "integer"}, {"anyOf": list(items)}]}


class LinesDialect(Dialect):
    error_type = Trouble

    def error(self, error: errors.FleetError) -> Trouble:
        return Trouble(error.code, error.message)

    def status(self, error: errors.FleetError) -> int:
        return 529 if isinstance(error, errors.Overloaded) else error.status

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {"request-id": request_id}

    def stream(self) -> StreamFormat:
        return NumberedLines()


class EventsDialect(LinesDialect):
    def stream(self) -> StreamFormat:
        return ServerSentEvents(self.error, event=lambda item: str(item.kind))  # type: ignore[attr-defined]


class Talk(Streamer, Collector):
    """Streamer and Collector of the new endpoint."""

    def __init__(self) -> None:
        self._text = ""
        self._reason = ""

    def feed(self, index: int, event: Planned | p.Event) -> list[msgspec.Struct]:
        match event:
            case p.Delta():
                self._text += event.text
                return [Piece(event.text)]
            case p.Finished():
                self._reason = event.reason
                return [Last(event.reason, event.usage.completion_tokens)]
            case _:
                return []

    def whole(self) -> Said:
        return Said(self._text, self._reason)


async def talk(request: web.Request) -> web.StreamResponse:
    ask = parse(await read(request), AskBody)
    work = generate.GenerationRequest(
        "talk-1", MODEL, "talk", [p.Generate(id="talk-1-0", prompt=p.TextPrompt(ask.text))]
    )
    answer = generate.stream if ask.stream else generate.whole
    return await answer(request, work, Talk())


LINES, EVENTS = LinesDialect(), EventsDialect()
ROUTES = (
    *ALL_ROUTES,
    Route("POST", "/talk/lines", talk, LINES, name="lines", body=AskBody, reply=Said, item=Piece),
    Route("POST", "/talk/events", talk, EVENTS, name="events", body=AskBody, reply=Said, item=Piece),
)
FRAMES = [
    {"text": "one ", "kind": "piece"},
    {"text": "two", "kind": "piece"},
    {"reason": "stop", "tokens": 2, "kind": "last"},
]


def two_words(job: Job) -> Iterable[Step]:
    name = job.request.id
    yield p.Accepted(name, 1)
    yield p.Delta(name, "one ")
    if "die" in str(job.request.prompt):
        yield errors.EngineDied("The engine died.")
    yield p.Delta(name, "two")
    yield p.Finished(name, "stop", p.Usage(1, 0, 2, 0))


def refusing(job: Job) -> Iterable[Step]:
    yield errors.Overloaded("The queue is full.", retry_after_s=2)


def sse(text: str) -> list[tuple[str, Any]]:
    """Name and object of each event; comments left out."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(services(FakeRunner(two_words)), ROUTES) as made:
        yield made


async def post(site: Site, path: str, **ask: Any) -> tuple[aiohttp.ClientResponse, str]:
    async with site.client() as session, session.post(path, json=ask) as response:
        return response, await response.text()


async def test_a_stream_has_the_frames_and_the_end_of_its_dialect(site: Site) -> None:
    response, text = await post(site, "/talk/lines", text="hi", stream=True)
    assert response.status == 200
    assert response.headers["Content-Type"] == "application/x-ndjson"
    assert response.headers["X-Fleet-Request"] == "talk-1"
    *lines, end = [json.loads(line) for line in text.splitlines()]
    assert lines == [[number, frame] for number, frame in enumerate(FRAMES, 1)]
    assert end == [0]


async def test_events_have_names_and_no_end_marker(site: Site) -> None:
    response, text = await post(site, "/talk/events", text="hi", stream=True)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert sse(text) == [(frame["kind"], frame) for frame in FRAMES]
    assert text.startswith(": keepalive ")


@pytest.mark.parametrize("path", ["/talk/lines", "/talk/events"])
async def test_a_whole_answer_and_the_headers_of_its_dialect(site: Site, path: str) -> None:
    response, text = await post(site, path, text="hi")
    assert json.loads(text) == {"text": "one two", "reason": "stop"}
    assert response.headers["request-id"].startswith("req-")
    assert "X-Request-Id" not in response.headers


async def test_an_error_in_a_stream_is_its_last_frame(site: Site) -> None:
    trouble = {"code": "engine_died", "sentence": "The engine died.", "kind": "trouble"}
    _, text = await post(site, "/talk/lines", text="die", stream=True)
    assert [json.loads(line) for line in text.splitlines()] == [[1, FRAMES[0]], [2, trouble]]
    _, text = await post(site, "/talk/events", text="die", stream=True)
    assert sse(text) == [("piece", FRAMES[0]), ("trouble", trouble)]


async def test_a_refusal_has_the_status_and_the_body_of_the_dialect() -> None:
    async with serve(services(FakeRunner(refusing)), ROUTES) as site:
        for stream in (False, True):
            response, text = await post(site, "/talk/lines", text="hi", stream=stream)
            assert (response.status, response.headers["Retry-After"]) == (529, "2")
            assert json.loads(text) == {
                "code": "overloaded",
                "sentence": "The queue is full.",
                "kind": "trouble",
            }


async def test_refusals_before_the_handler_are_in_the_dialect_too(site: Site) -> None:
    async with site.client(headers={}) as session:
        async with session.post("/talk/lines", json={"text": "hi"}) as response:
            assert response.status == 401
            assert (await response.json())["kind"] == "trouble"
    response, text = await post(site, "/talk/lines", txt="hi")
    assert (response.status, json.loads(text)["kind"]) == (400, "trouble")


async def test_other_addresses_keep_their_dialect(site: Site) -> None:
    for path in ("/v1/completions", "/talk/nowhere"):
        response, text = await post(site, path, text="hi")
        assert response.status in (400, 404)
        assert json.loads(text)["error"]["type"] == "invalid_request_error"
        assert "X-Request-Id" in response.headers


async def test_the_page_of_the_api_lists_the_new_route(site: Site) -> None:
    async with site.client() as session, session.get("/openapi.json") as response:
        served = await response.json()
    assert served == document(ROUTES, "0.1.0")
    operation = served["paths"]["/talk/lines"]["post"]
    responses = operation["responses"]
    trouble = {"$ref": "#/components/schemas/Trouble"}
    assert responses["401"]["content"]["application/json"]["schema"] == trouble
    assert set(responses["200"]["content"]) == {"application/json", "application/x-ndjson"}
    assert {"AskBody", "Piece", "Said", "Trouble"} <= set(served["components"]["schemas"])
