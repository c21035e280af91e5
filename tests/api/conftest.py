"""A served application per test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from api_fakes import FakeRunner, Site, serve, services


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
