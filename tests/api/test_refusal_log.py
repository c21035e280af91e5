"""Refused requests in the log: enough to mend a client that shows nothing, and nothing of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import Site
from structlog.testing import capture_logs

from fleetd import limits

CHAT = "/v1/chat/completions"
CANARY = "canary-7c1f0e"


def refusals(logs: Any) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == "http.refused"]


async def test_a_refused_request_is_logged_with_its_client_and_address(site: Site) -> None:
    with capture_logs() as logs:
        async with site.client(headers={**site.auth, "User-Agent": "Agent/1.0"}) as session:
            await session.post("/chat/completions", json={"messages": [CANARY]})
            bad = {"messages": [{"role": "user", "content": CANARY}], "temperature": CANARY, "stop": [CANARY]}
            await session.post(CHAT, json=bad)
            await session.post(CHAT, json=bad)
        async with site.client(headers={"Authorization": f"Bearer {CANARY}"}) as session:
            await session.get("/v1/models")
    first, second, third = refusals(logs)
    assert (first["client"], first["method"], first["path"]) == ("Agent/1.0", "POST", "/chat/completions")
    assert (first["status"], first["code"]) == (404, "not_found")
    assert (second["path"], second["code"], second["param"]) == (CHAT, "invalid_value", "temperature")
    assert third["status"] == 401
    assert CANARY not in str(logs)


async def test_a_flood_of_refusals_is_a_few_lines(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REFUSALS_LOGGED", 3)
    with capture_logs() as logs:
        async with site.client() as session:
            for n in range(6):
                await session.get(f"/{n}")
    assert len(refusals(logs)) == 3


async def test_the_same_is_told_again_after_a_while(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPEAT_LOG_S", 0.0)
    with capture_logs() as logs:
        async with site.client() as session:
            await session.get("/nothing")
            await session.get("/nothing")
    assert len(refusals(logs)) == 2
