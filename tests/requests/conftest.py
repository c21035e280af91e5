"""Fixtures of the tests of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import FakeModels, FakePool
from kept_machines import FormedMachines, KeptMachines, LastingMachines
from runners import runner_over

from fleetd.requests.ledger import Ledger
from fleetd.requests.metrics import Metrics
from fleetd.requests.runner import RequestRunner


@pytest.fixture
def make_runner(ledger: Ledger, metrics: Metrics) -> Callable[..., RequestRunner]:
    """A runner over fakes; only an async test may call it (it makes asyncio objects)."""

    def make(pool: FakePool, models: FakeModels, **changes: Any) -> RequestRunner:
        def embedded(ref: str) -> str | None:
            return "tiny" if ref in ("tiny", "tiny-alias") else None

        options: dict[str, Any] = {"embedded": embedded} | changes
        return runner_over(pool, models, ledger, metrics, **options)

    return make


@pytest.fixture(scope="module")
def lasting(form: Callable[[], FormedMachines]) -> Iterator[LastingMachines]:
    """``form``: a fixture of the module."""
    found = LastingMachines(form)
    yield found
    found.end()


@pytest.fixture
def kept(lasting: LastingMachines, request: pytest.FixtureRequest) -> Iterator[KeptMachines]:
    """Machines that outlast one test, unless it fails."""
    yield from lasting.lent(request.session)
