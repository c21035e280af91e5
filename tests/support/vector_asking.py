"""Ask an engine pool for vectors or scores of texts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from fleetd.engine.daemon_side.pool import EnginePool
from fleetd.engine.protocol import EmbedTexts, Event, Loading, RerankTexts
from fleetd.models.folder import ModelFolder, read_folder


def vectors_folder(path: Path) -> ModelFolder:
    return read_folder(path, name=path.name, source="folder", revision=None)


async def vector_events(
    pool: EnginePool, model: ModelFolder, request: EmbedTexts | RerankTexts
) -> list[Event]:
    async with asyncio.timeout(60), aclosing(pool.vectors(model, request)) as told:
        return [event async for event in told if not isinstance(event, Loading)]
