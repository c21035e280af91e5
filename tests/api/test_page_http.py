"""The page's routes over TCP: who gets what, and what a session may do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_fakes import Site, serve, serve_unix, services
from kept_objects import without_collector
from msgspec.structs import replace

from fleetd.api.http.services import Services
from fleetd.api.page.files import FOLDER, PREFIX, SERVED
from fleetd.api.routes import ALL_ROUTES
from fleetd.control.daemon_status import RunningRequest
from fleetd.control.prefill_trace import Trace

SAME = {"Sec-Fetch-Site": "same-origin"}
HTML = {"Accept": "text/html,application/xhtml+xml"}
LIMIT_BYTES = 220_000


@pytest.fixture
def given() -> Services:
    return services()


@pytest.fixture
async def site(given: Services) -> Any:
    async with serve(given) as made:
        yield made


async def logged_in(site: Site, given: Services) -> aiohttp.ClientSession:
    """A browser that has redeemed a ticket."""
    session = aiohttp.ClientSession(site.url, headers=SAME, cookie_jar=aiohttp.CookieJar(unsafe=True))
    headers = {"X-Fleet-Ticket": given.page.issue()}
    async with session.post("/fleet/v1/page/session", headers=headers) as response:
        assert response.status == 200
        session.headers["X-Fleet-Page"] = (await response.json())["key"]
    return session


async def test_a_browser_gets_the_page_and_a_program_that_the_process_runs(site: Site) -> None:
    async with aiohttp.ClientSession(site.url) as session:
        async with session.get("/", headers=HTML) as response:
            assert response.content_type == "text/html"
        async with session.get("/") as response:
            assert (await response.json())["status"] == "ok"
        async with session.head("/") as response:
            assert response.status == 200


async def test_files_carry_a_strict_policy_and_are_sent_once(site: Site) -> None:
    async with aiohttp.ClientSession(site.url) as session:
        for name in SERVED:
            async with session.get("/" if name == "index.html" else PREFIX + name, headers=HTML) as response:
                assert response.status == 200
                policy = response.headers["Content-Security-Policy"]
                etag = response.headers["ETag"]
                assert "default-src 'self'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
            again = {**HTML, "If-None-Match": etag}
            async with session.get("/" if name == "index.html" else PREFIX + name, headers=again) as response:
                assert (response.status, await response.read()) == (304, b"")


async def test_nothing_beside_the_list_is_served(site: Site) -> None:
    async with aiohttp.ClientSession(site.url) as session:
        for path in ("/page/", "/page/../files.py", "/page/%2e%2e/files.py", "/page/files.py", "/page/x.js"):
            async with session.get(path, headers=HTML) as response:
                assert response.status in (401, 404)


def test_the_list_is_the_folder_and_small() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(SERVED)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < LIMIT_BYTES


def test_no_file_names_another_origin() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//cdn" not in text
        assert "https://" not in text
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert sink not in text, (path.name, sink)


async def test_a_ticket_is_for_the_unix_socket_and_its_url_for_the_browser(
    site: Site, given: Services, tmp_path: Path
) -> None:
    async with site.client() as session, session.post("/fleet/v1/page/ticket", json={}) as response:
        assert response.status == 404
    async with serve_unix(given, tmp_path / "s") as local, local.client() as session:
        async with session.post("/fleet/v1/page/ticket", json={}) as response:
            said = await response.json()
    assert said["url"].startswith("http://127.0.0.1:8114/#ticket=")
    assert given.page.redeem(said["url"].partition("#ticket=")[2]) is not None


async def test_a_ticket_becomes_a_cookie_that_scripts_and_other_sites_never_see(
    site: Site, given: Services
) -> None:
    headers = {**SAME, "X-Fleet-Ticket": given.page.issue()}
    async with aiohttp.ClientSession(site.url) as session:
        async with session.post("/fleet/v1/page/session", headers=headers) as response:
            cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        async with session.post("/fleet/v1/page/session", headers=headers) as response:
            assert response.status == 401
            assert "fleetctl open" in (await response.json())["error"]["hint"]


@pytest.mark.parametrize("headers", [{}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-site"}])
async def test_only_the_page_itself_may_log_in(site: Site, given: Services, headers: dict[str, str]) -> None:
    ticket = given.page.issue()
    async with aiohttp.ClientSession(site.url) as session:
        sent = {**headers, "X-Fleet-Ticket": ticket}
        async with session.post("/fleet/v1/page/session", headers=sent) as response:
            assert response.status == 403
    assert given.page.redeem(ticket) is not None


async def test_a_session_may_ask_what_the_page_needs_and_no_more(site: Site, given: Services) -> None:
    asked = {(route.method, route.path) for route in ALL_ROUTES if route.page}
    assert ("GET", "/fleet/v1/env") not in asked, "the page never learns the token"
    assert ("POST", "/fleet/v1/page/ticket") not in asked
    session = await logged_in(site, given)
    async with session:
        for route in ALL_ROUTES:
            if route.open or "{" in route.path or route.path == "/fleet/v1/events":
                continue
            if route.path.endswith("/logout"):
                continue
            body = {} if route.method in ("GET", "HEAD") else {"json": {}}
            async with session.request(route.method, route.path, **body) as response:
                refused = response.status == 404 and b"The page may not" in await response.read()
                assert refused != route.page, route.path


@pytest.mark.parametrize(
    "change",
    [
        {"X-Fleet-Page": "wrong"},
        {"X-Fleet-Page": ""},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "evil.example"},
    ],
)
async def test_a_session_from_elsewhere_opens_nothing(
    site: Site, given: Services, change: dict[str, str]
) -> None:
    session = await logged_in(site, given)
    async with session:
        for method, path in (("GET", "/fleet/v1/status"), ("POST", "/fleet/v1/unpair")):
            async with session.request(method, path, json={}, headers=change) as response:
                assert response.status in (401, 403)


async def test_the_cookie_alone_opens_nothing(site: Site, given: Services) -> None:
    session = await logged_in(site, given)
    async with session:
        del session.headers["X-Fleet-Page"]
        async with session.get("/fleet/v1/status") as response:
            assert response.status == 401


async def test_a_form_cannot_use_a_session(site: Site, given: Services) -> None:
    session = await logged_in(site, given)
    async with session:
        async with session.post("/fleet/v1/unpair", data={"peer": "studio"}) as response:
            assert response.status == 415


async def test_logging_out_ends_the_session(site: Site, given: Services) -> None:
    session = await logged_in(site, given)
    async with session:
        async with session.post("/fleet/v1/page/logout", json={}) as response:
            assert response.status == 200
        async with session.get("/fleet/v1/status") as response:
            assert response.status == 401


async def test_two_daemons_on_one_machine_do_not_log_each_other_out(given: Services) -> None:
    other = services()
    async with serve(given) as one, serve(other) as two:
        session = await logged_in(one, given)
        async with session:
            headers = {"X-Fleet-Ticket": other.page.issue()}
            url = f"{two.url}/fleet/v1/page/session"
            async with session.post(url, headers=headers) as response:
                assert response.status == 200
            async with session.get("/fleet/v1/status") as response:
                assert response.status == 200


# ---- Events ----------------------------------------------------------------------------------------------


class Watched:
    """A daemon whose state the test sets."""

    def __init__(self) -> None:
        self.given = services()
        self.status = self.given.status()
        self.requests: list[RunningRequest] = []
        self.traces: list[Trace] = []
        self.services = services(
            status=lambda: self.status,
            running=lambda: self.requests,
            ended=lambda number: (len(self.traces), self.traces[number:] if number >= 0 else []),
        )


async def next_change(response: aiohttp.ClientResponse) -> dict[str, Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return found
    raise AssertionError("the stream ended")


async def test_events_tell_everything_first_and_then_what_changes() -> None:
    watched = Watched()
    async with serve(watched.services) as site:
        session = await logged_in(site, watched.services)
        async with session, session.get("/fleet/v1/events") as response:
            first = await next_change(response)
            assert first["full"]
            assert first["status"]["version"] == "0.1.0"
            watched.requests = [
                RunningRequest(id="r1", model="m", stage="reading the prompt", done=1, total=2)
            ]
            change = await next_change(response)
            assert change["requests"]["r1"]["done"] == 1
            assert "status" not in change
            watched.traces = [Trace(id="r1", model="m")]
            watched.requests = []
            change = await next_change(response)
            if "traces" not in change:
                change |= await next_change(response)
            assert change["requests"] == {"r1": None}
            assert change["traces"][0]["id"] == "r1"


@pytest.mark.one_loop
async def test_fifty_listeners_that_break_off_are_freed_without_the_garbage_collector() -> None:
    watched = Watched()
    async with serve(watched.services) as site:
        session = await logged_in(site, watched.services)

        async def broken_off() -> None:
            response = await session.get("/fleet/v1/events")
            await next_change(response)
            response.close()

        async with session:
            await broken_off()
            with without_collector() as kept:
                for _ in range(50):
                    await broken_off()
                await kept.until_few(5)
                assert kept.n_bytes < 1 << 20
    assert not watched.services.listeners


async def test_events_end_when_the_daemon_stops_and_when_the_page_logs_out() -> None:
    watched = Watched()
    async with serve(watched.services) as site:
        session = await logged_in(site, watched.services)
        async with session:
            async with session.get("/fleet/v1/events") as response:
                await next_change(response)
                watched.status = replace(watched.status, draining=True)
                assert (await next_change(response))["status"]["draining"]
                assert (await response.content.read()).strip() == b""
            watched.status = replace(watched.status, draining=False)
            async with session.get("/fleet/v1/events") as response:
                await next_change(response)
                async with session.post("/fleet/v1/page/logout", json={}):
                    pass
                assert (await response.content.read()).strip() == b""
    assert not watched.services.listeners
