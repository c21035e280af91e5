"""Web pages, rebound names, forms, strangers: refused before the engine is asked."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from api_fakes import TOKEN, FakeMetrics, FakeRunner, Site, serve, serve_unix, services
from odd_hosts import ODD_HOSTS

from fleetd.api import auth
from fleetd.api.app import build_app

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]})
JSON = {"Content-Type": "application/json"}


async def ask(
    site: Site, headers: dict[str, str], *, path: str = CHAT, data: str = BODY, method: str = "POST"
) -> Any:
    """(status, error code) of a request with exactly these headers besides the host."""
    async with aiohttp.ClientSession(site.url) as session:
        async with session.request(method, path, data=data, headers=headers) as response:
            body = await response.json()
            return response.status, body.get("error", {}).get("code")


# ---- DNS rebinding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ODD_HOSTS)
async def test_dns_rebinding_host_is_refused(site: Site, runner: FakeRunner, host: str) -> None:
    given = host.format(port=site.port)
    status, _ = await ask(site, {**JSON, **site.auth, "Host": given})
    assert status == 403
    assert runner.jobs == []


@pytest.mark.parametrize("head", ["", "Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n", "Host:\r\n"])
async def test_no_host_two_hosts_and_an_empty_host_are_refused(
    site: Site, runner: FakeRunner, head: str
) -> None:
    reader, writer = await site.raw()
    fields = head.format(port=site.port) + f"Authorization: Bearer {TOKEN}\r\n"
    writer.write(f"GET /v1/models HTTP/1.1\r\n{fields}Connection: close\r\n\r\n".encode())
    async with asyncio.timeout(60):
        reply = await reader.read()
    assert reply.split()[1] in (b"403", b"400")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("port", [":{port}", ":9000", ""])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "[::1]"])
async def test_own_names_are_accepted_at_any_port(site: Site, host: str, port: str) -> None:
    """A tunnel, a container's port map and a proxy of this machine listen at ports of their own, or at 80."""
    status, _ = await ask(site, {**JSON, **site.auth, "Host": host + port.format(port=site.port)})
    assert status == 200


@pytest.mark.parametrize("host", ["localhost:9000", "localhost", "127.0.0.1:9000"])
async def test_a_page_has_to_be_of_the_very_host_and_port_that_it_asks(site: Site, host: str) -> None:
    asked = {**JSON, **site.auth, "Host": host}
    assert (await ask(site, {**asked, "Origin": f"http://{host}"}))[0] == 200
    for other in (site.url, "http://localhost:9001", f"https://{host}", "http://evil.example", "null"):
        assert await ask(site, {**asked, "Origin": other}) == (403, "forbidden")


async def test_a_listed_host_is_accepted(runner: FakeRunner) -> None:
    async with serve(services(runner, hosts=frozenset({"mac.tail.net:8114"}))) as site:
        assert (await ask(site, {**JSON, **site.auth, "Host": "mac.tail.net:8114"}))[0] == 200
        assert (await ask(site, {**JSON, **site.auth, "Host": "mac.tail.net"}))[0] == 403


# ---- Pages of other origins ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost", "http://127.0.0.1:1", "file://", ""]
)
@pytest.mark.parametrize("token", [True, False])
async def test_cross_origin_page_is_refused(site: Site, runner: FakeRunner, origin: str, token: bool) -> None:
    headers = {**JSON, **(site.auth if token else {}), "Origin": origin}
    assert await ask(site, headers) == (403, "forbidden")
    assert runner.jobs == []


@pytest.mark.parametrize("value", ["cross-site", "same-site", "Same-Origin", "x"])
async def test_cross_site_fetch_is_refused(site: Site, runner: FakeRunner, value: str) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health/live")):
        headers = {**JSON, **site.auth, "Sec-Fetch-Site": value}
        assert await ask(site, headers, method=method, path=path) == (403, "forbidden")
    assert runner.jobs == []


@pytest.mark.parametrize("value", ["same-origin", "none"])
async def test_own_page_and_typed_address_are_accepted(site: Site, value: str) -> None:
    headers = {**JSON, **site.auth, "Sec-Fetch-Site": value, "Origin": site.url}
    assert (await ask(site, headers))[0] == 200


async def test_form_post_is_refused(site: Site, runner: FakeRunner) -> None:
    for kind in (
        "application/x-www-form-urlencoded",
        "text/plain",
        "multipart/form-data; boundary=x",
        "text/json",
    ):
        assert await ask(site, {**site.auth, "Content-Type": kind}) == (415, "unsupported_media_type")
    assert runner.jobs == []


async def test_form_post_without_a_token_check_is_refused(runner: FakeRunner) -> None:
    async with serve(services(runner, token="")) as site:
        assert (await ask(site, {"Content-Type": "text/plain"}))[0] == 415
        assert (await ask(site, {**JSON, "Origin": "https://evil.example"}))[0] == 403
        assert runner.jobs == []
        assert (await ask(site, JSON))[0] == 200


@pytest.mark.parametrize(
    ("page", "status"),
    [({}, 200), ({"Origin": "https://evil.example"}, 403), ({"Sec-Fetch-Site": "same-origin"}, 415)],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/api/chat"])
async def test_a_program_may_send_the_type_that_says_nothing_and_a_page_may_not(
    site: Site, path: str, page: dict[str, str], status: int
) -> None:
    body = {"model": "smollm2-135m", "stream": False, "messages": [{"role": "user", "content": "x"}]}
    if path == "/v1/responses":
        body = {"input": "x"}
    headers = {**site.auth, "Content-Type": "application/octet-stream", **page}
    async with aiohttp.ClientSession(site.url) as session:
        async with session.post(path, data=json.dumps(body), headers=headers) as answer:
            assert answer.status == status


async def test_image_and_script_tags_get_nothing(site: Site) -> None:
    """No Origin, no token: what a tag on a foreign page sends in a browser without Sec-Fetch-Site."""
    for path in ("/v1/models", "/metrics", "/health", "/openapi.json", "/fleet/v1/status"):
        assert await ask(site, {}, method="GET", path=path) == (401, "invalid_api_key")


async def test_no_cors_headers_unless_configured(site: Site) -> None:
    async with site.client() as session:
        async with session.options(CHAT, headers={"Origin": "https://evil.example"}) as response:
            assert response.status == 403
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
        async with session.get("/v1/models", headers={"Origin": site.url}) as response:
            assert response.status == 200
            assert not [name for name in response.headers if name.lower().startswith("access-control")]


async def test_a_listed_origin_may_call_and_only_with_the_token(runner: FakeRunner) -> None:
    page = "https://chat.example"
    async with serve(services(runner, origins=frozenset({page}))) as site:
        async with aiohttp.ClientSession(site.url) as session:
            ask_first = {
                "Origin": page,
                "Access-Control-Request-Method": "POST",
                "Sec-Fetch-Site": "cross-site",
            }
            async with session.options(CHAT, headers=ask_first) as response:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Origin"] == page
                assert response.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
            asked = "authorization,content-type,x-stainless-os,anthropic-version"
            ask_more = {**ask_first, "Access-Control-Request-Headers": asked}
            async with session.options(CHAT, headers=ask_more) as response:
                assert response.headers["Access-Control-Allow-Headers"] == asked
                assert response.headers["Vary"] == "Origin, Access-Control-Request-Headers"
            ask_oddly = {**ask_first, "Access-Control-Request-Headers": 'x-a; "*"'}
            async with session.options(CHAT, headers=ask_oddly) as response:
                assert response.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
            methods = {
                CHAT: "POST",
                "/v1/models": "GET, HEAD",
                "/api/delete": "DELETE",
                "/v1/no": "GET, POST",
            }
            for path, allowed in methods.items():
                async with session.options(path, headers=ask_first) as response:
                    assert response.headers["Access-Control-Allow-Methods"] == allowed
            foreign = {**ask_more, "Origin": "https://evil.example"}
            async with session.options(CHAT, headers=foreign) as response:
                assert response.status == 403
                assert not [name for name in response.headers if name.lower().startswith("access-control")]
            headers = {**JSON, "Origin": page, "Sec-Fetch-Site": "cross-site"}
            async with session.post(CHAT, data=BODY, headers=headers) as response:
                assert response.status == 401
            async with session.post(CHAT, data=BODY, headers={**headers, **site.auth}) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == page
                assert response.headers["Vary"] == "Origin"
        assert (await ask(site, {**JSON, **site.auth, "Origin": "https://evil.example"}))[0] == 403


# ---- The token -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer é"},
        {"x-api-key": "wrong"},
        {"Cookie": f"token={TOKEN}"},
    ],
)
async def test_missing_or_wrong_token_is_refused(
    site: Site, runner: FakeRunner, headers: dict[str, str]
) -> None:
    async with aiohttp.ClientSession(site.url) as session:
        async with session.post(CHAT, data=BODY, headers={**JSON, **headers}) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"].startswith("Bearer")
            error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert TOKEN not in json.dumps(error)
    assert runner.jobs == []


async def test_token_in_query_is_refused(site: Site) -> None:
    for name in ("token", "api_key", "key", "access_token"):
        assert (await ask(site, JSON, path=f"{CHAT}?{name}={TOKEN}"))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": f"Bearer {TOKEN}"}, {"Authorization": f"bearer  {TOKEN}"}, {"x-api-key": TOKEN}],
)
async def test_both_ways_to_show_the_token_work(site: Site, headers: dict[str, str]) -> None:
    assert (await ask(site, {**JSON, **headers}))[0] == 200


async def test_only_liveness_is_open(site: Site) -> None:
    for path in ("/health/live", "/live", "/"):
        assert (await ask(site, {}, method="GET", path=path))[0] == 200
    for path in ("/health", "/ready", "/health/ready", "/nowhere", "/health/live/", "/LIVE", "/live/x"):
        assert (await ask(site, {}, method="GET", path=path))[0] == 401


async def test_refusals_are_counted_by_reason(runner: FakeRunner) -> None:
    metrics = FakeMetrics()
    async with serve(services(runner, metrics=metrics)) as site:
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {},
        ):
            await ask(site, {**JSON, **headers})
    assert metrics.refused == ["host", "origin", "fetch_site", "token"]


async def test_a_server_without_our_connections_trusts_no_client(runner: FakeRunner, tmp_path: Path) -> None:
    """Trust is a property of our own connections; anything else that serves the application has none."""
    plain = web.AppRunner(build_app(services(runner)))
    await plain.setup()
    path = tmp_path / "plain.sock"
    await web.UnixSite(plain, str(path)).start()
    async with aiohttp.ClientSession("http://fleetd", connector=aiohttp.UnixConnector(str(path))) as session:
        async with session.post(CHAT, data=BODY, headers=JSON) as response:
            assert response.status == 403
    await plain.cleanup()
    assert runner.jobs == []


# ---- Local users -----------------------------------------------------------------------------------------


async def test_control_api_over_tcp_is_not_there(site: Site) -> None:
    for method, path in (
        ("GET", "/fleet/v1/env"),
        ("POST", "/fleet/v1/models/remove"),
        ("GET", "/fleet/v1/status"),
    ):
        assert await ask(site, {**JSON, **site.auth}, method=method, path=path) == (404, "not_found")
        assert (await ask(site, JSON, method=method, path=path))[0] == 401


@pytest.mark.parametrize(("uid", "status"), [(os.geteuid(), 200), (0, 200), (54321, 403), (None, 403)])
async def test_other_users_on_the_unix_socket_are_refused(
    runner: FakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int | None, status: int
) -> None:
    monkeypatch.setattr(auth, "peer_uid", lambda transport: uid)
    async with serve_unix(services(runner), tmp_path / "s") as site, site.client(headers=JSON) as session:
        async with session.post(CHAT, data=BODY) as response:
            assert response.status == status
    assert len(runner.jobs) == (1 if status == 200 else 0)


async def test_own_user_needs_no_token_on_the_unix_socket(runner: FakeRunner, tmp_path: Path) -> None:
    async with serve_unix(services(runner), tmp_path / "s") as site, site.client(headers={}) as session:
        async with session.post(CHAT, data=BODY) as response:
            assert response.status == 200
        async with session.get("/fleet/v1/env") as response:
            assert (await response.json())["api_key"] == TOKEN
    assert [job.origin for job in runner.jobs] == ["socket"]
