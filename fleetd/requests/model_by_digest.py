"""The models of this machine that others may ask for: those on its card, with just those files."""

from __future__ import annotations

import asyncio

from fleetd.errors import ModelNotFound
from fleetd.models.folder import ModelFolder
from fleetd.models.model_store import ModelStore
from fleetd.p2p.membership.cards import Card


async def model_by_digest(models: ModelStore, card: Card, model: str, digest: str) -> ModelFolder:
    """The folder that ``card`` shows with this digest; its name here may be another. Raises ModelNotFound."""
    name = next((m.name for m in card.models if m.digest == digest), None)
    if name is None:
        raise ModelNotFound(f"This machine does not have these files of {model} (any more).")
    return await asyncio.to_thread(models.resolve, name)
