"""The routes of models with `on`: another machine does it, as this one would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_fakes import MODEL, FakeFleet, frames, serve_unix, services
from fakes import FakePool

from fleetd.api.control.daemon import shown
from fleetd.api.http.disabled_fleet import DisabledFleet
from fleetd.control.model_change import VERBS, ModelProgress, Verb
from fleetd.control.model_listing import FoundModel, FoundModels, InstalledModel, ModelListing
from fleetd.engine.protocol import Loading
from fleetd.errors import Forbidden, PeerLost

OFF = Forbidden(
    "studio: It refuses to be managed by other machines: fleet.manage is off there.", hint="There."
)


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
async def session(fleet: FakeFleet, pool: FakePool, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    given = services(fleet=fleet, pool=pool)
    async with serve_unix(given, tmp_path / "s") as site, site.client(headers={}) as made:
        yield made


async def post(session: aiohttp.ClientSession, verb: str, expected: int = 200, **body: Any) -> Any:
    async with session.post(f"/fleet/v1/models/{verb}", json={"model": MODEL, **body}) as response:
        assert response.status == expected
        return await response.json()


async def events(session: aiohttp.ClientSession, verb: str, **body: Any) -> list[dict[str, Any]]:
    async with session.post(f"/fleet/v1/models/{verb}", json={"model": MODEL, **body}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return [json.loads(frame) for frame in frames(await response.text())]


@pytest.mark.parametrize("verb", VERBS)
async def test_another_machine_does_what_this_one_would(
    session: aiohttp.ClientSession, fleet: FakeFleet, pool: FakePool, verb: Verb
) -> None:
    fleet.manage_steps = [ModelProgress("w", 1, 2, "reading")]
    assert await events(session, verb, on="studio", stream=True) == [
        {"file": "w", "done_bytes": 1, "total_bytes": 2, "stage": "reading"},
        {"done": True, "name": MODEL},
    ]
    if verb != "pull":
        assert await post(session, verb, on="studio") == {"ok": True}
    assert set(fleet.managed) == {("studio", verb, MODEL)}
    assert pool.loaded == []


async def test_this_machine_may_be_named_and_tells_how_far_its_own_load_is(
    session: aiohttp.ClientSession, fleet: FakeFleet, pool: FakePool
) -> None:
    pool.load_steps = [Loading("reading", 1, 2)]
    assert await events(session, "load", on="mini", stream=True) == [
        {"file": "", "done_bytes": 1, "total_bytes": 2, "stage": "reading"},
        {"done": True, "name": MODEL},
    ]
    assert (fleet.managed, pool.loaded) == ([], [MODEL])


async def test_a_refusal_of_the_other_machine_is_the_answer(
    session: aiohttp.ClientSession, fleet: FakeFleet
) -> None:
    fleet.manage_steps, fleet.listing = [OFF], OFF
    refused = await post(session, "load", 403, on="studio")
    assert (refused["error"]["code"], refused["error"]["hint"]) == ("forbidden", "There.")
    assert "fleet.manage" in refused["error"]["message"]
    *_, last = await events(session, "pull", on="studio")
    assert last["error"]["code"] == "forbidden"
    async with session.get("/fleet/v1/models?on=studio") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden")


async def test_a_machine_that_leaves_in_the_middle_ends_the_stream_with_that(
    session: aiohttp.ClientSession, fleet: FakeFleet
) -> None:
    fleet.manage_steps = [ModelProgress("w", 1, 2, "copying"), PeerLost("studio: It went away.")]
    first, last = await events(session, "pull", on="studio")
    assert (first["stage"], last["error"]["code"]) == ("copying", "peer_lost")


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_ends_it_on_the_other_machine(
    session: aiohttp.ClientSession, fleet: FakeFleet, stream: bool
) -> None:
    fleet.manage_steps = [asyncio.Event()]
    asking = asyncio.create_task(post(session, "load", on="studio", stream=stream))
    await fleet.begun.wait()
    asking.cancel()
    async with asyncio.timeout(60):
        await fleet.closed.wait()


async def test_unknown_machines_and_several_are_refused(
    session: aiohttp.ClientSession, fleet: FakeFleet
) -> None:
    unknown = await post(session, "load", 404, on="kitchen")
    assert unknown["error"]["code"] == "not_found"
    several = await post(session, "load", 400, on="studio,kitchen")
    assert several["error"]["param"] == "on"
    assert "one machine" in several["error"]["message"]
    assert (await post(session, "load", 400, on="x" * 400))["error"]["param"] == "on"
    async with session.get("/fleet/v1/models?on=a,b") as response:
        assert response.status == 400
    assert fleet.managed == []


async def test_without_a_fleet_no_other_machine_is_managed(tmp_path: Path) -> None:
    async with serve_unix(services(fleet=DisabledFleet()), tmp_path / "s") as site:
        async with site.client(headers={}) as session:
            assert (await post(session, "load", 403, on="studio"))["error"]["code"] == "not_paired"
            async with session.get("/fleet/v1/models?on=studio") as response:
                assert response.status == 403


async def test_lists_and_searches_of_another_machine_are_its_own(
    session: aiohttp.ClientSession, fleet: FakeFleet
) -> None:
    fleet.listing = ModelListing(installed=[InstalledModel("theirs", pinned=True)])
    fleet.found = FoundModels("", [FoundModel("org/x")])
    async with session.get("/fleet/v1/models?on=studio") as response:
        (theirs,) = (await response.json())["installed"]
        assert (theirs["name"], theirs["pinned"]) == ("theirs", True)
    async with session.get("/fleet/v1/models/search?words=a%20model&on=studio") as response:
        found = await response.json()
        assert (found["words"], found["models"][0]["hub_id"]) == ("a model", "org/x")


async def test_what_others_are_told_of_models_here_says_nothing_of_the_disk() -> None:
    given = services()
    told = await shown(given, "")
    assert isinstance(told, ModelListing)
    assert [model.name for model in told.installed] == [MODEL, "mlx-community/Qwen3-0.6B-4bit"]
    assert {model.path for model in told.installed} == {""}
    assert (told.importable, told.unlisted) == ([], [])
    assert told.catalog
