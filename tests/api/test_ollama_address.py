"""The address without a token: all other checks hold there, and what changes the disk still needs it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, Site, engine, installed_models, serve, services, status
from fakes import FakePool
from msgspec.structs import replace
from odd_hosts import ODD_HOSTS

from fleetd.errors import ModelNotFound
from fleetd.models.names import is_path

JSON = {"Content-Type": "application/json"}
CHAT = '{"model": "smollm2-135m", "stream": false, "messages": [{"role": "user", "content": "x"}]}'
REF = '{"model": "smollm2-135m"}'


@pytest.fixture
async def tokenless(runner: FakeRunner) -> AsyncIterator[Site]:
    async with serve(services(runner), needs_token=False) as made:
        yield made


async def ask(
    site: Site, headers: dict[str, str], path: str = "/api/chat", data: str = CHAT, method: str = "POST"
) -> tuple[int, Any]:
    async with aiohttp.ClientSession(site.url) as session:
        async with session.request(method, path, data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, text


async def test_no_token_is_needed_and_any_is_taken(tokenless: Site, runner: FakeRunner) -> None:
    openai = '{"messages": [{"role": "user", "content": "x"}]}'
    for given in ({}, {"Authorization": "Bearer ollama"}, {"Authorization": f"Bearer {TOKEN}"}):
        assert (await ask(tokenless, {**JSON, **given}))[0] == 200
        assert (await ask(tokenless, {**JSON, **given}, "/v1/chat/completions", openai))[0] == 200
    assert len(runner.jobs) == 6


@pytest.mark.parametrize("host", ODD_HOSTS)
async def test_dns_rebinding_host_is_refused(tokenless: Site, runner: FakeRunner, host: str) -> None:
    assert (await ask(tokenless, {**JSON, "Host": host.format(port=tokenless.port)}))[0] == 403
    assert runner.jobs == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_web_pages_are_refused(tokenless: Site, runner: FakeRunner, headers: dict[str, str]) -> None:
    status, text = await ask(tokenless, {**JSON, **headers})
    assert status == 403
    assert '"error"' in text
    assert runner.jobs == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_forms_are_refused(tokenless: Site, runner: FakeRunner, kind: str) -> None:
    assert (await ask(tokenless, {"Content-Type": kind}))[0] == 415
    assert runner.jobs == []


@pytest.mark.parametrize(
    ("page", "status"),
    [({}, 200), ({"Origin": "https://evil.example"}, 403), ({"Sec-Fetch-Site": "same-origin"}, 415)],
)
async def test_a_program_may_leave_the_content_type_out_and_a_page_may_not(
    tokenless: Site, page: dict[str, str], status: int
) -> None:
    async with aiohttp.ClientSession(tokenless.url, skip_auto_headers=["Content-Type"]) as session:
        async with session.post("/api/chat", data=CHAT.encode(), headers=page) as answer:
            assert answer.status == status


async def test_who_asks_for_what_is_told_to_none_without_the_token(tokenless: Site) -> None:
    """Metrics have a series per model, and call one by the path of its folder."""
    for method in ("GET", "HEAD"):
        assert (await ask(tokenless, {}, "/metrics", "", method))[0] == 401
    assert (await ask(tokenless, tokenless.auth, "/metrics", "", "GET"))[0] == 200


async def test_health_names_no_model_without_the_token(runner: FakeRunner) -> None:
    loading = [engine(model="/home/one/secret", state="loading")]
    given = services(runner, status=lambda: status(engines=loading))
    async with serve(given, needs_token=False) as tokenless, serve(given) as site:
        assert "secret" not in (await ask(tokenless, {}, "/health", "", "GET"))[1]
        assert "secret" in (await ask(site, site.auth, "/health", "", "GET"))[1]


async def test_control_is_not_served(tokenless: Site) -> None:
    assert (await ask(tokenless, JSON, "/fleet/v1/status", "", "GET"))[0] == 404
    assert (await ask(tokenless, JSON, "/fleet/v1/models/remove", REF))[0] == 404


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/pull"), ("DELETE", "/api/delete")])
async def test_what_changes_the_disk_needs_the_token(runner: FakeRunner, method: str, path: str) -> None:
    models = installed_models()
    async with serve(services(runner, models=models), needs_token=False) as site:
        assert (await ask(site, JSON, path, REF, method))[0] == 401
        assert (await ask(site, {**JSON, "Authorization": "Bearer ollama"}, path, REF, method))[0] == 401
        assert models.removed == []
        assert not models.pull_ended.is_set()
        assert (await ask(site, {**JSON, **site.auth}, path, REF, method))[0] == 200
    async with serve(services(runner, token="")) as site:
        assert (await ask(site, JSON, path, REF, method))[0] == 403


async def test_an_address_with_v1_too_much_is_told(tokenless: Site) -> None:
    status, text = await ask(tokenless, JSON, "/v1/api/chat")
    assert status == 404
    assert "It is /api/chat: the base URL has to be without /v1." in text


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/create"), ("HEAD", "/api/blobs/sha256:1")])
async def test_what_is_not_served_is_refused_by_name(tokenless: Site, method: str, path: str) -> None:
    assert (await ask(tokenless, JSON, path, "{}", method))[0] == 501


async def test_keep_alive_reaches_a_model_whose_folder_is_gone() -> None:
    pool = FakePool(loaded=["gone"])
    async with serve(services(pool=pool)) as site, site.client() as session:
        body = {"model": "gone", "prompt": "", "keep_alive": 0}
        async with session.post("/api/generate", json=body) as answer:
            assert answer.status == 200
            assert (await answer.json())["done_reason"] == "unload"
    assert pool.kept == {"gone": 0}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_model_that_no_machine_has_cannot_be_unloaded(tokenless: Site, path: str) -> None:
    status, text = await ask(tokenless, JSON, path, '{"model": "nobody-knows", "keep_alive": 0}')
    assert status == 404
    assert "nobody-knows" in text


@pytest.mark.parametrize("given", [-1, 1e308, "999999999999999h"])
async def test_a_model_that_stays_longer_than_calendars_go_is_listed_as_staying(given: float | str) -> None:
    pool, loaded = FakePool(loaded=[MODEL]), status(engines=[engine()])
    async with serve(services(pool=pool, status=lambda: loaded)) as site, site.client() as session:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "keep_alive": given}
        async with session.post("/api/chat", json=body) as answer:
            assert answer.status == 200
        async with session.get("/api/ps") as answer:
            (running,) = (await answer.json())["models"]
    assert running["expires_at"] > "2100"


# Also in disguise: as of an organisation on the hub, or of the name that Claude Code lists.
PATHS = ["{0}", "~{0}", "hf.co/{0}", "huggingface.co/{0}", "hf.co/huggingface.co/{0}", "claude-fleet-{0}"]


def bodies_of(model: str) -> list[tuple[str, str, Any]]:
    said = {"role": "user", "content": "x"}
    return [
        ("POST", "/api/chat", {"model": model, "messages": [said], "stream": False}),
        ("POST", "/api/chat", {"model": model, "messages": [], "keep_alive": 0}),
        ("POST", "/api/generate", {"model": model, "prompt": "x", "stream": False}),
        ("POST", "/api/generate", {"model": model, "keep_alive": 0}),
        ("POST", "/api/show", {"model": model}),
        ("POST", "/v1/chat/completions", {"model": model, "messages": [said]}),
        ("POST", "/v1/completions", {"model": model, "prompt": "x"}),
        ("POST", "/v1/messages", {"model": model, "messages": [said], "max_tokens": 1}),
        ("POST", "/v1/messages/count_tokens", {"model": model, "messages": [said]}),
        ("POST", "/v1/responses", {"model": model, "input": "x"}),
        ("POST", "/v1/responses/input_tokens", {"model": model, "input": "x"}),
        ("GET", f"/v1/models/{quote(model, safe='')}", None),
    ]


class LookedUp:
    """A store that remembers what it was asked for; nothing is there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def resolve(self, ref: str) -> Any:
        self.asked.append(ref)
        raise ModelNotFound(f"There is no folder {ref}.", param="model")

    in_part = resolve

    def installed(self) -> list[Any]:
        return []

    answerable = installed

    async def pull(self, ref: str) -> AsyncIterator[Any]:
        raise AssertionError(ref)
        yield


@pytest.mark.parametrize(("token", "status"), [(TOKEN, 401), ("", 403)], ids=["a token", "turned off"])
async def test_attack_no_path_is_looked_at_without_the_token(tmp_path: Path, token: str, status: int) -> None:
    store = LookedUp()
    given = replace(services(models=store), token=token)
    async with serve(given, needs_token=False) as site:
        for form in PATHS:
            for method, path, body in bodies_of(form.format(tmp_path)):
                got = await ask(site, JSON, path, json.dumps(body) if body else "", method)
                # What only looks like a path stays the name of nothing.
                assert got[0] == status or form[0] not in "{~", (path, got)
    assert not [ref for ref in store.asked if is_path(ref)]
    jobs = given.runner.jobs  # type: ignore[attr-defined]
    assert not [job for job in jobs if is_path(given.names.here(job.model))]


async def test_with_the_token_a_path_is_a_models_name_there_too(tmp_path: Path) -> None:
    store = LookedUp()
    given = services(models=store)
    async with serve(given, needs_token=False) as site:
        for method, path, body in bodies_of(str(tmp_path)):
            sent = json.dumps(body) if body else ""
            assert (await ask(site, {**JSON, **site.auth}, path, sent, method))[0] in (200, 404), path
    assert set(store.asked) == {str(tmp_path)}
    assert {job.model for job in given.runner.jobs} == {str(tmp_path)}  # type: ignore[attr-defined]
