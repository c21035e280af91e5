"""/fleet/v1/peers, pairing and unpairing on the Unix socket, as fleetctl uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from api_fakes import FakeFleet, frames, serve, serve_unix, services

from fleetd import errors, limits
from fleetd.api.http.disabled_fleet import DisabledFleet
from fleetd.api.routes import FLEET
from fleetd.control.fleet_view import FleetView
from fleetd.control.pairing_events import CodeShown, Meeting, Paired, Searching, WrongCode

CODE = CodeShown("42-lusab-babad", 300.0, 3, "mini", 8115, ["192.168.1.7"])
MEETING = Meeting("k3f9a2bxxxxxx", "k3f9a2b", "studio", "babad-lusab")
PAIRED = Paired("k3f9a2bxxxxxx", "k3f9a2b", "studio", True, ["mini", "studio"])
ANSWER = {"node_id": "k3f9a2bxxxxxx", "admit": True, "sees_prompts": True}
JOIN = {"code": "42-lusab-babad", "sees_prompts": False}
PROMPTS = {"peer": "studio", "allowed": True, "fleet": False}
POSTS: dict[str, dict[str, Any]] = {
    "pair": {},
    "pair/answer": ANSWER,
    "join": JOIN,
    "unpair": {"peer": "studio"},
    "peers/prompts": PROMPTS,
}


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
async def session(fleet: FakeFleet, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with serve_unix(services(fleet=fleet), tmp_path / "s") as site, site.client(headers={}) as made:
        yield made


async def post(session: aiohttp.ClientSession, path: str, body: Any, expected: int = 200) -> Any:
    async with session.post(f"/fleet/v1/{path}", json=body) as response:
        assert response.status == expected
        return await response.json()


async def events(session: aiohttp.ClientSession, path: str, body: Any) -> list[dict[str, Any]]:
    async with session.post(f"/fleet/v1/{path}", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return [json.loads(frame) for frame in frames(await response.text())]


async def test_the_view_is_passed_on_as_it_is(session: aiohttp.ClientSession, fleet: FakeFleet) -> None:
    async with session.get("/fleet/v1/peers") as response:
        assert msgspec.json.decode(await response.read(), type=FleetView) == fleet.fleet
    async with session.get("/fleet/v1/diagnose") as response:
        assert await response.json() == msgspec.to_builtins(await fleet.diagnose())


async def test_pairing_is_told_as_it_happens(session: aiohttp.ClientSession, fleet: FakeFleet) -> None:
    fleet.steps = [CODE, WrongCode(2), MEETING, PAIRED]
    told = await events(session, "pair", {})
    assert [event["type"] for event in told] == ["code", "wrong_code", "meeting", "paired"]
    assert told[0]["code"] == CODE.code
    assert told[1]["tries_left"] == 2
    assert told[2]["phrase"] == MEETING.phrase
    assert told[3]["members"] == PAIRED.members


async def test_pairing_that_fails_ends_with_the_reason(
    session: aiohttp.ClientSession, fleet: FakeFleet
) -> None:
    fleet.steps = [CODE, errors.PairingClosed("Three wrong codes.", hint="Start again.")]
    *_, last = await events(session, "pair", {})
    assert last["error"] == {
        "code": "pairing_closed",
        "hint": "Start again.",
        "message": "Three wrong codes. Start again.",
        "param": None,
        "type": "permission_error",
    }


async def test_an_open_window_is_heard_of_and_leaving_closes_it(
    session: aiohttp.ClientSession, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.05)
    fleet.steps = [CODE, asyncio.Event()]
    async with session.post("/fleet/v1/pair", json={}) as response:
        await response.content.readuntil(b"lusab")
        await response.content.readuntil(b": keepalive")
        await response.content.readuntil(b": keepalive")
        assert not fleet.closed.is_set()
        response.close()
    async with asyncio.timeout(60):
        await fleet.closed.wait()


async def test_the_answer_reaches_the_machine_that_waits(
    session: aiohttp.ClientSession, fleet: FakeFleet
) -> None:
    assert (await post(session, "pair/answer", ANSWER, 403))["error"]["code"] == "pairing_closed"
    assert fleet.answered == []
    fleet.waiting = "k3f9a2bxxxxxx"
    assert await post(session, "pair/answer", ANSWER) == {"ok": True}
    assert await post(session, "pair/answer", {**ANSWER, "admit": False, "sees_prompts": False})
    assert fleet.answered == [("k3f9a2bxxxxxx", True, True), ("k3f9a2bxxxxxx", False, False)]


async def test_joining_says_what_was_asked(session: aiohttp.ClientSession, fleet: FakeFleet) -> None:
    fleet.steps = [Searching("42"), MEETING, PAIRED]
    told = await events(session, "join", JOIN)
    assert [event["type"] for event in told] == ["searching", "meeting", "paired"]
    await events(session, "join", {**JOIN, "host": "10.0.0.7:9000", "sees_prompts": True})
    assert fleet.joined == [("42-lusab-babad", None, False), ("42-lusab-babad", "10.0.0.7:9000", True)]


async def test_unpair_and_prompts(session: aiohttp.ClientSession, fleet: FakeFleet) -> None:
    told = await post(session, "unpair", {"peer": "studio"})
    assert (told["name"], told["told"], told["pending"]) == ("studio", ["air"], ["pro"])
    kept = await post(session, "unpair", {"peer": "studio", "keep": ["air"]})
    assert kept["kept"] == ["air"]
    missing = await post(session, "unpair", {"peer": "studoi"}, 404)
    assert missing["error"]["hint"] == "The nearest is 'studio'."
    for allowed, all_of_it in ((True, False), (False, True)):
        said = {**PROMPTS, "allowed": allowed, "fleet": all_of_it}
        assert (await post(session, "peers/prompts", said))["sees_prompts"] is allowed
    assert fleet.prompts == [("studio", True, False), ("studio", False, True)]


@pytest.mark.parametrize(
    ("path", "field", "odd"),
    [
        *((path, field, None) for path, body in POSTS.items() for field in body),
        *((path, field, []) for path, body in POSTS.items() for field in body),
        *((path, field, "") for path, field in (("join", "code"), ("join", "host"), ("unpair", "peer"))),
        ("pair/answer", "sees_prompts", 1),
        ("join", "sees_prompts", "yes"),
    ],
)
async def test_odd_values_are_refused_and_change_nothing(
    session: aiohttp.ClientSession, fleet: FakeFleet, path: str, field: str, odd: Any
) -> None:
    refused = await post(session, path, {**POSTS[path], field: odd}, 400)
    assert refused["error"]["param"] == field
    assert (fleet.answered, fleet.joined, fleet.prompts) == ([], [], [])


@pytest.mark.parametrize("path", ["pair/answer", "join"])
async def test_who_sees_prompts_is_never_decided_by_a_missing_or_misspelt_field(
    session: aiohttp.ClientSession, fleet: FakeFleet, path: str
) -> None:
    fleet.waiting = "k3f9a2bxxxxxx"
    missing = {name: value for name, value in POSTS[path].items() if name != "sees_prompts"}
    assert (await post(session, path, missing, 400))["error"]["param"] == "sees_prompts"
    await post(session, path, {**missing, "see_prompts": True}, 400)
    await post(session, path, {**POSTS[path], "see_prompts": True}, 400)
    assert (fleet.answered, fleet.joined) == ([], [])


@pytest.mark.parametrize(("over", "expected"), [(0, 404), (1, 400)])
async def test_text_at_its_bound_and_past_it(
    session: aiohttp.ClientSession, over: int, expected: int
) -> None:
    await post(session, "unpair", {"peer": "x" * (limits.CONTROL_TEXT_CHARS + over)}, expected)


@pytest.mark.parametrize(
    ("method", "path"), [(route.method, route.path) for route in FLEET if not route.open]
)
async def test_a_stranger_with_the_token_cannot_control_the_fleet(
    fleet: FakeFleet, method: str, path: str
) -> None:
    async with serve(services(fleet=fleet)) as site, site.client() as tcp:
        async with tcp.request(method, path, json={}) as response:
            assert response.status == 404
    assert not fleet.closed.is_set()


@pytest.mark.parametrize("path", POSTS)
async def test_a_daemon_without_a_fleet_says_so(tmp_path: Path, path: str) -> None:
    given = services()
    assert isinstance(given.fleet, DisabledFleet)
    async with serve_unix(given, tmp_path / "s") as site, site.client(headers={}) as session:
        refused = await post(session, path, POSTS[path], 403)
        assert "fleet.enabled" in refused["error"]["message"]
        async with session.get("/fleet/v1/peers") as response:
            assert (await response.json())["enabled"] is False
        async with session.get("/fleet/v1/diagnose") as response:
            assert await response.json() == {}
