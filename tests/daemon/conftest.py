"""Fixtures of the daemon's own parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from daemon_fakes import FakeModels, FakePool

from fleetd.jobs.runner import Runner
from fleetd.ledger import Ledger
from fleetd.metrics import Metrics
from fleetd.store import Store


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """`observe.configure` is global; no test may leave it to the next."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "fleetd.db")
    yield opened
    opened.close()


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("0")


@pytest.fixture
def make_runner(ledger: Ledger, metrics: Metrics) -> Callable[..., Runner]:
    """A runner over fakes; only an async test may call it (it makes asyncio objects)."""

    def make(pool: FakePool, models: FakeModels, **changes: Any) -> Runner:
        def embedded(ref: str) -> str | None:
            return "tiny" if ref in ("tiny", "tiny-alias") else None

        options: dict[str, Any] = {"default_model": "m", "embedded": embedded} | changes
        return Runner(pool=pool, models=models, ledger=ledger, metrics=metrics, **options)

    return make
