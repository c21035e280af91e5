from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import chain_model
import pytest
from asking import folder_of

from fleetd.engine.pool import EnginePool, PoolOptions
from fleetd.models.folder import ModelFolder


@pytest.fixture(scope="session")
def chain_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain_model.build(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def chain(chain_path: Path) -> ModelFolder:
    return folder_of(chain_path)


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[..., EnginePool]]:
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> EnginePool:
            pool = EnginePool(PoolOptions(**{"device": "cpu", "max_memory_bytes": 2 << 30, **options}))
            stack.push_async_callback(pool.close)
            return pool

        yield make


@pytest.fixture
def pool(make_pool: Callable[..., EnginePool]) -> EnginePool:
    return make_pool()
