"""Addresses that are nearly right, and what a wrong one is told."""

from __future__ import annotations

import aiohttp
import pytest
from api_fakes import MODEL, TOKEN, Site

from fleetd.api.http.served_paths import advice

SERVED = ("/v1/chat/completions", "/v1/messages", "/v1/models", "/health")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/messages", "It is /v1/messages: the base URL has to end in /v1."),
        ("/v1/v1/messages", "It is /v1/messages: the base URL has one /v1 too many."),
        ("/v1//chat/completions", "It is /v1/chat/completions: the base URL ends in a slash too many."),
        ("/openai/v1/messages", "It is /v1/messages: the base URL has to be without /openai."),
        (
            "/v1/chat/completions/chat/completions",
            "It is /v1/chat/completions: the base URL has to have /v1 in place of /v1/chat/completions.",
        ),
        (
            "/openai/deployments/gpt-5/chat/completions",
            "It is /v1/chat/completions: the base URL has to have /v1 in place of /openai/deployments/gpt-5.",
        ),
        (
            "/v1/embeddings",
            "Served are /v1/chat/completions, /v1/messages, /v1/models; /openapi.json lists all.",
        ),
    ],
)
def test_advice(path: str, hint: str) -> None:
    assert advice(path, SERVED) == hint


@pytest.mark.parametrize("body", [None, b"x"])
async def test_a_wrong_address_is_named_before_the_body_is_looked_at(
    client: aiohttp.ClientSession, body: bytes | None
) -> None:
    async with client.post("/chat/completions", data=body) as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert error["message"] == (
        "There is nothing at POST /chat/completions. "
        "It is /v1/chat/completions: the base URL has to end in /v1."
    )


async def test_a_wrong_method_is_told_the_right_one(client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/messages") as response:
        assert response.status == 405
        error = (await response.json())["error"]
    assert error["message"] == "GET is not allowed at /v1/messages. Use POST."


@pytest.mark.parametrize(
    ("method", "path", "keys"),
    [
        ("GET", "/api/chat", {"error", "code"}),
        ("GET", "/api/nothing", {"error", "code"}),
        ("GET", "/v1/messages", {"type", "error"}),
        ("POST", "/v1/messages/batches", {"type", "error"}),
        ("GET", "/v1/chat/completions", {"error"}),
        ("GET", "/nothing", {"error"}),
    ],
)
async def test_a_wrong_address_or_method_is_told_as_clients_of_the_address_read_it(
    client: aiohttp.ClientSession, method: str, path: str, keys: set[str]
) -> None:
    async with client.request(method, path) as response:
        assert set(await response.json()) == keys


async def test_trailing_slashes_and_head(client: aiohttp.ClientSession) -> None:
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path in ("/v1/chat/completions/", "/v1/messages/"):
        async with client.post(path, json=ask) as response:
            assert response.status == 200
    async with client.get(f"/v1/models/{MODEL}/") as response:
        assert (await response.json())["id"] == MODEL
    for path in ("/", "/v1/models", "/health"):
        async with client.head(path) as response:
            assert (response.status, await response.read()) == (200, b"")


async def test_a_key_in_any_of_three_headers(site: Site) -> None:
    for headers in ({"api-key": TOKEN}, {"x-api-key": TOKEN}, {"Authorization": f"Bearer {TOKEN}"}):
        async with site.client(headers=headers) as session, session.get("/v1/models") as response:
            assert response.status == 200
    async with site.client(headers={"api-key": "wrong"}) as session, session.get("/v1/models") as response:
        assert response.status == 401
