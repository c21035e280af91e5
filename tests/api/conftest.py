"""A served application per test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import browser as browsers
import pytest
from api_fakes import MODEL, TOKEN, FakeRunner, Site, Target, scripts, serve, serve_in_thread, services
from browser import Visit
from page_fakes import PageWorld


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
async def site(runner: FakeRunner) -> AsyncIterator[Site]:
    async with serve(services(runner)) as made:
        yield made


@pytest.fixture
async def client(site: Site) -> AsyncIterator[aiohttp.ClientSession]:
    async with site.client() as session:
        yield session


@pytest.fixture(scope="module")
def scripted() -> Iterator[Target]:
    with serve_in_thread(lambda: services(FakeRunner(scripts))) as site:
        yield Target(f"{site.url}/v1", TOKEN, MODEL, tools=True)


@pytest.fixture(scope="module")
def target(scripted: Target) -> Target:
    """Where real clients go: the scripted daemon, or a live one that the environment names."""
    if base_url := os.environ.get("FLEETD_TEST_BASE_URL"):
        model = os.environ.get("FLEETD_TEST_MODEL", MODEL)
        key = os.environ.get("FLEETD_TEST_API_KEY", "")
        return Target(base_url, key, model, tools=os.environ.get("FLEETD_TEST_TOOLS") == "1")
    return scripted


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Not for async tests: a browser's driver has this thread's loop while it is open."""
    with browsers.browser() as made:
        yield made


@pytest.fixture(scope="module")
def person(chromium: Any) -> Visit:
    return Visit(chromium)


@pytest.fixture
def world(chromium: Any, person: Visit) -> Iterator[PageWorld]:
    """A daemon, its page and people; at the end no page may have complained."""
    made = PageWorld(chromium, person)
    with serve_in_thread(made.services) as site:
        made.site = site
        yield made
        for visit in made.visits:
            visit.close()
        for page in person.context.pages:
            page.close()
    complaints = [text for visit in (person, *made.visits) for text in visit.complaints]
    person.complaints.clear()
    assert complaints == []
