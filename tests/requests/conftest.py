"""Fixtures of the tests of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeModels, FakePool
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
